"""A checkpoint folder: its index, its shards' headers, and reads of byte ranges, with everything that contradicts.

Nothing is trusted twice: the index may name no file outside the folder, a file is what its header says only as far as
its size bears out, and a range is read only while the file is the one whose header was read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cases.checkpoints.headers import (
    Header,
    HeaderError,
    Stored,
    identify,
    open_regular,
    read_header,
)
from harness.types import UsageError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: bytes that one read takes at most
CHUNK = 64 << 20

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class Problem:
    """Something wrong with the files themselves. ``where`` is a tensor or a file."""

    kind: str
    where: str
    text: str


@dataclass
class Folder:
    """What a folder holds. ``where`` maps a tensor to its shard; ``problems`` list what does not fit together."""

    path: Path
    headers: dict[str, Header] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    index: dict[str, str] | None = None
    total_size: int | None = None  # what the index claims
    problems: list[Problem] = field(default_factory=list)

    def stored(self, name: str) -> Stored:
        return self.headers[self.where[name]].tensors[name]

    def dtypes(self) -> dict[str, str]:
        return {name: self.stored(name).dtype for name in self.where}

    def readable(self, name: str) -> bool:
        """Whether all bytes of a tensor are in its file."""
        stored = self.stored(name)
        return stored.end <= self.headers[self.where[name]].identity.size

    def read(self, name: str, start: int = 0, count: int | None = None) -> bytearray:
        """``count`` bytes of a tensor from byte ``start`` (all by default). UsageError if the file changed since."""
        shard, stored = self.where[name], self.stored(name)
        count = stored.nbytes - start if count is None else count
        if start < 0 or start + count > stored.nbytes:
            raise ValueError(f"{name}: bytes {start}..{start + count} of {stored.nbytes}")
        path = self.path / shard
        try:
            descriptor = open_regular(path)
        except (OSError, HeaderError) as error:
            raise _changed(path, name, str(error)) from None
        try:
            if identify(descriptor) != self.headers[shard].identity:
                raise _changed(path, name, "another file or other contents")
            data = _pread(descriptor, stored.start + start, count)
            if len(data) != count or identify(descriptor) != self.headers[shard].identity:
                raise _changed(path, name, f"{len(data)} of {count} bytes")
        finally:
            os.close(descriptor)
        return data

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in its stored dtype. E8M0 comes as float8_e8m0fnu: view it as uint8, never cast it."""
        stored = self.stored(name)
        if stored.dtype not in DTYPES:
            raise UsageError(f"{self.path / self.where[name]}: {name}: expected a dtype of V4, came {stored.dtype}")
        data = self.read(name)
        dtype = DTYPES[stored.dtype]
        return (
            torch.frombuffer(data, dtype=dtype).view(stored.shape) if data else torch.empty(stored.shape, dtype=dtype)
        )

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """``count`` rows (leading axis) of a tensor from row ``first``."""
        stored = self.stored(name)
        width = stored.nbytes // stored.shape[0]
        data = self.read(name, first * width, count * width)
        return torch.frombuffer(data, dtype=DTYPES[stored.dtype]).view(count, *stored.shape[1:])

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor's elements, flat, at most CHUNK bytes at a time."""
        stored = self.stored(name)
        dtype = DTYPES[stored.dtype]
        for start in range(0, stored.nbytes, CHUNK):
            data = self.read(name, start, min(CHUNK, stored.nbytes - start))
            yield torch.frombuffer(data, dtype=dtype)


def open_folder(path: Path) -> Folder:
    """Read the index and all headers. UsageError only when there is nothing to read; the rest is in ``problems``."""
    folder = Folder(path)
    folder.index = _read_index(folder)
    files = sorted(p.name for p in path.iterdir() if p.name.endswith(".safetensors"))
    named = sorted(set(folder.index.values())) if folder.index is not None else files
    if folder.index is None and not files:
        raise UsageError(f"{path}: expected {INDEX} or {SINGLE}, came neither; give a folder that holds a checkpoint")
    for shard in named:
        _read_shard(folder, shard)
    _same_file_twice(folder)
    for name in files:
        if name not in named:
            folder.problems.append(
                Problem(
                    "dangling shard", name, f"expected {INDEX} to name it, came no tensor placed in it: never loaded"
                )
            )
    if folder.index is not None:
        _compare_index(folder, folder.index)
    if not folder.where and not folder.headers:
        first = f" ({folder.problems[0].where}: {folder.problems[0].text})" if folder.problems else ""
        raise UsageError(f"{path}: expected at least one readable shard, came none{first}; copy the checkpoint again")
    return folder


def _pread(descriptor: int, at: int, count: int) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        got = os.preadv(descriptor, [view[done : done + CHUNK]], at + done)
        if not got:
            return data[:done]
        done += got
    return data


def _read_index(folder: Folder) -> dict[str, str] | None:
    path = folder.path / INDEX
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        shards = sum(1 for p in folder.path.glob("*.safetensors"))
        if shards > 1:
            folder.problems.append(
                Problem("index", INDEX, f"expected an index beside {shards} shards, came none: loaders need it")
            )
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: expected JSON, came {' '.join(str(error).split())[:200]}; copy it again") from None
    weights = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weights, dict) or not weights:
        came = "none" if weights is None else "an empty one" if weights == {} else type(weights).__name__
        raise UsageError(f"{path}: expected an object 'weight_map', came {came}; copy it again")
    good: dict[str, str] = {}
    outside: dict[str, list[str]] = {}
    for name, shard in weights.items():
        if not isinstance(shard, str) or os.path.basename(shard) != shard or not shard.endswith(".safetensors"):
            outside.setdefault(str(shard), []).append(name)
        else:
            good[name] = shard
    for shard, names in outside.items():
        text = (
            f"expected the name of a .safetensors file in the folder, came {shard[:120]!r}{_more(names)}: not followed"
        )
        folder.problems.append(Problem("index", names[0], text))
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    folder.total_size = total if type(total) is int else None
    return good


def _read_shard(folder: Folder, shard: str) -> None:
    path = folder.path / shard
    try:
        header = read_header(path)
    except (HeaderError, OSError) as error:
        text = f"expected a readable file, came: {error.strerror}" if isinstance(error, OSError) else str(error)
        folder.problems.append(Problem("unreadable shard", shard, f"{text}: none of its tensors can be loaded"))
        return
    folder.headers[shard] = header
    folder.problems += [Problem("broken shard", shard, text) for text in header.problems]
    for name in header.tensors:
        if name in folder.where:
            first = folder.where[name]
            text = f"expected one place, came {first} and {shard}: which one is loaded depends on the loader"
            folder.problems.append(Problem("duplicate tensor", name, text))
            if folder.index is not None and folder.index.get(name) == shard:
                folder.where[name] = shard
        else:
            folder.where[name] = shard


def _same_file_twice(folder: Folder) -> None:
    seen: dict[tuple[int, int], str] = {}
    for shard, header in folder.headers.items():
        key = (header.identity.device, header.identity.inode)
        if key in seen:
            text = f"expected a file of its own, came a link to the file that {seen[key]} is"
            folder.problems.append(Problem("duplicate shard", shard, text))
        seen.setdefault(key, shard)


def _compare_index(folder: Folder, index: Mapping[str, str]) -> None:
    """What the index promises and what the shards hold."""
    absent: dict[str, list[str]] = {}
    for name, shard in index.items():
        if shard not in folder.headers or name in folder.headers[shard].tensors:
            continue
        absent.setdefault(shard, []).append(name)
    for shard, names in absent.items():
        elsewhere = folder.where.get(names[0])
        came = f"it in {elsewhere}" if elsewhere else "a shard without it"
        text = f"expected it in {shard} as {INDEX} says, came {came}{_more(names)}"
        folder.problems.append(Problem("index", names[0], text))
    extra: dict[str, list[str]] = {}
    for shard, header in folder.headers.items():
        for name in header.tensors:
            if name not in index:
                extra.setdefault(shard, []).append(name)
    for shard, names in extra.items():
        text = f"expected {INDEX} to place it, came only {shard}{_more(names)}: loaders that follow the index miss it"
        folder.problems.append(Problem("index", names[0], text))
    total = folder.total_size
    held = sum(t.nbytes for h in folder.headers.values() for t in h.tensors.values())
    if total is not None and total != held and len(folder.headers) == len(set(index.values())):
        folder.problems.append(
            Problem("index", INDEX, f"expected metadata.total_size {held} (what the shards hold), came {total}")
        )


def _changed(path: Path, name: str, came: str) -> UsageError:
    return UsageError(
        f"{path}: {name}: expected the file whose header was read, came {came}: it was replaced or cut while being "
        "read; stop what writes to the checkpoint and run again"
    )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
