"""Write sharded safetensors from a stream of pieces, in bounded memory, whole or not at all.

Sizes are known before any value is: headers are laid out first, pieces are written at their place in any order, and the
folder takes its name only when every file is complete. Within a shard tensors are ordered by element size, largest
first, so that each is aligned for readers that map the file.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cases.checkpoints.folder import INDEX
from cases.checkpoints.headers import BITS, size_of
from harness.types import UsageError

METADATA = {"format": "pt"}


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return size_of(self.dtype, self.shape)


@dataclass(frozen=True)
class Place:
    shard: str
    start: int
    nbytes: int


class Writer:
    """Takes the bytes of planned tensors; ``put`` may be called for pieces of one tensor in a row."""

    def __init__(self, folder: Path, places: Mapping[str, Place]) -> None:
        self._folder, self._places = folder, places
        self._written = dict.fromkeys(places, 0)
        self._files: dict[str, int] = {}

    def put(self, name: str, piece: Tensor) -> None:
        """Append a piece (whole elements, contiguous order) to a tensor."""
        place, done = self._places[name], self._written[name]
        data = memoryview(piece.contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
        if done + len(data) > place.nbytes:
            raise ValueError(f"{name}: {done + len(data)} bytes for a tensor of {place.nbytes}")
        descriptor = self._file(place.shard)
        at = place.start + done
        while data:
            count = os.pwrite(descriptor, data, at)
            data, at = data[count:], at + count
        self._written[name] = at - place.start

    def close(self) -> None:
        for descriptor in self._files.values():
            os.fsync(descriptor)  # a full disk may show only here
            os.close(descriptor)
        self._files.clear()

    def incomplete(self) -> list[str]:
        return [name for name, done in self._written.items() if done != self._places[name].nbytes]

    def _file(self, shard: str) -> int:
        if shard not in self._files:
            if len(self._files) >= 16:
                oldest = next(iter(self._files))
                descriptor = self._files.pop(oldest)
                os.fsync(descriptor)
                os.close(descriptor)
            self._files[shard] = os.open(self._folder / shard, os.O_WRONLY | os.O_CLOEXEC)
        return self._files[shard]


def write_checkpoint(
    target: Path,
    groups: Sequence[Sequence[Planned]],
    produce: Callable[[Writer], None],
    documents: Mapping[str, Any],
    shard_bytes: int,
) -> None:
    """Write a checkpoint folder ``target``, which must not hold anything yet.

    ``groups`` are tensors that stay in one shard together (a weight and its scales); ``produce`` puts all of them;
    ``documents`` are JSON files by name. UsageError for a target that cannot be written, with nothing left behind.
    """
    shards = _assign(groups, shard_bytes)
    total = sum(planned.nbytes for group in groups for planned in group)
    with _new_folder(target, total) as folder:
        places: dict[str, Place] = {}
        for position, tensors in enumerate(shards, 1):
            name = f"model-{position:05d}-of-{len(shards):05d}.safetensors"
            places |= _lay_out(folder / name, tensors)
        writer = Writer(folder, places)
        try:
            produce(writer)
        finally:
            writer.close()
        if left := writer.incomplete():
            raise ValueError(f"{left[0]} and {len(left) - 1} more were planned and not written")
        index = {"metadata": {"total_size": total}, "weight_map": {name: p.shard for name, p in places.items()}}
        for name, document in {**documents, INDEX: index}.items():
            (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _assign(groups: Sequence[Sequence[Planned]], shard_bytes: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    used = 0
    for group in groups:
        size = sum(planned.nbytes for planned in group)
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1] += group
        used += size
    return shards


def _lay_out(path: Path, tensors: Sequence[Planned]) -> dict[str, Place]:
    """Write a shard's header and give the file its full size; where each tensor goes."""
    header: dict[str, Any] = {"__metadata__": METADATA}
    at = 0
    for planned in sorted(tensors, key=lambda p: -BITS[p.dtype]):  # stable: the order of layers remains
        end = at + planned.nbytes
        header[planned.name] = {"dtype": planned.dtype, "shape": list(planned.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    base = 8 + len(text)
    return {
        planned.name: Place(path.name, base + header[planned.name]["data_offsets"][0], planned.nbytes)
        for planned in tensors
    }


@contextmanager
def _new_folder(target: Path, total: int) -> Iterator[Path]:
    """A folder beside ``target`` that becomes it at the end, or disappears."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise UsageError(f"{target}: expected a new or empty folder, came one that holds something; choose another")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{target}: expected a folder to write it in, came no {parent}; create it")
    partial = parent / f".{target.name}.partial-{os.getpid()}"
    try:
        free = shutil.disk_usage(parent).free
        if free < total:
            raise UsageError(
                f"{target}: expected {total / 1e9:.2f} GB of free space, came {free / 1e9:.2f} GB; free some, or "
                "choose fewer layers or experts"
            )
        partial.mkdir()
        yield partial
        os.replace(partial, target)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        came = "no space left" if full else (error.strerror or str(error)).lower()
        what = f"room for {total / 1e9:.2f} GB" if full else "a folder that can be written"
        raise UsageError(f"{target}: expected {what}, came {came}; nothing was left behind") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
