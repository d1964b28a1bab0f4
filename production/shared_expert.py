"""The shared expert, one class per weight format, and the sum of the two expert paths.

``out = W2 (silu(min(W1 x, limit)) * clamp(W3 x, +-limit))`` for every token (HF: DeepseekV4MLP); the clamp is the
routed experts'. gate and up are the products before the clamp, fp32; ``act`` is rounded to the model's dtype before W2,
``out`` once. Weights are not rounded (``production.weights``); each projection has scales of its own.

Params: {gate,up,down}_proj.weight and companions as in ``production.linear``; gate and up (F, d), down (d, F).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from production.component import Call, Component, Params, port, ports, rounding
from production.linear import product
from production.swiglu import clamped_swiglu


@dataclass(frozen=True, kw_only=True)
class _SharedExpert(Component):
    """The shared expert; see the module's docstring."""

    plan = rounding(gate="fp32", up="fp32", silu="fp32", act="bf16", out="bf16")
    takes = ports(x=port("B S d"))
    gives = ports(
        gate=port("B S F", "fp32"),
        up=port("B S F", "fp32"),
        act=port("B S F"),
        out=port("B S d"),
    )

    swiglu_limit: float

    def compute(self, p: Params, call: Call, *, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        gate = product(x, p, "gate_proj.")
        up = product(x, p, "up_proj.")
        act = clamped_swiglu(gate, up, self.swiglu_limit).to(self.act)
        return {"gate": gate, "up": up, "act": act, "out": product(act, p, "down_proj.").to(self.act)}


class Nvfp4SharedExpert(_SharedExpert):
    """The shared expert with NVFP4 weights."""


class CtNvfp4SharedExpert(_SharedExpert):
    """The shared expert with NVFP4 weights and reciprocal global scales."""


class Mxfp4SharedExpert(_SharedExpert):
    """The shared expert with MXFP4 weights."""


class Fp8SharedExpert(_SharedExpert):
    """The shared expert with FP8 weights in 128 x 128 blocks."""


class Bf16SharedExpert(_SharedExpert):
    """The shared expert with bf16 or fp32 weights."""


@dataclass(frozen=True, kw_only=True)
class MoeSum(Component):
    """``out = routed + shared``, added in fp32 and rounded once."""

    plan = rounding(out="bf16")
    takes = ports(routed=port("B S d"), shared=port("B S d"))
    gives = ports(out=port("B S d"))

    def compute(self, p: Params, call: Call, *, routed: Tensor, shared: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"out": (routed.float() + shared.float()).to(self.act)}
