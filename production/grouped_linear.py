"""The grouped output projection ``o_a``: each group of heads has its own low-rank map.

``o_a[b, s, g, r] = sum_c out_g[b, s, c] w[g * OL + r, c]`` where out_g is the g-th of G equal parts of the flattened
(H, D) axes (paper section 2.3.1, "Grouped Output Projection"; HF: DeepseekV4GroupedLinear). fp32 accumulation on upcast
operands, one rounding of the output.

Params as a dense projection's, with N = G * OL and K = H * D / G; an NVFP4 tensor has one ``weight_scale_2`` for all
groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from production import nvfp4
from production.component import Call, Component, Params, port, ports, rounding


@dataclass(frozen=True, kw_only=True)
class _GroupedLinear(Component):
    plan = rounding(acc="fp32", out="bf16")
    takes = ports(out=port("B S H D"))
    gives = ports(o_a=port("B S G OL"))

    o_groups: int

    def _product(self, out: Tensor, weight: Tensor) -> Tensor:
        """fp32 [B, S, G, OL]; one batched GEMM over the groups."""
        groups = self.o_groups
        x_GXC = out.flatten(2).float().view(-1, groups, weight.shape[-1]).transpose(0, 1)
        w_GCR = weight.view(groups, -1, weight.shape[-1]).transpose(1, 2)
        return torch.bmm(x_GXC, w_GCR).transpose(0, 1).reshape(*out.shape[:2], groups, -1)


@dataclass(frozen=True, kw_only=True)
class Nvfp4GroupedLinear(_GroupedLinear):
    """``o_a`` with an NVFP4 weight: folded exactly, ``weight_scale_2`` on the accumulator."""

    def compute(self, p: Params, call: Call, *, out: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        y = self._product(out, nvfp4.fold(p["weight"], p["weight_scale"])).mul_(p["weight_scale_2"])
        return {"o_a": y.to(self.act)}


@dataclass(frozen=True, kw_only=True)
class Bf16GroupedLinear(_GroupedLinear):
    """``o_a`` with a bf16 weight."""

    def compute(self, p: Params, call: Call, *, out: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"o_a": self._product(out, p["weight"].float()).to(self.act)}
