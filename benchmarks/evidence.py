"""The table of what ran on a GPU, from reports/h200: ``python -m benchmarks.evidence`` rewrites it in README.md.

Every file (parity*.jsonl, bench*.jsonl, sanitizer*.jsonl) begins with a line that holds the hash of each kernel source
with its headers; a line below names its source as ``unit``. Figures of sources other than today's are shown as stale.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from production.cuda import loader

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "reports" / "h200"
BEGIN, END = "<!-- gpu evidence -->", "<!-- end of gpu evidence -->"


def table(folder: Path = FOLDER, now: Mapping[str, str] | None = None) -> str:
    """Markdown: one row a kernel, then the machine, then what the sanitizer said."""
    now = loader.unit_hashes() if now is None else now
    parity, bench, sanitizer = (_read(folder, kind, now) for kind in ("parity", "bench", "sanitizer"))
    lines = ["| kernel | parity | worst margin | microseconds at T = 1, 16, 64, 4096 | floor | vLLM |"]
    lines += ["|---|---|---|---|---|---|"]
    for name in dict.fromkeys(line["kernel"] for line in parity):
        mine = [line for line in parity if line["kernel"] == name]
        good = sum(line["ok"] for line in mine)
        worst = max(max(line["margins"].values()) for line in mine)
        timed = [line for line in bench if line["kernel"] == name and line["size"] == "flash"]
        cells = [", ".join(f"{line[key]:g}" for line in timed) for key in ("us", "floor_us", "vllm_us")]
        row = [name, f"{good}/{len(mine)}{mine[0]['stale']}", f"{worst:.3f}", cells[0] + timed[0]["stale"]]
        lines.append(f"| {' | '.join([*row, *cells[1:]])} |")
    lines.append("")
    for machine in dict.fromkeys(line["machine"] for line in parity):
        lines.append(f"{machine}.")
    for unit in dict.fromkeys(line["unit"] for line in sanitizer):
        mine = [line for line in sanitizer if line["unit"] == unit]
        said = ", ".join(f"{line['tool']}: {'clean' if line['ok'] else line['summary']}" for line in mine)
        lines.append(f"compute-sanitizer, {unit} at T = 3 and 129: {said}{mine[0]['stale']}.")
    return "\n".join(lines)


def _read(folder: Path, kind: str, now: Mapping[str, str]) -> list[dict[str, Any]]:
    """The lines of all files of a kind, each with what its header says of it."""
    found = []
    for path in sorted(folder.glob(f"{kind}*.jsonl")):
        head, *lines = map(json.loads, path.read_text().splitlines())
        machine = f"{head['gpu']}, driver {head['driver']}, torch {head['torch']}"
        for line in lines:
            was, is_ = head["sources"][line["unit"]], now.get(line["unit"], "gone")
            stale = "" if was == is_ else f" (stale: of {was}, {line['unit']} is {is_})"
            found.append({**line, "machine": machine, "stale": stale})
    return found


def placed(text: str) -> str:
    """README's text with today's table between the marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(placed(readme.read_text()))
    sys.exit(0)
