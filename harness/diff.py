"""``harness diff``: run the engine and hand every record to the file, the terminal and the views."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from harness import views
from harness.case import Case
from harness.console import View
from harness.jsonl import Writer
from harness.records import Record, Summary
from harness.tally import Tally
from harness.types import UsageError


class Stopped(BaseException):
    """SIGINT or SIGTERM: end the run, keep what is there."""


def diff(
    case: Case, request: Mapping[str, Any], json: Path | None, html: Path | None, xml: Path | None, out: TextIO
) -> int:
    """Run a case; returns the exit code of its summary. Interrupted runs keep their records and are INVALID (3)."""
    start = time.perf_counter()
    from harness import engine
    from harness.plan import Request

    clock = engine.Clock({"import": time.perf_counter() - start}, start)
    view, tally = View(out), Tally()
    kept: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="harness-") as folder:
        path = json if json is not None else Path(folder) / "run.jsonl"
        writer = Writer(path)

        def emit(record: Record) -> None:
            tally.add(record)
            kept.append(record)
            writer.write(record)
            if not isinstance(record, Summary):
                view.add(record)

        try:
            with view.live(), _signals():
                for record in engine.run(case, Request(**request), clock):
                    emit(record)
        except Stopped:
            emit(tally.summary(clock.total(), interrupted=True))
        except UsageError as error:
            if kept:  # a run that began: its records stay readable
                emit(tally.summary(clock.total(), error=str(error), usage=True))
            raise
        finally:
            writer.close()
        views.write(kept, path, html, xml, view)
    summary = kept[-1]
    assert isinstance(summary, Summary)
    view.finish(summary)
    return summary.exit_code


@contextmanager
def _signals() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into Stopped, where this thread may (the main one)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for name in before:
            signal.signal(name, signal.SIG_IGN)  # the summary is being written: a second signal must not cut it
        raise Stopped

    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    for name in before:
        signal.signal(name, stop)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
