"""Say what a checkpoint is: layout, sizes, schedule, tensors by family, shards. Reads headers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases.checkpoints.folder import Folder, open_folder
from cases.checkpoints.layout import detect, title
from cases.checkpoints.manifest import parts, stored_as
from cases.checkpoints.model import Model, model, read_config

FACTS = (
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "sliding_window",
    "hc_mult",
    "swiglu_limit",
    "routed_scaling_factor",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class Family:
    """Tensors of one family and dtype."""

    name: str
    dtype: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    folder: str
    layout: str
    quantization: dict[str, Any]
    facts: dict[str, Any]
    layers: tuple[str, ...]  # attention type and router of each
    families: tuple[Family, ...]
    shards: tuple[tuple[str, int, int, str], ...]  # name, tensors, bytes, where a symbolic link leads
    problems: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "layout": self.layout,
            "quantization_config": self.quantization,
            "config": self.facts,
            "layers": list(self.layers),
            "families": [vars(family) for family in self.families],
            "shards": [dict(zip(("file", "tensors", "bytes", "link"), shard, strict=True)) for shard in self.shards],
            "problems": list(self.problems),
        }

    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield f"{self.folder}: {self.layout}"
        method = ", ".join(f"{k} {v}" for k, v in self.quantization.items())
        yield f"quantization: {method or 'none'}"
        yield "config: " + ", ".join(f"{key} {value}" for key, value in self.facts.items())
        yield f"layers ({len(self.layers)}):"
        for first, last, what in _runs(self.layers):
            yield f"  {first if first == last else f'{first}-{last}':<8} {what}"
        total = sum(f.nbytes for f in self.families)
        yield f"tensors: {sum(f.tensors for f in self.families)}, {_size(total)}"
        for family in self.families:
            yield f"  {family.name:<18} {family.dtype:<8} {family.tensors:>7} {_size(family.nbytes):>12}"
        yield f"shards: {len(self.shards)}"
        shown = self.shards if len(self.shards) <= 12 else (*self.shards[:6], *self.shards[-3:])
        for name, tensors, nbytes, link in shown:
            yield f"  {name} {tensors} tensors {_size(nbytes)}" + (f" -> {link}" if link else "")
        if len(shown) < len(self.shards):
            yield f"  ({len(self.shards) - len(shown)} more)"
        for problem in self.problems:
            yield f"problem: {problem}"


def inspect(path: Path) -> Inspection:
    """Describe the checkpoint in ``path``. UsageError when there is nothing to describe."""
    config = read_config(path)
    sizes = model(config, str(path / "config.json"))
    folder = open_folder(path)
    layout = detect(folder.dtypes())
    family_of = {}
    if layout is not None:
        for part in parts(sizes, draft=True):
            for spec in stored_as(part, sizes, layout):
                family_of.update(dict.fromkeys(spec.names, part.family))
    quantization = config.get("quantization_config") or {}
    shown = ("quant_method", "quant_algo", "moe_quant_algo", "format", "scale_fmt", "weight_block_size", "group_size")
    return Inspection(
        folder=str(path),
        layout="no DeepSeek-V4 layout" if layout is None else title(layout),
        quantization={k: quantization[k] for k in shown if k in quantization},
        facts={key: config[key] for key in FACTS if key in config},
        layers=tuple(_layer(sizes, n) for n in range(sizes.layers)),
        families=_families(folder, family_of),
        shards=tuple(_shards(folder)),
        problems=tuple(f"{p.kind}: {p.where}: {p.text}" for p in folder.problems),
    )


def _layer(sizes: Model, n: int) -> str:
    return f"{sizes.kinds[n]}, {'hash' if sizes.hashed[n] else 'scored'} router"


def _families(folder: Folder, family_of: dict[str, str]) -> tuple[Family, ...]:
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for name in folder.where:
        stored = folder.stored(name)
        other = "draft block" if name.startswith("mtp.") else "unknown"
        key = (family_of.get(name, other), stored.dtype)
        counts[key] += 1
        sizes[key] += stored.nbytes
    return tuple(Family(*key, counts[key], sizes[key]) for key in sorted(sizes, key=lambda k: -sizes[k]))


def _shards(folder: Folder) -> Iterator[tuple[str, int, int, str]]:
    for name, header in folder.headers.items():
        path = folder.path / name
        link = str(path.resolve()) if path.is_symlink() else ""
        yield name, len(header.tensors), header.identity.size, link


def _runs(layers: tuple[str, ...]) -> Iterator[tuple[int, int, str]]:
    first = 0
    for n, what in enumerate(layers):
        if n + 1 == len(layers) or layers[n + 1] != what:
            yield first, n, what
            first = n + 1


def _size(nbytes: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.2f} {unit}" if unit != "B" else f"{nbytes} B"
        nbytes /= 1000  # type: ignore[assignment]
    raise AssertionError
