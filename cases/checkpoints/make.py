"""Make a checkpoint of random values: any layout, any size, one matrix in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cases.checkpoints import formats
from cases.checkpoints.layout import Layout
from cases.checkpoints.manifest import Part, parts, stored_as
from cases.checkpoints.model import Model, model
from cases.checkpoints.quantization import config_json, documents, tokenizer
from cases.checkpoints.synthesis import Synthesis
from cases.checkpoints.write import Planned, Writer, write_checkpoint

PLAIN = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
SHARD_BYTES = 4 << 30


def make(
    target: Path,
    config: Mapping[str, Any],
    layout: Layout,
    *,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write ``target`` with random values for ``config`` (DeepSeek's form; its draft block is written if it has one).

    The values depend on the seed and the names alone: two layouts of one seed hold the same model, each as closely as
    its formats allow. A model with the bundled checkpoint's vocabulary gets its tokenizer. Returns the tensors' bytes;
    UsageError when the folder cannot be written.
    """
    sizes = model(config)
    source = Synthesis(sizes, seed)
    groups = plan(sizes, layout)
    documented = {"config.json": config_json(config, layout), **documents(layout), **tokenizer(sizes.vocab)}

    def produce(writer: Writer) -> None:
        for part in parts(sizes, layout.drafts):
            _put(writer, part, layout, sizes, source)

    write_checkpoint(target, groups, produce, documented, shard_bytes)
    return sum(planned.nbytes for group in groups for planned in group)


def plan(sizes: Model, layout: Layout) -> list[list[Planned]]:
    """The tensors of every part, in the order in which they are written."""
    found = (
        [Planned(spec.name, spec.dtypes[0], spec.shape) for spec in stored_as(part, sizes, layout)]
        for part in parts(sizes, layout.drafts)
    )
    return [group for group in found if group]


def encode(part: Part, form: str, w: Tensor, amax: Tensor, layout: Layout) -> dict[str, Tensor]:
    """A linear's float32 values as the tensors of a format, by role."""
    if form == "fp8":
        weight, scale = formats.encode_fp8(w, layout.fp8_scale)
        return {"weight": weight, "scale": scale}
    if form == "mxfp4":
        weight, scale = formats.encode_mxfp4(w)
        return {"weight": weight, "scale": scale}
    packed = (formats.encode_nvfp4 if form == "nvfp4" else formats.encode_nvfp4_ct)(w, amax)
    return {"weight": packed.weight, "scale": packed.scale, "scale_2": packed.scale_2}


def fused_parts(part: Part, sizes: Model) -> Iterable[Part]:
    """The parts that a stacked tensor holds, in its order: gate and up of each expert, or down of each."""
    stem = f"layers.{part.layer}.ffn.experts."
    for expert in range(sizes.experts):
        for leaf in ("w1", "w3") if part.leaf == "w1" else ("w2",):
            key = f"{stem}{expert}.{leaf}.weight"
            yield Part(key, part.family, part.shape, part.plain, part.layer, expert, part.linear)


def _put(writer: Writer, part: Part, layout: Layout, sizes: Model, source: Synthesis) -> None:
    specs = {spec.role: spec for spec in stored_as(part, sizes, layout)}
    if not specs:
        return
    if "fused" in specs:
        for piece in fused_parts(part, sizes):
            writer.put(specs["fused"].name, source.values(piece).to(torch.bfloat16))
        return
    form = layout.form(part.linear, part.draft)
    if form == "plain":
        whole = part.linear or part.plain != "BF16" or len(part.shape) == 1
        for piece in [source.values(part)] if whole else source.pieces(part):
            writer.put(specs["weight"].name, piece.to(PLAIN[part.plain]))
        return
    stored = encode(part, form, source.values(part), source.amax(part) if "nvfp4" in form else torch.ones(()), layout)
    if "input_scale" in specs:
        given = source.input_scale(part)
        stored["input_scale"] = (1.0 / given).reshape(1) if form == "nvfp4-ct" else given
    for role, tensor in stored.items():
        writer.put(specs[role].name, tensor)
