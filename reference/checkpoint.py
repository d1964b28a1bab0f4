"""A checkpoint folder in ModelOpt's NVFP4 layout under DeepSeek's names: opened, checked against its manifest, decoded.

Opening reads headers only. Decoding one tensor gives its exact value in float64 (integers stay integers); values that
no weight can have (NaN, infinity, a scale of NaN) are refused there. Every refusal is a UsageError of one line that
names the file and the tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.types import UsageError
from reference import nvfp4
from reference.geometry import Geometry, load_json, read
from reference.manifest import Entry, entries

INDEX = "model.safetensors.index.json"
#: the next-token-prediction block: in the checkpoint, not in the Hugging Face model
ASIDE = "mtp."


@dataclass(frozen=True)
class Header:
    """Where a tensor lies and what its header says; ``dtype`` in safetensors' words (``BF16``, ``U8`` ...)."""

    shard: str
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """An opened checkpoint. ``geometry`` is its config, ``manifest`` its entries by checkpoint name."""

    def __init__(self, folder: Path, geometry: Geometry, headers: Mapping[str, Header], files: Mapping[str, Any]):
        self.folder = folder
        self.geometry = geometry
        self.headers = headers
        self._files = files
        self.manifest: dict[str, Entry] = {entry.name: entry for entry in entries(geometry)}
        self._leaves: dict[str, dict[str, list[Entry]]] = {}
        for entry in self.manifest.values():
            self._leaves.setdefault(entry.stage, {}).setdefault(entry.leaf, []).append(entry)

    def leaves(self, stage: str) -> Mapping[str, list[Entry]]:
        """The entries of a stage's parameters by canonical leaf: one, or one per expert in order."""
        return self._leaves.get(stage, {})

    def packed(self, entry: Entry) -> bool:
        """Whether an entry is stored as NVFP4."""
        return self.headers[entry.name].dtype == "U8"

    def decode(self, entry: Entry) -> Tensor:
        """The exact value: float64 of the entry's shape, or int64 for a table. Raises UsageError on a bad value."""
        if entry.kind == "table":
            table = self._tensor(entry.name).to(torch.int64)
            experts = self.geometry.n_routed_experts
            if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < experts:
                raise self._refuse(entry.name, f"expert ids in 0..{experts - 1}", f"{table.min()}..{table.max()}")
            return table
        if not self.packed(entry):
            value = self._tensor(entry.name).to(torch.float64)
            if not bool(torch.isfinite(value).all()):
                raise self._refuse(entry.name, "finite values", _spot(value))
            return value
        names = [f"{entry.stem}.{part}" for part in ("weight", "weight_scale", "weight_scale_2")]
        packed, scale, scale_2 = (self._tensor(name) for name in names)
        if bool(torch.isnan(scale.to(torch.float32)).any()):
            raise self._refuse(names[1], "finite block scales", _spot(scale.to(torch.float64)))
        if not (bool(torch.isfinite(scale_2)) and float(scale_2) > 0):
            raise self._refuse(names[2], "a finite positive scale", f"{float(scale_2)}")
        return nvfp4.decode(packed, scale, scale_2)

    def decoded(self, stage: str) -> dict[str, Tensor]:
        """Every parameter of a stage by canonical leaf, exact; experts stacked ``[E, N, K]``."""
        value: dict[str, Tensor] = {}
        for leaf, group in self.leaves(stage).items():
            parts = [self.decode(entry) for entry in group]
            value[leaf] = parts[0] if group[0].expert is None else torch.stack(parts)
        return value

    def fingerprint(self) -> str:
        """SHA-256 of config.json and the index: which checkpoint this is, without reading its shards."""
        digest = hashlib.sha256()
        for name in ("config.json", INDEX):
            digest.update((self.folder / name).read_bytes())
        return digest.hexdigest()

    def _tensor(self, name: str) -> Tensor:
        shard = self.headers[name].shard
        try:
            value: Tensor = self._files[shard].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UsageError(
                f"{self.folder / shard}: expected to read {name}, came {error}; copy the shard again"
            ) from None
        return value

    def _refuse(self, name: str, expected: str, came: str) -> UsageError:
        where = self.folder / self.headers[name].shard
        return UsageError(f"{where}: {name}: expected {expected}, came {came}; export or copy the checkpoint again")


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a checkpoint folder and hold it against its manifest: names, shards, dtypes and shapes.

    Raises UsageError for anything missing, left over, mismatched or unreadable.
    """
    path = Path(folder)
    if not path.is_dir():
        raise UsageError(f"{path}: expected a checkpoint folder, came {'a file' if path.exists() else 'nothing'}")
    geometry = read(path)
    index = _index(path)
    files = {shard: _open(path, shard) for shard in sorted(set(index.values()))}
    headers = _headers(path, index, files)
    _match(path, geometry, headers)
    return Checkpoint(path, geometry, headers, files)


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard file name."""
    path = folder / INDEX
    weights = load_json(path).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise UsageError(f"{path}: expected a non-empty object 'weight_map', came {_kind(weights)}; copy it again")
    for name, shard in weights.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
            raise UsageError(f"{path}: {name}: expected the name of a .safetensors file beside it, came {shard!r}")
    return weights


def _open(folder: Path, shard: str) -> Any:
    path = folder / shard
    if not path.is_file():
        raise UsageError(f"{path}: expected a shard that {INDEX} names, came no such file; copy the shard")
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{path}: expected a whole safetensors file, came a truncated or corrupt one ({error}); copy the shard again"
        ) from None


def _headers(folder: Path, index: Mapping[str, str], files: Mapping[str, Any]) -> dict[str, Header]:
    headers: dict[str, Header] = {}
    for shard, file in files.items():
        for name in file.keys():  # noqa: SIM118 - no mapping
            if index.get(name) != shard:
                came = f"{index[name]!r} there" if name in index else "no entry there"
                raise UsageError(
                    f"{folder / shard}: {name}: expected {INDEX} to place it in this shard, came {came}; the index "
                    "and the shards are not of one export"
                )
            view = file.get_slice(name)
            headers[name] = Header(shard, view.get_dtype(), tuple(view.get_shape()))
    gone = sorted(set(index) - set(headers))
    if gone:
        raise UsageError(
            f"{folder / index[gone[0]]}: expected {gone[0]} as {INDEX} says, came a shard without it"
            f"{_more(gone)}; the index and the shards are not of one export"
        )
    return headers


def _match(folder: Path, geometry: Geometry, headers: Mapping[str, Header]) -> None:
    """Hold the headers against the manifest."""
    left = {name for name in headers if not name.startswith(ASIDE)}
    missing: list[str] = []
    for entry in entries(geometry):
        header = headers.get(entry.name)
        if header is None:
            missing.append(entry.name)
            continue
        left.discard(entry.name)
        if entry.kind == "linear" and header.dtype == "U8":
            _match_packed(folder, entry, headers, left, missing)
        else:
            allowed = ("I64", "I32") if entry.kind == "table" else ("BF16", "F32")
            words = " or ".join(allowed) + (" or U8 (packed NVFP4)" if entry.kind == "linear" else "")
            _expect(folder, entry.name, header, allowed, entry.shape, words)
    if missing:
        raise UsageError(
            f"{folder / INDEX}: expected {missing[0]}, came no such tensor{_more(missing)}"
            f"{_hint(left)}; the checkpoint does not hold what its config.json describes"
        )
    if left:
        names = sorted(left)
        raise UsageError(
            f"{folder / headers[names[0]].shard}: {names[0]}: expected no such tensor for this config.json, came "
            f"{headers[names[0]].dtype} {list(headers[names[0]].shape)}{_more(names)}; correct config.json or the export"
        )


def _match_packed(
    folder: Path, entry: Entry, headers: Mapping[str, Header], left: set[str], missing: list[str]
) -> None:
    rows, columns = entry.shape
    if columns % nvfp4.BLOCK:
        raise UsageError(
            f"{folder}: {entry.name}: expected a width that {nvfp4.BLOCK} divides for NVFP4, came {columns}; store it "
            "as BF16"
        )
    layout: dict[str, tuple[str, tuple[int, ...], bool]] = {
        "weight": ("U8", (rows, columns // 2), True),
        "weight_scale": ("F8_E4M3", (rows, columns // nvfp4.BLOCK), True),
        "weight_scale_2": ("F32", (), True),
        "input_scale": ("F32", (), False),  # for activations: nothing here uses it
    }
    for part, (dtype, shape, needed) in layout.items():
        name = f"{entry.stem}.{part}"
        left.discard(name)
        header = headers.get(name)
        if header is not None:
            _expect(folder, name, header, (dtype,), shape, dtype)
        elif needed:
            missing.append(name)


def _expect(folder: Path, name: str, header: Header, dtypes: Iterable[str], shape: tuple[int, ...], words: str) -> None:
    where = folder / header.shard
    if header.dtype not in dtypes:
        raise UsageError(
            f"{where}: {name}: expected dtype {words}, came {header.dtype}; export the checkpoint in ModelOpt's NVFP4 "
            "layout"
        )
    if header.shape != shape:
        raise UsageError(
            f"{where}: {name}: expected shape {list(shape)} from config.json, came {list(header.shape)}; correct "
            "config.json or the export"
        )


def _hint(left: Iterable[str]) -> str:
    extra = sorted(left)
    return f", while {extra[0]}{_more(extra)} is unexpected" if extra else ""


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _kind(value: object) -> str:
    return "none" if value is None else type(value).__name__


def _spot(value: Tensor) -> str:
    """The first value that is not finite, and where."""
    where = (~torch.isfinite(value)).nonzero()[0].tolist()
    return f"{float(value[tuple(where)])} at {where}"
