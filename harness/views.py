"""Views of a record file: the console's table, HTML, JUnit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from harness import jsonl, junit
from harness.console import View
from harness.records import Record, Summary
from harness.types import UsageError


def show(path: Path, html: Path | None, xml: Path | None, out: TextIO) -> int:
    """Print a finished run and write the views asked for. Showing a failed run is no failure: the code is 0."""
    records = jsonl.read(path)
    view = View(out)
    for record in records[:-1]:
        view.add(record)
    write(records, path, html, xml, view)
    last = records[-1]
    assert isinstance(last, Summary)
    view.finish(last)
    return 0


def write(records: Iterable[Record], path: Path, html: Path | None, xml: Path | None, view: View) -> None:
    """Write HTML (from the record file) and JUnit (from the same records)."""
    if html is not None:
        from harness.report.html import render

        try:
            render(path, html)
        except OSError as error:
            raise UsageError(f"cannot write {html}: {error.strerror}") from error
        view.notes.append(f"page: {html}")
    if xml is not None:
        junit.write(records, xml)
