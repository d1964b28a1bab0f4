"""Reading a checkpoint: safetensors shards with an index, held to the manifest, stacked expert by expert.

Before a byte of a weight is read, the headers of all shards are compared with what the configuration demands
(``production.manifest``): a missing tensor, an unknown one, a wrong dtype or shape is an error. Tensors of the draft
module (``mtp.*``) are set aside and counted. Values are refused where no forward pass could mean anything: NaN block
scales, a ``weight_scale_2`` that is not a positive number, non-finite weights, expert ids out of range.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from production.errors import ProductionError
from production.manifest import SET_ASIDE, Leaf, packed
from production.nvfp4 import BLOCK, has_nan_scale

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Format of a projection by the header dtype of its weight; the last two are recognised to be named in an error.
FORMATS = {"U8": "nvfp4", "BF16": "bf16", "F8_E4M3": "fp8", "I8": "mxfp4"}
TORCH_DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}


class Reader:
    """The tensors of a checkpoint folder by name. Headers are read at once, data on request."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.headers: dict[str, tuple[str, tuple[int, ...]]] = {}  # name -> (dtype, shape)
        self._file_of: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        index = self._index()
        for file in sorted(set(index.values())) if index is not None else [SINGLE]:
            self._read_headers(file)
        if index is not None and index != self._file_of:
            differing = sorted({name for name, _ in index.items() ^ self._file_of.items()})
            raise ProductionError(
                str(self.folder / INDEX),
                expected="every tensor in the shard that the index names",
                came=f"another place for {_some(differing)}",
            )

    def tensor(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        file = self._file_of[name]
        return self._handle(file).get_tensor(name).clone()  # type: ignore[no-any-return]

    def close(self) -> None:
        self._open.clear()

    def _index(self) -> dict[str, str] | None:
        path = self.folder / INDEX
        if not path.is_file():
            if (self.folder / SINGLE).is_file():
                return None
            raise ProductionError(str(self.folder), expected=f"{INDEX} or {SINGLE}", came="neither")
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ProductionError(str(path), expected="an index with a weight_map", came=repr(error)) from None
        for file in set(weight_map.values()):
            if Path(file).name != file or not (self.folder / file).is_file():
                raise ProductionError(str(path), expected="shards beside the index", came=f"no file {file!r}")
        return dict(weight_map)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ProductionError(str(self.folder / file), expected="a safetensors file", came=str(error)) from None
        return self._open[file]

    def _read_headers(self, file: str) -> None:
        handle = self._handle(file)
        for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
            if name in self._file_of:
                twice = f"{name} in {self._file_of[name]} and {file}"
                raise ProductionError(str(self.folder), expected="each tensor once", came=twice)
            view = handle.get_slice(name)
            self.headers[name] = (view.get_dtype(), tuple(view.get_shape()))
            self._file_of[name] = file


def verify(reader: Reader, leaves: Mapping[str, Iterable[Leaf]]) -> tuple[dict[str, str], int]:
    """(stage -> format of its projections, number of tensors set aside), after comparing every header."""
    where = str(reader.folder)
    expected: dict[str, tuple[str, tuple[int, ...]] | None] = {}  # None: a format that is only recognised
    formats: dict[str, str] = {}
    for stage, stage_leaves in leaves.items():
        found: dict[str, str] = {}  # format -> a stem that has it
        for leaf in stage_leaves:
            for stem in leaf.stems():
                if not leaf.projection:
                    expected[stem] = (leaf.dtype, leaf.shape)
                    continue
                form = _format(reader, stem)
                found.setdefault(form, stem)
                expected.update(_tensors(stage, leaf, stem, form))
        if len(found) > 1:
            came = ", ".join(f"{form} ({stem})" for form, stem in found.items())
            raise ProductionError(stage, expected="one format for all of a stage's projections", came=came)
        formats.update((stage, form) for form in found)

    if missing := [name for name, header in expected.items() if header and name not in reader.headers]:
        fix = "only DeepSeek's native tensor names are read"
        raise ProductionError(where, expected=f"{len(expected)} tensors", came=f"none named {_some(missing)}", fix=fix)
    aside = sum(name.startswith(SET_ASIDE) for name in reader.headers)
    if extra := [name for name in reader.headers if name not in expected and not name.startswith(SET_ASIDE)]:
        raise ProductionError(where, expected="only tensors that the configuration demands", came=_some(sorted(extra)))
    for name, header in expected.items():
        if header is not None and header != reader.headers[name]:
            dtype, shape = reader.headers[name]
            raise ProductionError(name, expected=f"{header[0]} {list(header[1])}", came=f"{dtype} {list(shape)}")
    return formats, aside


def load(reader: Reader, leaf: Leaf, form: str | None, device: torch.device) -> dict[str, Tensor]:
    """One parameter of a stage, with its companions, on the device."""
    if not leaf.projection:
        parts = {leaf.name: (leaf.native, leaf.dtype, leaf.shape)}
    else:
        suffixes = packed(leaf.shape) if form == "nvfp4" else {"weight": ("BF16", leaf.shape)}
        owner = leaf.name.removesuffix("weight")
        parts = {owner + s: (f"{leaf.native}.{s}", dtype, shape) for s, (dtype, shape) in suffixes.items()}
    if not leaf.experts:
        return {name: checked(native, reader.tensor(native)).to(device) for name, (native, _, _) in parts.items()}
    return {
        name: stack(reader, native, leaf.experts, dtype, shape, device)
        for name, (native, dtype, shape) in parts.items()
    }


def stack(
    reader: Reader, native: str, experts: int, dtype: str, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """[E, *shape] in one preallocated host buffer, filled expert by expert, then moved once.

    Never more than the buffer and one expert's tensor are alive. For a GPU the buffer is pinned.
    """
    buffer = torch.empty((experts, *shape), dtype=TORCH_DTYPES[dtype], pin_memory=device.type == "cuda")
    for expert in range(experts):
        name = native.format(expert=expert)
        buffer[expert].copy_(checked(name, reader.tensor(name)))
    return buffer.to(device)


def checked(name: str, tensor: Tensor) -> Tensor:
    """The tensor, if a forward pass with it can mean something."""
    if name.endswith(".input_scale"):
        return tensor  # no part of a W4A16 product
    if name.endswith(".weight_scale") and has_nan_scale(tensor):
        raise ProductionError(name, expected="block scales", came="an E4M3 NaN code among them")
    if name.endswith(".weight_scale_2") and not (bool(tensor.isfinite()) and float(tensor) > 0):
        raise ProductionError(name, expected="a finite number > 0", came=str(float(tensor)))
    if tensor.dtype in (torch.float32, torch.bfloat16) and not bool(tensor.isfinite().all()):
        raise ProductionError(name, expected="finite values", came=f"{int((~tensor.isfinite()).sum())} that are not")
    return tensor


def _format(reader: Reader, stem: str) -> str:
    """Format of a projection by its weight's dtype; a missing weight is reported as missing, so any will do."""
    dtype = reader.headers.get(f"{stem}.weight", ("U8", ()))[0]
    return FORMATS.get(dtype, dtype.lower())


def _tensors(stage: str, leaf: Leaf, stem: str, form: str) -> dict[str, tuple[str, tuple[int, ...]] | None]:
    if form == "bf16":
        return {f"{stem}.weight": ("BF16", leaf.shape)}
    if form != "nvfp4":
        return {f"{stem}.weight": None, f"{stem}.scale": None}
    if leaf.shape[1] % BLOCK:
        raise ProductionError(
            stage, expected=f"K a multiple of {BLOCK} for NVFP4", came=f"K = {leaf.shape[1]} ({stem})"
        )
    return {f"{stem}.{suffix}": header for suffix, header in packed(leaf.shape).items()}


def _some(names: list[str], most: int = 3) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
