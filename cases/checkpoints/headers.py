"""The header of a safetensors file, read with two small reads and believed only where the file bears it out.

File: 8 bytes little-endian header length, a JSON object, then the data. Each entry of the object gives a tensor's
dtype, shape and ``data_offsets`` relative to the data; ``__metadata__`` holds strings. The format demands that the
tensors cover the data without gap or overlap, which is what tells a cut or shifted file from a whole one.
https://huggingface.co/docs/safetensors (format section).
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: what the reference implementation accepts at most
MAX_HEADER = 100_000_000

#: bits per element of the dtypes of the format
BITS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


class HeaderError(ValueError):
    """A header that cannot be used at all: expected / came, without the file's name."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a file. ``start`` and ``end`` are byte positions in the file; ``end`` may lie beyond it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Identity:
    """Which bytes a header describes: a file that was replaced or rewritten since has another one."""

    device: int
    inode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Header:
    """A file's tensors by name, and what contradicts the file (one line each, naming the tensor)."""

    tensors: Mapping[str, Stored]
    identity: Identity
    problems: tuple[str, ...]
    metadata: Mapping[str, str]


def identify(descriptor: int) -> Identity:
    """The identity of an open file."""
    found = os.fstat(descriptor)
    return Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def open_regular(path: Path) -> int:
    """A read-only descriptor of a regular file (symbolic links followed); OSError or HeaderError for anything else.

    A pipe or device would block the open or never end, so the kind is looked at first.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise HeaderError("expected a regular file, came a folder, pipe or device")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_header(path: Path) -> Header:
    """Read and check the header of ``path``.

    Raises HeaderError when no tensor can be placed, OSError when the file cannot be opened. A contradiction that
    leaves other tensors usable (data cut short, overlap, gap) is listed in ``problems`` instead.
    """
    descriptor = open_regular(path)
    try:
        identity = identify(descriptor)
        lead = os.pread(descriptor, 8, 0)
        if len(lead) < 8:
            raise HeaderError(f"expected at least 8 bytes, came {len(lead)}")
        length = int.from_bytes(lead, "little")
        if length > MAX_HEADER:
            raise HeaderError(f"expected a header of at most {MAX_HEADER} bytes, came a length of {length}")
        if length + 8 > identity.size:
            raise HeaderError(f"expected a header of {length} bytes, came a file of {identity.size}")
        text = os.pread(descriptor, length, 8)
    finally:
        os.close(descriptor)
    entries = _parse(text)
    metadata = entries.pop("__metadata__", {})
    base = 8 + length
    tensors: dict[str, Stored] = {}
    problems: list[str] = []
    for name, entry in entries.items():
        try:
            tensors[name] = _stored(name, entry, base)
        except HeaderError as error:
            problems.append(f"{_short(name)}: {error}")
    problems += _placement(tensors, base, identity.size)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        problems.append("__metadata__: expected an object of strings")
        metadata = {}
    return Header(tensors, identity, tuple(problems), metadata)


def elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; HeaderError when they are no whole number."""
    bits = BITS[dtype] * elements(shape)
    if bits % 8:
        raise HeaderError(f"expected whole bytes, came {dtype} {list(shape)}")
    return bits // 8


def _parse(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise HeaderError(f"expected a JSON object, came {text[:12]!r}")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"expected JSON, came {_short(' '.join(str(error).split()), 120)}") from None
    if not isinstance(value, dict):
        raise HeaderError(f"expected a JSON object, came {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise HeaderError(f"expected every key once, came {_short(twice)!r} twice")
    return value


def _stored(name: str, entry: object, base: int) -> Stored:
    if not isinstance(entry, dict):
        raise HeaderError(f"expected an object, came {type(entry).__name__}")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        raise HeaderError(f"expected a dtype of the format, came {_short(repr(dtype))}")
    if not _naturals(shape):
        raise HeaderError(f"expected a shape, came {_short(repr(shape))}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(f"expected data_offsets [start, end], came {_short(repr(offsets))}")
    size = size_of(dtype, tuple(shape))
    if offsets[1] - offsets[0] != size:
        raise HeaderError(f"expected {size} bytes for {dtype} {shape}, came offsets {offsets}")
    return Stored(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _placement(tensors: Mapping[str, Stored], base: int, size: int) -> list[str]:
    """Gaps, overlaps and data beyond the end of the file."""
    problems: list[str] = []
    at = base
    beyond: list[Stored] = []
    for stored in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
        if stored.end > size:
            beyond.append(stored)
        if stored.start != at:
            word = "overlaps the tensor before it" if stored.start < at else "leaves a gap before it"
            problems.append(f"{_short(stored.name)}: expected its data at byte {at}, came {stored.start}: it {word}")
        at = max(at, stored.end)
    if beyond:
        more = f" and {len(beyond) - 1} more" if len(beyond) > 1 else ""
        problems.append(
            f"{_short(beyond[0].name)}{more}: expected {at} bytes in the file, came {size}: the file is cut short by "
            f"{at - size} bytes"
        )
    elif at < size:
        problems.append(f"expected {at} bytes in the file, came {size}: {size - at} bytes belong to no tensor")
    return problems


def _short(text: str, limit: int = 160) -> str:
    """A name or value of a file, on one line whatever it holds."""
    text = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= limit else text[: limit - 1] + "…"
