"""The rotations of queries and keys, and the one that takes the position back out of the attention's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from reference import hf
from reference.net import Net
from reference.stages.base import HFStage, Port, Tensors, origin

TABLES = ("main_cos", "main_sin", "compress_cos", "compress_sin")

#: stage -> (input and output name, stage it reads, dims)
SOURCES: Mapping[str, tuple[str, str, str]] = {
    "q_rope": ("q", "q_b_norm", "B S H D"),
    "kv_rope": ("kv", "kv_norm", "B S D"),
    "attn_unrope": ("out", "attn_core", "B S H D"),
}


class Rotation(HFStage):
    """``q_rope``, ``kv_rope`` and ``attn_unrope``: pairs (2i, 2i+1) of the last rope channels are turned; the inverse
    negates the sine. HF: ``apply_rotary_pos_emb`` as ``DeepseekV4Attention.forward`` calls it. Both tables come in,
    ``[B, S, R2]`` each; the layer's own ``rope_layer_type`` chooses.
    """

    def __init__(self, net: Net, layer: int, kind: str) -> None:
        super().__init__(net, layer, kind)
        self.argument, self.source, self.dims = SOURCES[kind]

    @property
    def inputs(self) -> Mapping[str, str]:
        tables = {name: f"rope_cache.{name}" for name in TABLES}
        return {self.argument: self.wire(self.source, self.argument), **tables}

    @property
    def outputs(self) -> Sequence[Port]:
        return [self.port(self.argument, self.dims)]

    @property
    def points(self) -> Mapping[str, str]:
        return {"out": "bf16"}

    @property
    def component(self) -> str:
        return origin(hf.modeling.apply_rotary_pos_emb)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        assert self.layer is not None
        rope = self.net.layer(self.layer).self_attn.rope_layer_type
        cos, sin = inputs[f"{rope}_cos"], inputs[f"{rope}_sin"]
        if self.kind == "attn_unrope":
            sin = -sin
        x = inputs[self.argument]
        heads = x.unsqueeze(2) if self.kind == "kv_rope" else x  # one key head
        turned: Tensor = hf.modeling.apply_rotary_pos_emb(heads.transpose(1, 2), cos, sin).transpose(1, 2)
        return {self.argument: turned.squeeze(2) if self.kind == "kv_rope" else turned}
