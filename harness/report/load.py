"""Read a run back from its JSONL, for the views: tolerant of a cut file, strict about every value.

A line that is not strict JSON, or not the record it says it is, never stops a report. It is listed in ``problems``,
because a report that silently lacks a line would lie by omission.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from harness import records
from harness.records import (
    Certification,
    Comparison,
    Config,
    Logits,
    Routing,
    Skip,
    Summary,
    Verdict,
    Weights,
)
from harness.types import UsageError

#: every class of the schema that names a kind of record
KINDS: dict[str, type] = {
    kind: cls
    for cls in vars(records).values()
    if isinstance(cls, type) and isinstance(kind := getattr(cls, "kind", None), str)
}


@dataclass
class Run:
    """All records of one run, by kind and in the order they were written."""

    name: str
    config: Config | None = None
    summary: Summary | None = None
    logits: Logits | None = None
    certifications: list[Certification] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    routing: list[Routing] = field(default_factory=list)
    #: records of a kind that this version has no view for, shown as they are
    others: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    #: the last line ends in the middle: the writer was killed
    truncated: bool = False

    @property
    def complete(self) -> bool:
        """Whether the run reached its end: only then does a missing failure mean anything."""
        return self.summary is not None and not self.summary.interrupted and not self.truncated

    def of(self, stage: str, mode: str) -> Comparison | None:
        """The comparison of a stage in a mode."""
        return next((c for c in self.comparisons if c.stage == stage and c.mode == mode), None)

    def failures(self) -> list[Comparison]:
        """Failing comparisons in the order that first fault uses: local before free, then execution order."""
        bad = [c for c in self.comparisons if c.verdict is Verdict.FAIL]
        return sorted(bad, key=lambda c: c.mode != "local")


Convert = Callable[[Any], Any]


def _refuse(token: str) -> None:
    raise ValueError(f"{token} is not JSON")


def _number(value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value!r:.40}")
    return value


def _exactly(cls: type) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not cls:
            raise ValueError(f"expected {cls.__name__}, got {value!r:.40}")
        return value

    return convert


@cache
def _converter(hint: Any) -> Convert:
    """A function that checks and converts one decoded JSON value to the annotated type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _union(args)
    if origin is tuple:
        return _tuple(args)
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        each = _converter(args[1])

        def mapping(value: Any) -> dict[str, Any]:
            return {key: each(item) for key, item in _exactly(dict)(value).items()}

        return mapping
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda value: hint(value)
    if is_dataclass(hint):
        return lambda value: build(cast(type, hint), value)
    if hint is float:
        return _number
    if hint in (int, bool, str):
        return _exactly(hint)
    return lambda value: value


def _union(args: tuple[Any, ...]) -> Convert:
    inner = [a for a in args if a is not NoneType]
    if bool in inner or len(inner) > 1:
        # float | int | bool | None, float | str | None: plain scalars
        allowed = (str, bool) if str in inner else (bool,)
        return lambda v: v if v is None or isinstance(v, allowed) else _number(v)
    each = _converter(inner[0])
    return lambda v: None if v is None else each(v)


#: element types of the long arrays, which are checked whole: one at a time they dominate the reading of a run
PLAIN: dict[Any, frozenset[type]] = {
    int: frozenset({int}),
    float: frozenset({float, int}),
    float | None: frozenset({float, int, NoneType}),
}


def _tuple(args: tuple[Any, ...]) -> Convert:
    if len(args) == 2 and args[1] is Ellipsis:
        each = _converter(args[0])
        plain = PLAIN.get(args[0], frozenset())

        def many(value: Any) -> tuple[Any, ...]:
            items = _exactly(list)(value)
            if plain and plain.issuperset(map(type, items)) and math.isfinite(sum(filter(None, items))):
                return tuple(items)
            return tuple([each(item) for item in items])

        return many
    parts = [_converter(a) for a in args]

    def fixed(value: Any) -> tuple[Any, ...]:
        return tuple(convert(item) for convert, item in zip(parts, _exactly(list)(value), strict=True))

    return fixed


@cache
def _plan(cls: type) -> tuple[tuple[str, Convert, bool], ...]:
    hints = get_type_hints(cls)
    return tuple(
        (f.name, _converter(hints[f.name]), f.default is MISSING and f.default_factory is MISSING) for f in fields(cls)
    )


def build(cls: type, data: Any) -> Any:
    """A record from its decoded JSON; keys that this version does not know are ignored."""
    values: dict[str, Any] = {}
    for name, convert, required in _plan(cls):
        if name in _exactly(dict)(data):
            try:
                values[name] = convert(data[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: {error}") from None
        elif required:
            raise ValueError(f"{name} is missing")
    return cls(**values)


def read(path: Path) -> Run:
    """Read every record of a run. What holds no record at all is bad input."""
    run = Run(path.name)
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name a file that harness diff --json wrote") from error
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            _add(run, json.loads(line, parse_constant=_refuse))
        except (ValueError, RecursionError) as error:
            # Only the very last line, without its newline, can be a cut one; any other is damage.
            if number == len(lines):
                run.truncated = True
            else:
                run.problems.append(f"line {number}: {error}")
    if not (run.config or run.summary or run.comparisons):
        raise UsageError(f"{path} is not a record file: no line of it is a record; write one with harness diff --json")
    if run.config is None:
        run.problems.append("no config record: what was run, and on what, is unknown")
    return run


def _add(run: Run, data: Any) -> None:
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise ValueError("expected an object with a kind")
    cls = KINDS.get(data["kind"])
    if cls is None:
        run.others.append(data)
        return
    record = build(cls, data)
    match record:
        case Config():
            run.config = record
        case Summary():
            run.summary = record
        case Logits():
            run.logits = record
        case Certification():
            run.certifications.append(record)
        case Weights():
            run.weights.append(record)
        case Comparison():
            run.comparisons.append(record)
        case Skip():
            run.skips.append(record)
        case Routing():
            run.routing.append(record)
