"""Records as strict JSONL: one JSON object a line, flushed as it is made, readable back into the same dataclasses.

Floats keep six significant digits. NaN and infinities are refused, not written: a number that does not exist is null
and its record says why.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from harness import records
from harness.records import Config, Record, Summary
from harness.types import UsageError

KINDS: dict[str, type] = {cls.kind: cls for cls in typing.get_args(records.Record)}
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
        return [_plain(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in _names(type(value))}
    raise TypeError(f"a record cannot hold {type(value).__name__}")


@cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


class Writer:
    """Appends records to a file, flushed one by one, so that a killed run leaves every finished line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO = _open(path)

    def write(self, record: Record) -> None:
        """Write one record; a full disk is bad input, not a traceback."""
        try:
            self._file.write(encode(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise UsageError(
                f"cannot write {self.path}: {error.strerror}; free some space or name another file"
            ) from error

    def close(self) -> None:
        self._file.close()


def _open(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}; name a file in an existing, writable folder"
        ) from error


def read(path: Path) -> list[Record]:
    """The records of one finished run. A foreign or truncated file is a UsageError that names the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a record file: expected UTF-8 JSON lines") from error
    found = [_decode(line, f"{path}:{number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not found or not isinstance(found[0], Config):
        raise UsageError(
            f"{path} is not a record file: expected a config record first; write one with harness diff --json"
        )
    if found[0].schema != SCHEMA:
        raise UsageError(f"{path} has record schema {found[0].schema}, this version reads {SCHEMA}; run the diff again")
    if not isinstance(found[-1], Summary):
        raise UsageError(f"{path} is truncated: it has no summary record; run the diff again")
    return found


def _decode(line: str, where: str) -> Record:
    try:
        data = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not a record: {str(error).splitlines()[0]}") from error
    kind = data.pop("kind", None) if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise UsageError(f"{where} is not a record: expected a kind among {', '.join(KINDS)}; got {str(kind)[:40]}")
    try:
        return typing.cast(Record, _build(KINDS[kind], data, kind))
    except ValueError as error:
        raise UsageError(f"{where} is not a {kind} record: {error}") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not strict JSON")


def _build(hint: Any, value: Any, path: str) -> Any:
    """``value`` as the annotated type, or a ValueError that says where it does not fit."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _build_union(typing.get_args(hint), value, path)
    if origin is tuple:
        return _build_tuple(typing.get_args(hint), value, path)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        item = typing.get_args(hint)[1]
        if isinstance(value, dict):
            return {k: _build(item, v, f"{path}.{k}") for k, v in value.items()}
    elif is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, dict):
            return _build_dataclass(hint, value, path)
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif hint is type(None):
        if value is None:
            return None
    elif isinstance(hint, type) and issubclass(hint, str):
        if isinstance(value, str):
            return hint(value)  # an enum refuses an unknown value with a ValueError of its own
    elif type(value) is hint:
        return value
    raise ValueError(f"{path} should be {getattr(hint, '__name__', hint)}, got {str(value)[:40]!r}")


def _build_union(options: tuple[Any, ...], value: Any, path: str) -> Any:
    for hint in sorted(options, key=lambda h: h is float):  # 3 stays an int where int and float are allowed
        try:
            return _build(hint, value, path)
        except ValueError:
            continue
    raise ValueError(f"{path} has an unexpected value {str(value)[:40]!r}")


def _build_tuple(items: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{path} should be a list")
    hints = [items[0]] * len(value) if items[-1] is Ellipsis else list(items)
    if len(hints) != len(value):
        raise ValueError(f"{path} should have {len(hints)} items, got {len(value)}")
    return tuple(_build(h, v, f"{path}[{i}]") for i, (h, v) in enumerate(zip(hints, value, strict=True)))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build_dataclass(cls: type, value: dict[str, Any], path: str) -> Any:
    known = {f.name: f for f in fields(cls)}
    if unknown := sorted(set(value) - set(known)):
        raise ValueError(f"{path} has an unknown field {unknown[0]!r}")
    required = {n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(required - set(value)):
        raise ValueError(f"{path} lacks {missing[0]!r}")
    hints = _hints(cls)
    return cls(**{name: _build(hints[name], item, f"{path}.{name}") for name, item in value.items()})
