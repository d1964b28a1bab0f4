"""The command: a line a forward while the search goes on, then what it found; the same as JSON lines."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from harness import jsonl
from harness.bisect import search, setup
from harness.bisect.forward import Outcome
from harness.bisect.search import Found, figure
from harness.case import Case
from harness.plan import Request
from harness.records import Record
from harness.tally import FAULT, INVALID, OK
from harness.types import InvalidRun, UsageError

NAMED = 3  # stages of a forward that are named on the console


class Lines:
    """JSON lines, flushed one by one; nothing where no file is wanted."""

    def __init__(self, path: Path | None) -> None:
        try:
            self._file = path.open("w", encoding="utf-8") if path else None
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; name another file") from error

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *reason: object) -> None:
        if self._file:
            self._file.close()

    def record(self, record: Record) -> None:
        self._write(jsonl.encode(record))

    def row(self, kind: str, **values: Any) -> None:
        self._write(json.dumps({"kind": kind, **values}, allow_nan=False, separators=(",", ":")))

    def _write(self, line: str) -> None:
        if self._file:
            print(line, file=self._file, flush=True)


def run(case: Case, request: Request, target: Path | None, out: TextIO) -> int:
    """Bisect a case: 0 nothing to bisect, 1 found, 3 nothing can be concluded."""
    begin = time.perf_counter()
    bisection = setup.prepare(case, request)
    names = [u.name for u in bisection.candidates]
    shown = bisection.config
    layers = ",".join(map(str, shown.layers)) or "none"
    head = f"{case.name}: {case.batch} x {shown.length} tokens, layers {layers}, {case.dtype}: {len(names)} stages"
    print(head, file=out, flush=True)
    with Lines(target) as lines:
        lines.record(shown)

        judged: list[frozenset[str]] = []

        def watch(chosen: frozenset[str], outcome: Outcome) -> None:
            judged.append(chosen)
            production = [n for n in names if n in chosen]
            print(f"{describe(production, names):<60} {word(outcome)} {figure(outcome)}", file=out, flush=True)
            lines.row("forward", production=production, **plain(outcome))

        try:
            for check in bisection.certified():
                lines.record(check)
            forward = bisection.forward()
            forward.watch = watch
            found = search.find(forward, bisection.layers, bisection.replaced)
        except InvalidRun as error:
            line = f"INVALID: {error}"
            lines.row("bisect", exit_code=INVALID, forwards=len(judged), line=line)
            print(line, file=out)
            return INVALID
        code = FAULT if found.swapped else OK
        facts = {
            "swapped": list(found.swapped),
            "sets": [list(s) for s in found.sets],
            "cancels": found.cancels,
            "alone": {n: plain(o) for n, o in found.alone.items()},
            "restored": plain(found.restored) if found.restored else None,
        }
        lines.row("bisect", exit_code=code, **facts, forwards=forward.forwards, line=found.line)
    for text in explained(found):
        print(text, file=out)
    seconds = time.perf_counter() - begin
    print(f"{forward.forwards} forwards, {forward.stages_run} stages run, {seconds:.1f} s", file=out)
    print(found.line, file=out)
    return code


def explained(found: Found) -> list[str]:
    """What was found, in sentences."""
    texts = []
    for names in found.sets:
        each = "alone breaks" if len(names) == 1 else "break only together:"
        tail = "the logits" if len(names) == 1 else "no part of them breaks the logits"
        texts.append(f"{' + '.join(names)} {each} {tail}, with all other stages the reference's")
    for name, outcome in found.alone.items():
        texts.append(f"alone in production: {name} {word(outcome)} {figure(outcome)}")
    if found.restored is not None and found.sets:
        texts.append(f"swapped for the reference: {' + '.join(found.swapped)} -> {figure(found.restored)}")
        if len(found.swapped) > 1:
            texts.append("swapping fewer of them does not restore the logits")
    return texts


def describe(production: Sequence[str], names: Sequence[str]) -> str:
    """The production stages of a forward, by whichever is shorter: those that are, or those that are not."""
    swapped = [n for n in names if n not in set(production)]
    if not swapped or not production:
        return "all production" if production else "all reference"
    if len(production) <= len(swapped):
        return f"production: {_few(production)}"
    return f"production, but {_few(swapped)}"


def _few(names: Sequence[str]) -> str:
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)} stages)"


def word(outcome: Outcome) -> str:
    """Whether the logits break, in a word."""
    return "breaks" if outcome.breaks else "right " if outcome.fine else "unclear"


def plain(outcome: Outcome) -> Mapping[str, Any]:
    """An outcome as JSON."""
    return {
        "verdict": str(outcome.verdict),
        "cost": outcome.ratio,
        "rms_error": outcome.error,
        "allowed": outcome.allowed,
        "reason": outcome.reason,
    }
