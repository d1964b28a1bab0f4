"""``harness generate``: text on the terminal as it is made, records into the file, the verdict at the end."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from harness import views
from harness.case import Case
from harness.console import View
from harness.diff import Stopped, signals
from harness.generate.columns import Columns, Plain
from harness.generate.tally import GenerationTally
from harness.jsonl import Writer
from harness.records import Certification, Comparison, Record, Summary, Verdict, Weights
from harness.types import InvalidRun, UsageError


def generate(
    case: Case, wish: dict[str, object], command: str, json: Path | None, html: Path | None, out: TextIO
) -> int:
    """Run a generation; returns the exit code of its summary. An interrupted one keeps its records (3)."""
    start = time.perf_counter()
    from harness import engine
    from harness.generate.run import Run, Wish

    clock = engine.Clock({"import": time.perf_counter() - start}, start)
    wanted = Wish(**wish)  # type: ignore[arg-type]
    run = Run(case, wanted, command, clock)
    show = Columns(out) if wanted.side == "both" else Plain(out)
    run.watchers.append(show)
    view, tally, kept = View(out), GenerationTally(), list[Record]()
    with tempfile.TemporaryDirectory(prefix="harness-") as folder:
        path = json if json is not None else Path(folder) / "run.jsonl"
        writer = Writer(path)

        def emit(record: Record) -> None:
            tally.add(record)
            kept.append(record)
            writer.write(record)
            if _worth_a_line(record):
                show.pause()
                view.add(record)

        try:
            with signals():
                for record in run.records():
                    emit(record)
            emit(tally.summary(clock.total()))
        except Stopped:
            for step in run.rest():
                emit(step)
            emit(tally.summary(clock.total(), interrupted=True))
        except InvalidRun as error:
            emit(tally.summary(clock.total(), error=str(error)))
        except UsageError as error:
            if kept:
                emit(tally.summary(clock.total(), error=str(error), usage=True))
            raise
        finally:
            show.close()
            writer.close()
        view.notes += tally.notes(run)
        views.write(kept, path, html, None, view)
    summary = kept[-1]
    assert isinstance(summary, Summary)
    view.finish(summary)
    sys.stdout.flush()
    return summary.exit_code


def _worth_a_line(record: Record) -> bool:
    """Text is what a reader came for: of the rest only what went wrong."""
    if isinstance(record, Comparison | Weights):
        return record.verdict not in (Verdict.PASS, Verdict.SKIPPED) and getattr(record, "mode", "local") == "local"
    return isinstance(record, Certification) and not record.ok
