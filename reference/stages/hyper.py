"""The hyper-connections around both halves of a layer, and the mix that closes each half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reference.net import Net
from reference.stages.base import HFStage, Port, Tensors, origin, place
from reference.stages.model import collapse


class Hyper(HFStage):
    """``attn_hc`` and ``ffn_hc``: how the streams are weighed into a sub-layer, and back. HF:
    ``DeepseekV4HyperConnection``, which keeps ``pre`` to itself.

    streams ``[B, S, N, d]`` -> pre, post ``[B, S, N]``, comb ``[B, S, N, M]`` (stream in, stream out), all float32,
    and collapsed ``[B, S, d]``. ``pre`` is the module's own expression, computed a second time; InvalidRun if it does
    not give the module's collapsed streams bit for bit.
    """

    def __init__(self, net: Net, layer: int, half: str) -> None:
        super().__init__(net, layer, f"{half}_hc")
        self.half = half
        self.direct_with = place(layer, f"{half}_mix")

    @property
    def module(self) -> Any:
        assert self.layer is not None
        return getattr(self.net.layer(self.layer), self.kind)

    @property
    def inputs(self) -> Mapping[str, str]:
        assert self.layer is not None
        return {"streams": entering(self.layer, self.half)}

    @property
    def outputs(self) -> Sequence[Port]:
        small = [self.port(name, "B S N", "fp32") for name in ("pre", "post")]
        return [*small, self.port("comb", "B S N M", "fp32"), self.port("collapsed", "B S d")]

    @property
    def points(self) -> Mapping[str, str]:
        return {"collapsed": "bf16"}

    @property
    def component(self) -> str:
        return origin(self.module)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        hc, streams = self.module, inputs["streams"].contiguous()
        post, comb, collapsed = hc(streams)
        count = hc.hc_mult
        flat = hc.input_norm(streams.flatten(2).float())  # [B, S, N * d]
        # The whole projection and then its first columns: another shape of GEMM may round otherwise.
        mixes = torch.nn.functional.linear(flat, hc.fn.float())[..., :count]
        pre = torch.sigmoid(mixes * hc.scale[0] + hc.base[:count]) + hc.hc_eps
        return {"pre": pre, "post": post, "comb": comb, "collapsed": collapse(self.name, pre, streams, collapsed)}

    def direct(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Direct-residual mode: the sub-layer reads the mean of the streams (float32 sum, one rounding)."""
        streams = inputs["streams"]
        return {"collapsed": streams.float().mean(dim=2).to(streams.dtype)}


class Mix(HFStage):
    """``attn_mix`` and ``ffn_mix``: ``post * out`` added to the streams carried by ``comb`` transposed. HF: inline in
    ``DeepseekV4DecoderLayer.forward``, where post and comb are rounded to the model's dtype first.

    streams ``[B, S, N, d]``, post ``[B, S, N]``, comb ``[B, S, N, M]``, out ``[B, S, d]`` -> streams ``[B, S, N, d]``.
    """

    def __init__(self, net: Net, layer: int, half: str) -> None:
        super().__init__(net, layer, f"{half}_mix")
        self.half = half
        self.direct_with = place(layer, f"{half}_hc")

    @property
    def inputs(self) -> Mapping[str, str]:
        assert self.layer is not None
        return {
            "streams": entering(self.layer, self.half),
            "post": self.wire(f"{self.half}_hc", "post"),
            "comb": self.wire(f"{self.half}_hc", "comb"),
            "out": self.wire("o_b" if self.half == "attn" else "moe_sum", "out"),
        }

    @property
    def outputs(self) -> Sequence[Port]:
        return [self.port("streams", "B S N d")]

    @property
    def points(self) -> Mapping[str, str]:
        return {"coef": "bf16", "terms": "bf16", "out": "bf16"}

    @property
    def component(self) -> str:
        assert self.layer is not None
        return origin(self.net.layer(self.layer))

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        streams = inputs["streams"].contiguous()
        dtype = streams.dtype
        carried = torch.matmul(inputs["comb"].to(dtype).transpose(-1, -2), streams)  # [B, S, N, d]
        return {"streams": inputs["post"].to(dtype).unsqueeze(-1) * inputs["out"].unsqueeze(-2) + carried}

    def direct(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Direct-residual mode: a tenth of the sub-layer's output is added to every stream (one rounding).

        Needs ``streams`` and ``out``; post and comb do not exist in this mode and are ignored.
        """
        streams = inputs["streams"]
        return {"streams": (streams.float() + 0.1 * inputs["out"].float().unsqueeze(-2)).to(streams.dtype)}


def entering(layer: int, half: str) -> str:
    """The wire of the streams that enter a half of a layer."""
    if half == "ffn":
        return f"layers.{layer}.attn_mix.streams"
    return "embed.streams" if layer == 0 else f"layers.{layer - 1}.ffn_mix.streams"
