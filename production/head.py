"""The language-model head.

``logits[b, s, v] = sum_c x[b, s, c] weight[v, c]``, fp32 accumulation on upcast operands; the logits leave in fp32,
not rounded (HF rounds them to bf16). Params: weight bf16 or fp32 (V, d).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from production.component import Call, Component, Params, port, ports, rounding
from production.linear import product


@dataclass(frozen=True, kw_only=True)
class LmHead(Component):
    """The head; see the module's docstring."""

    plan = rounding(acc="fp32", out="fp32")
    takes = ports(x=port("B S d"))
    gives = ports(logits=port("B S V", "fp32"))

    def compute(self, p: Params, call: Call, *, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": product(x, p)}
