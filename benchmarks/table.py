"""The README's table of what a run costs, from reports/bench/cpu.json: ``python -m benchmarks.table`` rewrites it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "reports" / "bench" / "cpu.json"
BEGIN, END = "<!-- bench -->", "<!-- end of bench -->"


def table(stored: dict[str, Any]) -> str:
    """Markdown: a row a figure, those above their limit marked, then the machine."""
    lines = ["| | measured | limit | |", "|---|---|---|---|"]
    for name, f in stored["figures"].items():
        value = f"{f['value']:.3g}" if f["ok"] else f"**{f['value']:.3g}, exceeded**"
        lines.append(f"| {name} | {value} | {f['limit']:.3g} | {f['meaning']} |")
    machine = stored["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers"))
    return "\n".join([*lines, "", f"{machine['cores']} cores, {machine['machine']}, {versions}."])


def placed(text: str) -> str:
    """README's text with today's table between the marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(json.loads(STORED.read_text()))}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Rewrite what stands between the two marks."""
    readme = ROOT / "README.md"
    readme.write_text(placed(readme.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
