"""A checkpoint folder: opened, checked against its manifest, decoded. Every layout comes out as the same entries.

Opening reads headers only. Decoding one tensor gives its exact value in float64 (integers stay integers) and reads no
more than that tensor; values that no weight can have (NaN, infinity, a scale of NaN) are refused there. Every refusal
is a UsageError of one line that names the file and the tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from harness.types import UsageError
from reference import fast, formats, nvfp4
from reference.geometry import Geometry, read
from reference.manifest import Entry
from reference.manifest import entries as manifest_of
from reference.shards import INDEX, Header, Shards
from reference.storage import Storage, match


class Checkpoint:
    """An opened checkpoint. ``geometry`` is its config, ``manifest`` its entries by checkpoint name."""

    def __init__(
        self, folder: Path, geometry: Geometry, shards: Shards, family: str, storage: Mapping[str, Storage]
    ) -> None:
        self.folder = folder
        self.geometry = geometry
        self.shards = shards
        self.family = family
        self.storage = storage
        self.manifest: dict[str, Entry] = {entry.name: entry for entry in manifest_of(geometry)}
        self._leaves: dict[str, dict[str, list[Entry]]] = {}
        for entry in self.manifest.values():
            self._leaves.setdefault(entry.stage, {}).setdefault(entry.leaf, []).append(entry)

    @property
    def headers(self) -> Mapping[str, Header]:
        """What is stored, by the checkpoint's own names."""
        return self.shards.headers

    def leaves(self, stage: str) -> Mapping[str, list[Entry]]:
        """The entries of a stage's parameters by canonical leaf: one, or one per expert in order."""
        return self._leaves.get(stage, {})

    def packed(self, entry: Entry) -> bool:
        """Whether an entry's exact value need not be a bfloat16: 4 or 8 bits times a scale that is no power of two."""
        storage = self.storage[entry.name]
        if storage.form == "fp8":
            return self.headers[storage.names["scale"]].dtype != "F8_E8M0"
        return storage.form.startswith("nvfp4") or self.headers[storage.names["weight"]].dtype == "F32"

    def decode(self, entry: Entry) -> Tensor:
        """The exact value: float64 of the entry's shape, or int64 for a table. Raises UsageError on a bad value."""
        storage = self.storage[entry.name]
        name = storage.names["weight"]
        if storage.form == "table":
            table = self.shards.tensor(name).to(torch.int64)
            experts = self.geometry.n_routed_experts
            if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < experts:
                raise self._refuse(name, f"expert ids in 0..{experts - 1}", f"{table.min()}..{table.max()}")
            return table
        value = self._float(entry, storage) if storage.form == "float" else self._scaled(storage)
        if not bool(torch.isfinite(value).all()):
            raise self._refuse(name, "finite values", _spot(value))
        return value

    def rounded(self, entry: Entry) -> Tensor | None:
        """The value of a four-bit weight rounded once to bfloat16, without the detour over float64; None for others."""
        storage = self.storage[entry.name]
        if storage.form not in ("mxfp4", "nvfp4", "nvfp4-divided"):
            return None
        parts = self._parts(storage)
        if storage.form == "mxfp4":
            return fast.mxfp4_bfloat16(parts["weight"], parts["scale"])
        divide = storage.form == "nvfp4-divided"
        return fast.nvfp4_bfloat16(parts["weight"], parts["scale"], parts["scale_2"], divide=divide)

    def parts(self, entry: Entry) -> dict[str, Tensor]:
        """The stored tensors of a scaled weight by role, with its ``input_scale`` if there is one."""
        storage = self.storage[entry.name]
        found = self._parts(storage)
        name = storage.names["weight"].removesuffix("weight") + "input_scale"
        return found | ({"input_scale": self.shards.tensor(name)} if name in self.headers else {})

    def decoded(self, stage: str) -> dict[str, Tensor]:
        """Every parameter of a stage by canonical leaf, exact; experts stacked ``[E, N, K]``."""
        value: dict[str, Tensor] = {}
        for leaf, group in self.leaves(stage).items():
            if group[0].expert is None:
                value[leaf] = self.decode(group[0])
                continue
            stack = torch.empty((len(group), *group[0].shape), dtype=torch.float64)
            for place, entry in enumerate(group):  # one expert beside the stack, not all of them twice
                stack[place] = self.decode(entry)
            value[leaf] = stack
        return value

    def fingerprint(self) -> str:
        """SHA-256 of config.json and the index (or the headers): which checkpoint this is, without its data."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        index = self.folder / INDEX
        digest.update(index.read_bytes() if index.exists() else repr(sorted(self.headers.items())).encode())
        return digest.hexdigest()

    def _float(self, entry: Entry, storage: Storage) -> Tensor:
        name = storage.names["weight"]
        if storage.rows is None:
            return self.shards.tensor(name).to(torch.float64)
        assert entry.expert is not None
        return self.shards.rows(name, entry.expert, *storage.rows).to(torch.float64)

    def _scaled(self, storage: Storage) -> Tensor:
        parts = self._parts(storage)
        if storage.form == "fp8":
            return formats.fp8(parts["weight"], parts["scale"])
        if storage.form == "mxfp4":
            return formats.mxfp4(parts["weight"], parts["scale"])
        decode = nvfp4.decode if storage.form == "nvfp4" else formats.nvfp4_divided
        return decode(parts["weight"], parts["scale"], parts["scale_2"])

    def _parts(self, storage: Storage) -> dict[str, Tensor]:
        """The tensors of a scaled weight by role; UsageError for scales that no weight can have."""
        parts = {role: self.shards.tensor(name) for role, name in storage.names.items()}
        steps = formats.scales(parts["scale"])
        if not bool(torch.isfinite(steps).all()):
            raise self._refuse(storage.names["scale"], "finite block scales", _spot(steps))
        whole = parts.get("scale_2")
        if whole is not None and not (bool(torch.isfinite(whole).all()) and float(whole) > 0):
            raise self._refuse(storage.names["scale_2"], "a finite positive scale", f"{float(whole)}")
        return parts

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
    shards = Shards(path)
    family, storage = match(path, geometry, shards.headers)
    return Checkpoint(path, geometry, shards, family, storage)


def _spot(value: Tensor) -> str:
    """The first value that is not finite, and where."""
    where = (~torch.isfinite(value)).nonzero()[0].tolist()
    return f"{float(value[tuple(where)])} at {where}"
