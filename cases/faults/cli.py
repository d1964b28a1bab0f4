"""``harness faults [ID-GLOB] [--json FILE] [--html FILE]``: the catalogue, run and laid out as a matrix."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from harness.types import UsageError

EPILOG = "exit codes: 0 every fault that can run is caught and placed; 1 one is not; 2 bad input"


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Attach ``faults`` to the subparsers of a command line that calls ``args.command(args)``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "faults", help="plant known faults in production and see which are caught", epilog=EPILOG
    )
    parser.add_argument("glob", nargs="?", default="*", metavar="ID-GLOB", help="only these (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write a JSON line a fault")
    parser.add_argument("--html", metavar="FILE", help="write a page that opens offline")
    parser.set_defaults(command=_faults)
    parser.allow_abbrev = False
    return parser


def _writable(option: str, text: str | None) -> Path | None:
    """An output path that can be written, before any work is done."""
    if text is None:
        return None
    path = Path(text)
    if not text or "\0" in text or path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{option} {text!r}: expected a file name in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {text!r} cannot be written: permission denied")
    return path


def _faults(args: argparse.Namespace) -> int:
    json_file, html_file = _writable("--json", args.json), _writable("--html", args.html)
    from cases.faults import page, run, table

    faults, rows = run.choose(args.glob), []
    seconds = 0.0
    widths = (max(len(f.id) for f in faults), 6, 5, 5, 5, *[max(6, len(g)) for g in table.gates.NAMES], 0)
    out = sys.stdout
    if not out.isatty():
        print(_line(table.HEAD, widths), file=out, flush=True)
    for found in run.run(faults):
        rows.append(found.row())
        seconds += found.seconds
        if not out.isatty():
            print(_line(table.cells(rows[-1]), widths), file=out, flush=True)
    if out.isatty():
        _rich(rows)
    sums = table.totals(rows)
    for line in table.lines(sums):
        print(line, file=out)
    print(f"{len(rows)} faults, {seconds:.0f} s", file=out)
    if json_file:
        json_file.write_text("".join(json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in rows))
    if html_file:
        html_file.write_text(page.page(rows), encoding="utf-8")
    return 0 if sums.good else 1


def _line(cells: tuple[str, ...], widths: tuple[int, ...]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _rich(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from cases.faults import table

    view = Table(box=None, pad_edge=False, header_style="bold")
    for title in table.HEAD:
        view.add_column(title, no_wrap=title == "id")
    for row in rows:
        view.add_row(*table.cells(row), style="" if row["caught"] is None or table.placed(row) else "bold red")
    Console().print(view)
