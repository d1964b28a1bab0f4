"""Safetensors shards, read by byte range: headers at once, a tensor or some of its rows when asked for.

A layer of a checkpoint of 160 GB costs the bytes of that layer. A header is believed only as far as the file bears it
out (https://huggingface.co/docs/safetensors: 8 bytes of length, a JSON object, then data that the tensors cover without
gap or overlap), and a read is refused once the file is no longer the one whose header was read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.types import UsageError
from reference.geometry import load_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LONGEST_HEADER = 100_000_000

#: dtypes that a DeepSeek-V4 checkpoint can hold, by their names in a header
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class Header:
    """Where a tensor lies (``at``: bytes from the start of its file) and what it is, in safetensors' words."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    size: int


class Shards:
    """The tensors of a folder by name. ``bytes_read`` counts the data (not the headers) that was read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.headers: dict[str, Header] = {}
        self.bytes_read = 0
        self._files: dict[str, tuple[int, int, int, int]] = {}  # shard -> device, inode, size, mtime
        index = _index(folder)
        for shard in sorted(set(index.values())) if index is not None else [SINGLE]:
            self._add(shard, index)
        gone = [] if index is None else sorted(set(index) - set(self.headers))
        if index is not None and gone:
            raise UsageError(
                f"{folder / index[gone[0]]}: expected {gone[0]} as {INDEX} says, came a shard without it"
                f"{more(gone)}; the index and the shards are not of one export"
            )

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in its stored dtype, in memory of its own. E8M0 must be viewed as uint8, never cast."""
        header = self.headers[name]
        return self._read(name, header.at, header.size).view(header.shape)

    def rows(self, name: str, expert: int, first: int, last: int) -> Tensor:
        """Rows ``first`` to ``last`` of one matrix of a stack ``[E, N, K]``."""
        header = self.headers[name]
        experts, count, columns = header.shape
        width = header.size // (experts * count)
        start = header.at + (expert * count + first) * width
        return self._read(name, start, (last - first) * width).view(last - first, columns)

    def _read(self, name: str, at: int, size: int) -> Tensor:
        header = self.headers[name]
        path = self.folder / header.shard
        if not size:
            return torch.empty(0, dtype=DTYPES[header.dtype])
        buffer = bytearray(size)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(at)
                whole = memoryview(buffer)
                while whole and (count := file.readinto(whole)):
                    whole = whole[count:]
                now = _identity(file.fileno())
        except OSError as error:
            raise self._lost(path, name, error.strerror or str(error)) from None
        if whole or now != self._files[header.shard]:
            raise self._lost(path, name, "a file that changed since its header was read")
        self.bytes_read += size
        return torch.frombuffer(buffer, dtype=DTYPES[header.dtype])

    def _lost(self, path: Path, name: str, came: str) -> UsageError:
        return UsageError(
            f"{path}: expected to read {name}, came {came}; stop what writes to it, or copy the shard again"
        )

    def _add(self, shard: str, index: Mapping[str, str] | None) -> None:
        path = self.folder / shard
        entries, start, identity = _header(path)
        self._files[shard] = identity
        for name, entry in entries.items():
            if index is not None and index.get(name) != shard:
                came = f"{index[name]!r} there" if name in index else "no entry there"
                raise UsageError(
                    f"{path}: {shown(name)}: expected {INDEX} to place it in this shard, came {came}; the index "
                    "and the shards are not of one export"
                )
            dtype, shape, (first, last) = entry
            self.headers[name] = Header(shard, dtype, shape, start + first, last - first)


Entry = tuple[str, tuple[int, ...], tuple[int, int]]  # dtype, shape, data offsets


def _index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> shard file name; None for a checkpoint of one file without an index."""
    path = folder / INDEX
    if not path.exists() and (folder / SINGLE).exists():
        return None
    weights = load_json(path).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        kind = "none" if weights is None else type(weights).__name__
        raise UsageError(f"{path}: expected a non-empty object 'weight_map', came {kind}; copy it again")
    for name, shard in weights.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
            raise UsageError(f"{path}: {name}: expected the name of a .safetensors file beside it, came {shard!r}")
    return weights


def _header(path: Path) -> tuple[dict[str, Entry], int, tuple[int, int, int, int]]:
    """(entries, where the data starts, identity) of one shard; UsageError for any contradiction."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{path}: expected a regular file, came a folder, pipe or device; copy the shard")
        with path.open("rb") as file:
            identity = _identity(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            if length > min(LONGEST_HEADER, identity[2] - 8):
                raise _broken(path, f"a header of {length} bytes in a file of {identity[2]}")
            text = file.read(length)
    except FileNotFoundError:
        raise UsageError(f"{path}: expected a shard that {INDEX} names, came no such file; copy the shard") from None
    except OSError as error:
        raise UsageError(f"{path}: expected a readable shard, came {error.strerror or error}; copy the shard") from None
    try:
        raw = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"a header that is no JSON: {' '.join(str(error).split())[:120]}") from None
    if not isinstance(raw, dict):
        raise _broken(path, "a header that is no object")
    raw.pop("__metadata__", None)
    entries = {name: _entry(path, name, value) for name, value in raw.items()}
    _covered(path, entries, identity[2] - 8 - length)
    return entries, 8 + length, identity


def _entry(path: Path, name: str, value: Any) -> Entry:
    """One entry of a header, with its offsets held to its dtype and shape."""
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype: Any
    shape: Any
    offsets: Any
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise UsageError(
            f"{path}: {shown(name)}: expected a dtype among {known}, came {shown(str(dtype))}; export again"
        )
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise _broken(path, f"{shown(name)} with shape {shown(str(shape))} at {shown(str(offsets))}")
    size = DTYPES[dtype].itemsize
    for axis in shape:
        size *= axis
    if offsets[1] - offsets[0] != size:
        raise _broken(path, f"{shown(name)}: {dtype} {shape} at {offsets}, which are not {size} bytes")
    return dtype, tuple(shape), (offsets[0], offsets[1])


def _covered(path: Path, entries: Mapping[str, Entry], size: int) -> None:
    """The tensors must cover the data exactly."""
    at = 0
    for name, (_, _, (first, last)) in sorted(entries.items(), key=lambda item: item[1][2]):
        if first != at:
            raise _broken(path, f"{shown(name)} at byte {first} of the data, where {at} was due")
        at = last
    if at > size:
        raise _broken(path, f"{size} of {at} bytes of data")
    if at < size:
        raise _broken(path, f"{size - at} bytes of data that belong to no tensor")


def _identity(descriptor: int) -> tuple[int, int, int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key that stands there twice")
    return value


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 60 for n in value)


def _broken(path: Path, came: str) -> UsageError:
    return UsageError(
        f"{path}: expected a whole safetensors file, came a truncated or corrupt one ({came}); copy the shard again"
    )


def shown(name: str) -> str:
    """A name from a file as a line can hold it."""
    return repr(name[:100])[1:-1]


def more(names: list[str]) -> str:
    """`` (and N more)`` after the first of several names."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
