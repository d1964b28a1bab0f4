"""The routed experts, one class per weight format: every token through its picked experts, weighted and summed.

For each (token, slot) with expert e = picks[token, slot] (HF: DeepseekV4Experts):

    gate = W1_e x,   up = W3_e x,   act = silu(min(gate, limit)) * clamp(up, +-limit),   down = W2_e act
    out  = sum over slots of weight[slot] * down[slot]

The routing weight is applied after ``down``. gate and up are the products before the clamp. Rounding: gate, up, down
and the weighted sum fp32; ``act`` is rounded to the model's dtype before W2, ``out`` once. Weights are not rounded:
scales that do not fold exactly are applied to the fp32 accumulator (``production.weights``).

Work goes expert by expert over the tokens that picked it; a weight is folded when its expert is reached, so one
expert's projection exists in fp32 at a time. An expert picked twice by a token counts twice. Sub-rows (gate, up, act,
down) are kept in slot order, [B, S, k, ...], and only when they are asked for.

Params, stacked over E: {gate,up,down}_proj.weight and companions, as ``production.weights`` lists them with E in front.
gate and up are (F, d), down is (d, F). An input_scale, where there is one, is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from production.component import Call, Component, Params, port, ports, rounding
from production.router import checked
from production.swiglu import clamped_swiglu
from production.weights import operand


def expert_product(x: Tensor, p: Params, proj: str, expert: int) -> Tensor:
    """fp32 product of rows x with one projection of one expert."""
    return operand(p, f"{proj}.", expert).product(x)


@dataclass(frozen=True, kw_only=True)
class _MoE(Component):
    """The routed experts; see the module's docstring. weights may be bf16 or fp32; picks in 0..E-1."""

    plan = rounding(
        gate="fp32",
        up="fp32",
        silu="fp32",
        act="bf16",
        down="fp32",
        weighted="fp32",
        sum="fp32",
        out="bf16",
    )
    takes = ports(x=port("B S d"), weights=port("B S k", "bf16/fp32"), picks=port("B S k", "int64"))
    gives = ports(
        gate=port("B S k F", "fp32"),
        up=port("B S k F", "fp32"),
        act=port("B S k F"),
        down=port("B S k d", "fp32"),
        out=port("B S d"),
    )

    swiglu_limit: float

    def compute(  # type: ignore[override]
        self, p: Params, call: Call, *, x: Tensor, weights: Tensor, picks: Tensor
    ) -> dict[str, Tensor]:
        experts, inner = p["gate_proj.weight"].shape[:2]
        slots = checked(picks, experts, "experts").flatten()
        per_token = picks.shape[-1]
        x_XC = x.flatten(0, 1)
        down = x.new_empty(len(slots), x.shape[-1], dtype=torch.float32)
        kept = {
            name: x.new_empty(len(slots), inner, dtype=self.act if name == "act" else torch.float32)
            for name in ("gate", "up", "act")
            if call.detail
        }
        order = torch.argsort(slots, stable=True)
        ends = torch.bincount(slots, minlength=experts).cumsum(0).tolist()
        for expert, (start, end) in enumerate(pairwise([0, *ends])):
            if start == end:
                continue
            rows = order[start:end]
            tokens = x_XC[rows // per_token]
            gate = expert_product(tokens, p, "gate_proj", expert)
            up = expert_product(tokens, p, "up_proj", expert)
            act = clamped_swiglu(gate, up, self.swiglu_limit).to(self.act)
            down[rows] = expert_product(act, p, "down_proj", expert)
            for name, value in zip(kept, (gate, up, act), strict=False):
                kept[name][rows] = value

        shape = picks.shape
        down = down.view(*shape, -1)
        out = torch.matmul(weights.float().unsqueeze(-2), down).squeeze(-2).to(self.act)
        if not call.detail:
            return {"out": out}
        return {**{name: value.view(*shape, -1) for name, value in kept.items()}, "down": down, "out": out}


class Nvfp4MoE(_MoE):
    """The routed experts with NVFP4 weights: each projection of each expert has its own ``weight_scale_2``."""


class CtNvfp4MoE(_MoE):
    """The routed experts with NVFP4 weights and reciprocal global scales."""


class Mxfp4MoE(_MoE):
    """The routed experts with MXFP4 weights, as DeepSeek releases them."""


class Fp8MoE(_MoE):
    """The routed experts with FP8 weights in 128 x 128 blocks, as in the base models."""


class Bf16MoE(_MoE):
    """The routed experts with bf16 or fp32 weights."""
