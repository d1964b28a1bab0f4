"""The grouped output projection ``o_a``: each group of heads has its own low-rank map.

``o_a[b, s, g, r] = sum_c out_g[b, s, c] w[g * OL + r, c]`` where out_g is the g-th of G equal parts of the flattened
(H, D) axes (paper section 2.3.1, "Grouped Output Projection"; HF: DeepseekV4GroupedLinear). fp32 accumulation on upcast
operands, one rounding of the output.

Params as the dense projection's of the same format, with N = G * OL and K = H * D / G; a scale of the whole tensor is
one for all groups, and a 128-row block of FP8 may span several.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from production.component import Call, Component, Params, port, ports, rounding
from production.weights import Operand, operand


@dataclass(frozen=True, kw_only=True)
class _GroupedLinear(Component):
    plan = rounding(acc="fp32", out="bf16")
    takes = ports(out=port("B S H D"))
    gives = ports(o_a=port("B S G OL"))

    o_groups: int

    def compute(self, p: Params, call: Call, *, out: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"o_a": self._product(out, operand(p)).to(self.act)}

    def _product(self, out: Tensor, w: Operand) -> Tensor:
        """fp32 [B, S, G, OL]: one batched GEMM over the groups, or one product a group where scales vary along K."""
        groups, (rows, columns) = self.o_groups, w.matrix.shape
        x_XGC = out.flatten(2).float().view(-1, groups, columns)
        if w.tiles is None:
            w_GCR = w.matrix.view(groups, -1, columns).transpose(1, 2)
            y = torch.bmm(x_XGC.transpose(0, 1), w_GCR).transpose(0, 1)
            y = y if w.scale is None else y.mul_(w.scale)
            y = y if w.divisor is None else y.div_(w.divisor)
        else:
            bounds = range(0, rows, rows // groups)
            parts = [w.rows(r, r + rows // groups).product(x_XGC[:, g]) for g, r in enumerate(bounds)]
            y = torch.stack(parts, 1)
        return y.reshape(*out.shape[:2], groups, -1)


class Nvfp4GroupedLinear(_GroupedLinear):
    """``o_a`` with an NVFP4 weight."""


class CtNvfp4GroupedLinear(_GroupedLinear):
    """``o_a`` with an NVFP4 weight and a reciprocal global scale."""


class Mxfp4GroupedLinear(_GroupedLinear):
    """``o_a`` with an MXFP4 weight."""


class Fp8GroupedLinear(_GroupedLinear):
    """``o_a`` with an FP8 weight in 128 x 128 blocks."""


class Bf16GroupedLinear(_GroupedLinear):
    """``o_a`` with a bf16 or fp32 weight."""
