"""``harness generate``: text on the terminal as it is made, records into the file, the verdict at the end."""

from __future__ import annotations

import shlex
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
from harness.records import Certification, Comparison, Record, Summary, Verdict, Weights
from harness.tally import INVALID
from harness.types import InvalidRun, UsageError, one_line
from harness.views import Files


def run(case: Case, wish: Mapping[str, Any], files: Files, out: Output) -> int:
    """Run a generation; returns the exit code of its summary. An interrupted one keeps its records (3)."""
    try:
        with tempfile.TemporaryDirectory(prefix="harness-") as folder, Signals() as signals:
            return _run(case, wish, files, out, signals, files.json or Path(folder) / "run.jsonl")
    except Stopped:  # before the first record
        print("harness: interrupted before anything was generated", file=sys.stderr)
        return INVALID


def _run(case: Case, wish: Mapping[str, Any], files: Files, out: Output, signals: Signals, path: Path) -> int:
    start = time.perf_counter()
    from harness import engine
    from harness.generate.columns import Columns, Plain, Show
    from harness.generate.run import Run, Wish
    from harness.generate.tally import GenerationTally

    clock = engine.Clock({"import": time.perf_counter() - start}, start)
    wanted = Wish(**wish)
    made = Run(case, wanted, _command(case, wish), clock)
    text = cast(TextIO, out)
    show: Show = Columns(text) if wanted.side == "both" else Plain(text)
    made.watchers.append(show)
    out.needed = not files.any()
    view, tally, writer, kept = View(text), GenerationTally(), Writer(path), list[Record]()
    failure: UsageError | None = None

    def emit(record: Record) -> None:
        with signals.held():
            tally.add(record)
            kept.append(record)
            writer.write(record)
            if _worth_a_line(record):
                show.pause()
                view.add(record)

    try:
        for record in made.records():
            emit(record)
        emit(tally.summary(clock.total()))
    except Stopped:
        if not kept:
            raise
        with suppress(UsageError):
            for step in made.rest():
                emit(step)
            emit(tally.summary(clock.total(), interrupted=True))
    except InvalidRun as error:
        emit(tally.summary(clock.total(), error=str(error)))
    except UsageError as error:
        if not kept:
            raise
        failure = error
        with suppress(UsageError):
            emit(tally.summary(clock.total(), error=str(error), usage=True))
    except Exception as error:
        if kept:
            with suppress(UsageError):
                emit(tally.summary(clock.total(), error=one_line(error)))
        raise
    finally:
        show.pause()
        writer.close()
    summary = kept[-1]
    assert isinstance(summary, Summary)
    view.notes += tally.notes(made)
    problems = views.write(kept, path, files, view)
    if failure is None:
        view.finish(summary)
    for problem in filter(None, (failure, *problems)):
        raise problem
    return summary.exit_code


def _command(case: Case, wish: Mapping[str, Any]) -> str:
    """The command line that repeats this generation."""
    words = ["harness", "generate", *case.argument]
    usual = {"temperature": 0.0, "seed": 0, "side": "both", "follow": "reference"}
    for name in ("max_new_tokens", "temperature", "seed", "side", "follow"):
        if wish[name] != usual.get(name):
            words += [f"--{name.replace('_', '-')}", str(wish[name])]
    for name in ("bypass", "replace"):
        for value in wish[name]:
            words += [f"--{name}", value]
    return shlex.join([*words, *(["--direct-residual"] if wish["direct_residual"] else [])])


def _worth_a_line(record: Record) -> bool:
    """Text is what a reader came for: of the rest only what went wrong."""
    if isinstance(record, Comparison | Weights):
        bad = record.verdict not in (Verdict.PASS, Verdict.SKIPPED)
        return bad and getattr(record, "mode", "local") == "local"
    return isinstance(record, Certification) and not record.ok
