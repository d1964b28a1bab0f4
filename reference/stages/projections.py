"""The linears and norms between the attention's ends: one Hugging Face module each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from reference.net import Net
from reference.stages.base import HFStage, Port, Tensors, origin

#: stage -> (module below the layer, input name, wire it reads, output name, output dims)
NORMS: Mapping[str, tuple[str, str, tuple[str, str], str, str]] = {
    "attn_norm": ("input_layernorm", "x", ("attn_hc", "collapsed"), "x", "B S d"),
    "q_a_norm": ("self_attn.q_a_norm", "x", ("q_a", "q_a"), "q_residual", "B S QL"),
    "q_b_norm": ("self_attn.q_b_norm", "q", ("q_b", "q"), "q", "B S H D"),
    "kv_norm": ("self_attn.kv_norm", "kv", ("kv", "kv"), "kv", "B S D"),
    "ffn_norm": ("post_attention_layernorm", "x", ("ffn_hc", "collapsed"), "x", "B S d"),
}
LINEARS: Mapping[str, tuple[str, str, tuple[str, str], str, str]] = {
    "q_a": ("self_attn.q_a_proj", "x", ("attn_norm", "x"), "q_a", "B S QL"),
    "q_b": ("self_attn.q_b_proj", "x", ("q_a_norm", "q_residual"), "q", "B S H D"),
    "kv": ("self_attn.kv_proj", "x", ("attn_norm", "x"), "kv", "B S D"),
    "o_a": ("self_attn.o_a_proj", "out", ("attn_unrope", "out"), "o_a", "B S G OL"),
    "o_b": ("self_attn.o_b_proj", "x", ("o_a", "o_a"), "out", "B S d"),
}


class Projection(HFStage):
    """A norm or a linear of a layer: the module named in the tables above, on one tensor.

    ``q_b`` splits its columns into heads ``[B, S, H, D]``; ``o_a`` takes heads and gathers them into groups
    ``[B, S, G, H/G * D]``; ``o_b`` takes ``[B, S, G, OL]`` flattened. ``q_b_norm`` has no weight and rounds the
    reciprocal root to the model's dtype before it multiplies.
    """

    def __init__(self, net: Net, layer: int, kind: str) -> None:
        super().__init__(net, layer, kind)
        table = NORMS if kind in NORMS else LINEARS
        self.path, self.argument, (source, wire), self.result, self.dims = table[kind]
        self.source = self.wire(source, wire)

    @property
    def module(self) -> Any:
        assert self.layer is not None
        return self.net.layer(self.layer).get_submodule(self.path)

    @property
    def inputs(self) -> Mapping[str, str]:
        return {self.argument: self.source}

    @property
    def outputs(self) -> Sequence[Port]:
        return [self.port(self.result, self.dims)]

    @property
    def points(self) -> Mapping[str, str]:
        if self.kind == "q_b_norm":
            return {"rsqrt": "bf16", "out": "bf16"}
        if self.kind in NORMS:
            return {"out": "bf16"}
        return {"weight": self.weight_point(), "acc": "fp32", "out": "bf16"}

    @property
    def component(self) -> str:
        return origin(self.module)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        return {self.result: self._apply(inputs[self.argument])}

    def _apply(self, x: Tensor) -> Tensor:
        g = self.net.geometry
        value: Tensor
        if self.kind == "q_b":
            value = self.module(x).view(*x.shape[:-1], g.num_attention_heads, g.head_dim)
        elif self.kind == "q_b_norm":
            value = self.module(x.transpose(1, 2)).transpose(1, 2)  # the module sees [B, H, S, D]
        elif self.kind == "o_a":
            value = self.module(x.reshape(*x.shape[:2], g.o_groups, -1))
        elif self.kind == "o_b":
            value = self.module(x.flatten(2))
        else:
            value = self.module(x)
        return value
