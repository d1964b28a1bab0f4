"""Reading a checkpoint: safetensors shards, held to the manifest, stacked expert by expert.

Before a byte of a weight is read, the headers of all shards are compared with what the configuration demands
(``production.manifest``, ``production.storage``): a missing tensor, an unknown one, a wrong dtype or shape is an error.
Tensors of the draft module (``mtp.*``) are set aside and counted. Values are refused where no forward pass could mean
anything: NaN block scales, a scale of a whole matrix that is not a positive number, non-finite weights, expert ids out
of range. Only the tensors that are asked for are read, by byte range.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from production.errors import ProductionError
from production.manifest import SET_ASIDE, Leaf
from production.names import STACKED, native
from production.nvfp4 import has_nan_scale
from production.shards import TORCH_DTYPES, Shard
from production.storage import Header, Stored, formats, parts

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: threads that fill a stack of experts
READERS = min(8, os.cpu_count() or 1)
#: the scale of a whole matrix, on the accumulator
WHOLE = (".weight_scale_2", ".weight_global_scale")
#: scales of activations: no part of a product with 16-bit activations
UNUSED = (".input_scale", ".input_global_scale")


class Reader:
    """The tensors of a checkpoint folder by DeepSeek's names. Headers are read at once, data on request."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.headers: dict[str, Header] = {}
        self._place: dict[str, tuple[str, str, int]] = {}  # name -> (file, name on disk, elements before it there)
        self._shards: dict[str, Shard] = {}
        index = self._index()
        found: dict[str, str] = {}  # name on disk -> file
        for file in sorted(set(index.values())) if index is not None else [SINGLE]:
            shard = self._shards[file] = Shard(self.folder / file)
            for name in shard.slots:
                if name in found:
                    twice = f"{name} in {found[name]} and {file}"
                    raise ProductionError(str(self.folder), expected="each tensor once", came=twice)
                found[name] = file
        if index is not None and index != found:
            differing = sorted({name for name, _ in index.items() ^ found.items()})
            raise ProductionError(
                str(self.folder / INDEX),
                expected="every tensor in the shard that the index names",
                came=f"another place for {_some(differing)}",
            )
        for name, file in found.items():
            self._add(name, file)

    @property
    def bytes_read(self) -> int:
        """Data that was read so far, headers not counted."""
        return sum(shard.bytes_read for shard in self._shards.values())

    def on_disk(self, name: str) -> str:
        """What a tensor is called in its file."""
        return self._place[name][1] if name in self._place else name

    def tensor(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        dtype, shape = self.headers[name]
        value = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
        self.read_into(name, value)
        return value

    def read_into(self, name: str, target: Tensor) -> None:
        """One tensor into contiguous memory of its dtype and size."""
        file, disk, before = self._place[name]
        self._shards[file].read_into(disk, target, before)

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()

    def _index(self) -> dict[str, str] | None:
        path = self.folder / INDEX
        if not path.is_file():
            if (self.folder / SINGLE).is_file():
                return None
            raise ProductionError(str(self.folder), expected=f"{INDEX} or {SINGLE}", came="neither")
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            files = {str(file) for file in weight_map.values()}
            if not files:
                raise ValueError("an empty weight_map")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ProductionError(str(path), expected="an index with a weight_map", came=repr(error)) from None
        for file in files:
            if "\0" in file or Path(file).name != file or not (self.folder / file).is_file():
                raise ProductionError(str(path), expected="shards beside the index", came=f"no file {file!r}")
        return dict(weight_map)

    def _add(self, disk: str, file: str) -> None:
        slot = self._shards[file].slots[disk]
        stacked = STACKED.match(disk)
        if stacked is None:
            self._place_at(native(disk), file, disk, 0, (slot.dtype, slot.shape))
            return
        if len(slot.shape) != 3 or (stacked[2] == "gate_up_proj" and slot.shape[1] % 2):
            came = f"{slot.dtype} {list(slot.shape)}"
            raise ProductionError(disk, expected="experts stacked over three axes", came=came)
        experts, rows, columns = slot.shape
        halves = ("w1", "w3") if stacked[2] == "gate_up_proj" else ("w2",)
        shape = (rows // len(halves), columns)
        for expert in range(experts):
            for half, leaf in enumerate(halves):
                name = f"layers.{stacked[1]}.ffn.experts.{expert}.{leaf}.weight"
                before = (expert * len(halves) + half) * shape[0] * columns
                self._place_at(name, file, disk, before, (slot.dtype, shape))

    def _place_at(self, name: str, file: str, disk: str, before: int, header: Header) -> None:
        if name in self._place:
            twice = f"{self._place[name][1]} and {disk}"
            raise ProductionError(str(self.folder), expected="each tensor once", came=twice)
        self._place[name] = (file, disk, before)
        self.headers[name] = header


def verify(reader: Reader, leaves: Mapping[str, Collection[Leaf]]) -> tuple[dict[str, str], int]:
    """(stage -> format of its projections, number of tensors set aside), after comparing every header."""
    where = str(reader.folder)
    expected: dict[str, Stored] = {}
    forms: dict[str, str] = {}
    for stage, stage_leaves in leaves.items():
        form = formats(reader.headers, stage, stage_leaves)
        if form is not None:
            forms[stage] = form
        for leaf in stage_leaves:
            for part in parts(stage, leaf, form, reader.headers):
                for expert in range(max(1, leaf.experts)):
                    expected[part.native.format(expert=expert)] = part

    if missing := [name for name, part in expected.items() if not part.optional and name not in reader.headers]:
        fix = "names of four families are read: DeepSeek's, save_pretrained's, Hugging Face's stacked and per expert"
        raise ProductionError(where, expected=f"{len(expected)} tensors", came=f"none named {_some(missing)}", fix=fix)
    aside = sum(name.startswith(SET_ASIDE) for name in reader.headers)
    extra = [n for n in reader.headers if n not in expected and not n.startswith(SET_ASIDE)]
    if extra:
        came = _some(sorted(map(reader.on_disk, extra)))
        raise ProductionError(where, expected="only tensors that the configuration demands", came=came)
    for name, part in expected.items():
        if not part.known or name not in reader.headers:
            continue
        dtype, shape = reader.headers[name]
        if dtype not in part.dtypes or shape != part.shape:
            wanted = f"{' or '.join(part.dtypes)} {list(part.shape)}"
            raise ProductionError(reader.on_disk(name), expected=wanted, came=f"{dtype} {list(shape)}")
    return forms, aside


def load(reader: Reader, stage: str, leaf: Leaf, form: str | None, device: torch.device) -> dict[str, Tensor]:
    """One parameter of a stage, with its companions, on the device."""
    found: dict[str, Tensor] = {}
    for part in parts(stage, leaf, form, reader.headers):
        first = part.native.format(expert=0)
        if first not in reader.headers:
            continue  # an optional one
        if leaf.experts:
            value = stack(reader, part, leaf.experts, device)
        else:
            value = checked(reader.on_disk(first), reader.tensor(first)).to(device)
        found[part.name] = canonical(value, leaf)
    return found


def stack(reader: Reader, part: Stored, experts: int, device: torch.device) -> Tensor:
    """[E, *shape] in one preallocated host buffer, filled from the file expert by expert, then moved once.

    The bytes go straight to their place: beside the buffer nothing of the weights is alive. For a GPU it is pinned. A
    few threads read at once: fresh memory and a fast disk both keep one core busier than the copy itself.
    """
    dtype, shape = reader.headers[part.native.format(expert=0)]
    buffer = torch.empty((experts, *shape), dtype=TORCH_DTYPES[dtype], pin_memory=device.type == "cuda")

    def fill(expert: int) -> None:
        name = part.native.format(expert=expert)
        if reader.headers.get(name, ("none", ()))[0] != dtype:
            came = reader.headers[name][0] if name in reader.headers else "no such tensor"
            raise ProductionError(reader.on_disk(name), expected=f"{dtype}, as expert 0 has", came=came)
        reader.read_into(name, buffer[expert])
        checked(reader.on_disk(name), buffer[expert])

    with ThreadPoolExecutor(READERS) as readers:
        for _ in readers.map(fill, range(experts)):
            pass
    return buffer.to(device)


def canonical(value: Tensor, leaf: Leaf) -> Tensor:
    """A stored tensor as a stage has it: codes unsigned, ids int64, plain fp32 parameters not narrower than that."""
    if value.dtype == torch.int8:
        return value.view(torch.uint8)
    if value.dtype == torch.int32:
        return value.long()
    if not leaf.projection:
        return value.float() if leaf.dtype == "F32" else value
    if value.dtype == torch.float32 and value.shape[int(leaf.experts > 0) :] == (1,):
        return value.reshape(value.shape[:-1])  # compressed-tensors stores a scalar as [1]
    return value


def checked(name: str, tensor: Tensor) -> Tensor:
    """The tensor, if a forward pass with it can mean something."""
    if name.endswith(UNUSED):
        return tensor
    if tensor.dtype == torch.float8_e8m0fnu and bool((tensor.view(torch.uint8) == 255).any()):
        raise ProductionError(name, expected="block scales", came="an E8M0 NaN code among them")
    if tensor.dtype == torch.float8_e4m3fn and has_nan_scale(tensor):
        what = "weights" if name.endswith(".weight") else "block scales"
        raise ProductionError(name, expected=what, came="an E4M3 NaN code among them")
    if name.endswith(WHOLE) and not (bool(tensor.isfinite().all()) and float(tensor) > 0):
        raise ProductionError(name, expected="a finite number > 0", came=str(float(tensor)))
    if tensor.dtype in (torch.float32, torch.bfloat16) and not bool(tensor.isfinite().all()):
        raise ProductionError(name, expected="finite values", came=f"{int((~tensor.isfinite()).sum())} that are not")
    return tensor


def _some(names: list[str], most: int = 3) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
