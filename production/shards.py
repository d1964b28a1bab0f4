"""Safetensors files, read by byte range into memory that the caller owns.

No file is mapped: a mapped file that is cut while it is read kills the process, and its pages count as this process'
memory. The header (8 bytes of length, a JSON object, then data without gaps) is checked against the file's
size before anything is believed, and each read checks that the file is still the one whose header was read.
"""

from __future__ import annotations

import json
import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from production.errors import ProductionError

LIMIT = 100 << 20  # a header of real checkpoints has 0.5 MB
TORCH_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class Slot:
    """One stored tensor: its file, dtype and shape as in the header, and its bytes in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Shard:
    """One open file. ``slots`` are its tensors by name; ``bytes_read`` counts data, not the header."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_read = path, 0
        self._lock = threading.Lock()
        try:
            if not path.is_file():  # links are followed; a pipe would block the open
                raise ProductionError(str(path), expected="a safetensors file", came="no regular file")
            self._file = path.open("rb", buffering=0)
            self._stamp = self._now()
            self.slots = self._header()
        except OSError as error:
            raise ProductionError(str(path), expected="a readable file", came=error.strerror or str(error)) from None

    def close(self) -> None:
        self._file.close()

    def read_into(self, name: str, target: Tensor, before: int = 0) -> None:
        """A tensor, or as many of its elements from ``before`` on as the target holds, into the target.

        The target is contiguous and of the stored dtype; no second copy of the data exists.
        """
        slot = self.slots[name]
        size = target.numel() * target.element_size()
        at = slot.start + before * target.element_size()
        if target.dtype != TORCH_DTYPES[slot.dtype] or not target.is_contiguous() or at + size > slot.end:
            raise ValueError(f"{name}: {slot.dtype} {list(slot.shape)} into {target.dtype} {list(target.shape)}")
        if not size:
            return
        raw = memoryview(target.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        descriptor, done = self._file.fileno(), 0
        while done < size and (count := os.preadv(descriptor, [raw[done : done + (64 << 20)]], at + done)):
            done += count  # at a position of its own: several threads may read one file
        if done < size or self._now() != self._stamp:
            came = f"{done} of {size} bytes" if done < size else "a file that changed since its header was read"
            raise ProductionError(
                f"{self.path}: {name}", expected=f"{size} bytes", came=came, fix="copy the shard again"
            )
        with self._lock:
            self.bytes_read += size

    def _now(self) -> tuple[int, ...]:
        """Of the path and of the open file: one changes when it is replaced, the other when it is overwritten."""
        found = [os.stat(self.path), os.fstat(self._file.fileno())]
        return tuple(n for s in found for n in (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns))

    def _header(self) -> dict[str, Slot]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if length > min(LIMIT, size - 8):
            raise self._bad(f"a header of {length} bytes in a file of {size}")
        try:
            entries = json.loads(self._file.read(length), object_pairs_hook=_unique)
            entries.pop("__metadata__", None)
            slots = {name: self._slot(entry, 8 + length) for name, entry in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise self._bad(f"a header that cannot be read ({type(error).__name__}: {str(error)[:80]})") from None
        at = 8 + length
        for name, slot in sorted(slots.items(), key=lambda item: (item[1].start, item[1].end)):
            if slot.start != at:
                raise self._bad(f"{name[:80]} at byte {slot.start}, where {at} was due")
            at = slot.end
        if at != size:
            raise self._bad(f"{size} bytes, where the header describes {at}")
        return slots

    def _slot(self, entry: dict[str, Any], base: int) -> Slot:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if any(type(n) is not int or n < 0 for n in (*shape, start, end)):
            raise ValueError(f"shape {shape} at {start}..{end}")
        if math.prod(shape) * TORCH_DTYPES[dtype].itemsize != end - start:
            raise ValueError(f"{dtype} {list(shape)} in {end - start} bytes")
        return Slot(self.path.name, dtype, shape, base + start, base + end)

    def _bad(self, came: str) -> ProductionError:
        return ProductionError(str(self.path), expected="a safetensors file", came=came, fix="copy the shard again")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)
