"""Records as strict JSONL: one JSON object a line, flushed as it is made, readable back into the same dataclasses.

Floats keep six significant digits. NaN and infinities are refused, not written: a number that does not exist is null
and its record says why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO, cast

from harness.records import Config, Record, Summary
from harness.report.load import KINDS, build
from harness.tally import Tally
from harness.types import UsageError

SCHEMA = 1


def encode(record: Record) -> str:
    """One line of JSON, without the line end."""
    return json.dumps({"kind": record.kind, **_plain(record)}, allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, str):
        return str(value)  # a StrEnum becomes its value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        # Long arrays are made of integers and of floats that were rounded when they were made (figures.tidy).
        return list(value) if _ARRAY.issuperset(map(type, value)) else [_plain(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in _names(type(value))}
    raise TypeError(f"a record cannot hold {type(value).__name__}")


_ARRAY = frozenset((int, float, type(None)))


@cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


class Writer:
    """Appends records to a file, flushed one by one, so that a killed run leaves every finished line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None  # opened with the first record: a run that never starts leaves files alone

    def write(self, record: Record) -> None:
        """Write one record; a full disk is bad input, not a traceback."""
        if self._file is None:
            self._file = _open(self.path)
        try:
            self._file.write(encode(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise UsageError(
                f"cannot write {self.path}: {error.strerror}; free some space or name another file"
            ) from error

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # every record was flushed; what was not has been reported
                self._file.close()


def _open(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}; name a file in an existing, writable folder"
        ) from error


def read(path: Path, *, partial: bool = False) -> list[Record]:
    """The records of one finished run. A foreign or truncated file is a UsageError that names the line.

    With ``partial``, a run that was killed is read as far as it was written and ends with a summary that says so.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise UsageError(f"{path} is not a record file: expected UTF-8 JSON lines") from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"cannot read {path}: {reason}; name a file that harness diff --json wrote") from error
    lines = list(enumerate(text.split("\n"), 1))
    cut = lines.pop() if lines[-1][1].strip() else None  # without a line end: the writer was killed inside it
    found = [_decode(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if cut is not None:
        try:
            found.append(_decode(cut[1], f"{path}:{cut[0]}"))
        except UsageError:
            if not (partial and found):
                raise
    if not found or not isinstance(found[0], Config):
        raise UsageError(
            f"{path} is not a record file: expected a config record first; write one with harness diff --json"
        )
    if found[0].schema != SCHEMA:
        raise UsageError(f"{path} has record schema {found[0].schema}, this version reads {SCHEMA}; run the diff again")
    if not isinstance(found[-1], Summary):
        if not partial:
            raise UsageError(f"{path} is truncated: it has no summary record; run the diff again")
        tally = Tally()
        for record in found:
            tally.add(record)
        found.append(tally.summary({}, interrupted=True))
    return found


def _decode(line: str, where: str) -> Record:
    try:
        data = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not a record: {str(error).splitlines()[0]}") from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise UsageError(f"{where} is not a record: expected a kind among {', '.join(KINDS)}; got {str(kind)[:40]}")
    try:
        return cast(Record, build(KINDS[kind], data))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where} is not a {kind} record: {error}") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not strict JSON")
