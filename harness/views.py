"""Views of a record file: the console's table, HTML, JUnit, a CI step summary, two runs side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from harness import jsonl, junit
from harness.console import View
from harness.records import Record, Summary
from harness.tally import FAULT, INVALID, OK
from harness.types import UsageError

#: GitHub gives every step a file whose markdown it shows on the run's page; steps append to it
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


@dataclass(frozen=True)
class Files:
    """What a command is asked to write."""

    json: Path | None = None
    html: Path | None = None
    junit: Path | None = None
    dump: Path | None = None
    step_summary: Path | None = None

    def any(self) -> bool:
        """Whether anything but the terminal is written."""
        return any((self.json, self.html, self.junit, self.dump, self.step_summary))


def show(path: Path, files: Files, out: TextIO) -> int:
    """Print a run and write the views asked for. Showing a failed run is no failure: the code is 0.

    A run that was killed has no summary; it is shown as far as it came, marked interrupted.
    """
    records = jsonl.read(path, partial=True)
    view = View(out)
    for record in records[:-1]:
        view.add(record)
    problems = write(records, path, files, view)
    last = records[-1]
    assert isinstance(last, Summary)
    view.finish(last)
    for problem in problems:
        raise problem
    return OK


def compare(a: Path, b: Path, files: Files, out: TextIO) -> int:
    """Print what got worse from run ``a`` to run ``b``: 1 if anything did, 3 if they share nothing to compare."""
    from harness.report import compare as comparison

    text, worse = comparison.console(a, b)
    print(text, file=out)
    if files.step_summary is not None:
        from harness.report.summary import code

        _append(files.step_summary, "".join(f"<pre>{code(text)}</pre>\n"))
    return FAULT if worse else INVALID if text.endswith(comparison.NOTHING) else OK


def write(records: Sequence[Record], path: Path, files: Files, view: View) -> list[UsageError]:
    """Write the views of a record file. One that cannot be written does not keep the others from it."""
    problems = []
    for target, make in ((files.html, _html), (files.junit, _junit), (files.step_summary, _step_summary)):
        if target is None:
            continue
        try:
            make(records, path, target, view)
        except UsageError as error:
            problems.append(error)
    return problems


def _html(records: Sequence[Record], path: Path, target: Path, view: View) -> None:
    from harness.report.html import render

    render(path, target)
    view.notes.append(f"page: {target}")


def _junit(records: Sequence[Record], path: Path, target: Path, view: View) -> None:
    junit.write(records, target)


def _step_summary(records: Sequence[Record], path: Path, target: Path, view: View) -> None:
    from harness.report.summary import step_summary

    _append(target, step_summary(path))


def _append(target: Path, text: str) -> None:
    try:
        with target.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise UsageError(
            f"cannot write {target}: {error.strerror}; name a file in an existing, writable folder"
        ) from error


def step_summary_file(given: Path | None) -> Path | None:
    """The file to append to: the one given, else the one that GitHub names, if it can be written."""
    if given is not None:
        return given
    named = os.environ.get(STEP_SUMMARY)
    if not named:
        return None
    path = Path(named)
    return path if os.access(path if path.exists() else path.parent, os.W_OK) and not path.is_dir() else None
