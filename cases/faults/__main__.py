"""``python -m cases.faults``: puts the totals of the stored result into the README."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from cases.faults import table

ROOT = Path(__file__).parents[2]
STORED = ROOT / "reports" / "faults" / "cpu.jsonl"
MARKS = "<!-- faults -->", "<!-- end of faults -->"


def main() -> int:
    """Rewrite what stands between the two marks."""
    rows = [json.loads(line) for line in STORED.read_text().splitlines()]
    readme = ROOT / "README.md"
    text, found = re.subn(
        f"{MARKS[0]}.*?{MARKS[1]}",
        lambda _: f"{MARKS[0]}\n{table.markdown(table.totals(rows))}\n{MARKS[1]}",
        readme.read_text(),
        flags=re.DOTALL,
    )
    if found != 1:
        print(f"README.md: expected one {MARKS[0]} … {MARKS[1]}, found {found}", file=sys.stderr)
        return 2
    readme.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
