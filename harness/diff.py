"""``harness diff``: run the engine and hand every record to the file, the terminal and the views."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from harness import views
from harness.case import Case
from harness.console import View
from harness.early import Output, Signals, Stopped
from harness.jsonl import Writer
from harness.records import Record, Summary
from harness.tally import INVALID, Tally
from harness.types import UsageError, one_line
from harness.views import Files


def diff(case: Case, request: Mapping[str, Any], files: Files, out: Output) -> int:
    """Run a case; returns the exit code of its summary. Interrupted runs keep their records and are INVALID (3)."""
    try:
        with tempfile.TemporaryDirectory(prefix="harness-") as folder, Signals() as signals:
            return _diff(case, request, files, out, signals, files.json or Path(folder) / "run.jsonl")
    except Stopped:  # before the first record
        print("harness: interrupted before anything was compared", file=sys.stderr)
        return INVALID
    except FileNotFoundError as error:
        if "temporary directory" not in str(error):
            raise
        raise UsageError(f"{error.strerror}; free some space there or set TMPDIR") from error


def _diff(case: Case, request: Mapping[str, Any], files: Files, out: Output, signals: Signals, path: Path) -> int:
    start = time.perf_counter()
    from harness import engine
    from harness.dump import Keeper
    from harness.plan import Request

    clock = engine.Clock({"import": time.perf_counter() - start}, start)
    keeper = Keeper(files.dump, bool(request.get("stages"))) if files.dump else None
    out.needed = not files.any()
    view, tally, writer = View(cast(TextIO, out)), Tally(), Writer(path)
    kept: list[Record] = []
    failure: UsageError | None = None

    def emit(record: Record) -> None:
        with signals.held():
            tally.add(record)
            kept.append(record)
            writer.write(record)
            if keeper is not None:
                keeper.see(record)
            if not isinstance(record, Summary):
                view.add(record)

    try:
        with view.live():
            for record in engine.run(case, Request(**request), clock, keeper):
                emit(record)
    except Stopped:
        if not kept:
            raise
        with suppress(UsageError):
            emit(tally.summary(clock.total(), interrupted=True))
    except UsageError as error:
        if not kept:
            raise
        failure = error  # the run began: its records stay readable and their views are written
        with suppress(UsageError):
            emit(tally.summary(clock.total(), error=str(error), usage=True))
    except Exception as error:
        if kept:
            with suppress(UsageError):
                emit(tally.summary(clock.total(), error=one_line(error)))
        raise
    finally:
        writer.close()
    summary = kept[-1]
    assert isinstance(summary, Summary)
    problems = views.write(kept, path, files, view)
    if keeper is not None:
        try:
            view.notes.append(keeper.write(summary.first_fault))
        except UsageError as error:
            problems.append(error)
    if failure is None:
        view.finish(summary)
    for problem in filter(None, (failure, *problems)):
        raise problem
    return summary.exit_code
