"""The table of what ran on a GPU, from reports/h200: ``python -m benchmarks.evidence`` rewrites it in README.md.

Every file begins with a line that names the hash of the kernel sources it was made from. Figures of other sources than
today's are shown as stale.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from production.cuda import loader

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "reports" / "h200"
BEGIN, END = "<!-- gpu evidence -->", "<!-- end of gpu evidence -->"


def table(folder: Path = FOLDER, sources: str | None = None) -> str:
    """Markdown: one row a kernel, then what the sanitizer said."""
    now = sources or loader.source_hash()
    parity, bench, sanitizer = (_read(folder / f"{name}.jsonl") for name in ("parity", "bench", "sanitizer"))
    head = parity[0]
    lines = ["| kernel | parity | worst margin | microseconds at T = 1, 16, 64, 4096 | floor | vLLM |"]
    lines += ["|---|---|---|---|---|---|"]
    for name in dict.fromkeys(line["kernel"] for line in parity[1:]):
        mine = [line for line in parity[1:] if line["kernel"] == name]
        good = sum(line["ok"] for line in mine)
        worst = max(max(line["margins"].values()) for line in mine)
        timed = [line for line in bench[1:] if line["kernel"] == name and line["size"] == "flash"]
        cells = [", ".join(f"{line[key]:g}" for line in timed) for key in ("us", "floor_us", "vllm_us")]
        row = [name, f"{good}/{len(mine)}{_stale(head, now)}", f"{worst:.3f}", cells[0] + _stale(bench[0], now)]
        lines.append(f"| {' | '.join([*row, *cells[1:]])} |")
    said = ", ".join(f"{line['tool']}: {'clean' if line['ok'] else line['summary']}" for line in sanitizer[1:])
    lines.append("")
    lines.append(f"{head['gpu']}, driver {head['driver']}, torch {head['torch']}, kernel sources {head['sources']}.")
    lines.append(f"compute-sanitizer at T = 3 and 129: {said}{_stale(sanitizer[0], now)}.")
    return "\n".join(lines)


def _stale(header: dict[str, Any], now: str) -> str:
    return "" if header["sources"] == now else f" (stale: of {header['sources']}, sources are {now})"


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def placed(text: str) -> str:
    """README's text with today's table between the marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(placed(readme.read_text()))
    sys.exit(0)
