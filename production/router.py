"""Routers: which experts a token goes to, and with what weight.

    logits = W x,   s = sqrt(softplus(logits)),   w_e = factor * s_e / (sum over picks of s + 1e-20)

Dense layers pick the k largest s + bias; the bias takes part in the choice only, and equal values go to the lower
index. Hash layers look the picks up by token id (paper section 2.1; HF: DeepseekV4TopKRouter, DeepseekV4HashRouter).
Everything is fp32: logits, scores and weights leave in fp32. picks are int64, in order of score + bias on dense layers
and in table order on hash layers. A replayed ``picks`` is weighted as if it had been chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from production.component import Call, Component, Params, Port, port, ports, rounding
from production.errors import ProductionError
from production.linear import product

#: Keeps the renormalisation finite when every picked score has underflowed (HF has the same constant).
FLOOR = 1e-20


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(ln(1 + e^x)) for every fp32 x.

    Below -17, softplus(x) = e^x (1 - e^x/2 ...) = e^x to fp32 precision; halving the exponent first keeps the root a
    normal number down to x = -174, where e^x itself would have vanished at -104.
    """
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    return torch.where(x < -17, torch.exp(x / 2), softplus.sqrt())


@dataclass(frozen=True, kw_only=True)
class _Router(Component):
    plan = rounding(logits="fp32", scores="fp32", weights="fp32")
    takes = ports(x=port("B S d"), input_ids=port("B S", "int64"))
    replays = "picks"
    picks_role: ClassVar[str]

    num_experts_per_tok: int
    routed_scaling_factor: float

    @property
    def gives(self) -> Mapping[str, Port]:  # type: ignore[override]
        return {
            "logits": port("B S E", "fp32"),
            "weights": port("B S k", "fp32"),
            "picks": port("B S k", "int64", role=self.picks_role),
        }

    def pick(self, p: Params, scores: Tensor, input_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def compute(self, p: Params, call: Call, *, x: Tensor, input_ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = product(x, p)
        scores = sqrt_softplus(logits)
        picks = self.pick(p, scores, input_ids) if call.picks is None else checked(call.picks, scores.shape[-1])
        picked = scores.gather(-1, picks)
        weights = picked / (picked.sum(-1, keepdim=True) + FLOOR) * self.routed_scaling_factor
        result = {"logits": logits, "weights": weights, "picks": picks}
        if call.choice and call.picks is not None and self.picks_role == "picks":
            result["chosen"] = self.pick(p, scores, input_ids)
        return result


@dataclass(frozen=True, kw_only=True)
class TopKRouter(_Router):
    """Dense routing. Params: weight bf16 (E, d), e_score_correction_bias fp32 (E)."""

    picks_role = "picks"

    def pick(self, p: Params, scores: Tensor, input_ids: Tensor) -> Tensor:
        biased = scores + p["e_score_correction_bias"].float()
        order = torch.sort(biased, dim=-1, descending=True, stable=True).indices
        return order[..., : self.num_experts_per_tok].contiguous()


@dataclass(frozen=True, kw_only=True)
class HashRouter(_Router):
    """Routing by token id. Params: weight bf16 (E, d), tid2eid int64 (V, k)."""

    picks_role = "exact"

    def pick(self, p: Params, scores: Tensor, input_ids: Tensor) -> Tensor:
        table = p["tid2eid"]
        if input_ids.numel() and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < table.shape[0]:
            came = f"{int(input_ids.min())}..{int(input_ids.max())}"
            raise ProductionError("router: input_ids", expected=f"0..{table.shape[0] - 1}", came=came)
        return checked(table[input_ids], scores.shape[-1])


def checked(picks: Tensor, experts: int, where: str = "router") -> Tensor:
    """Expert ids within range, or an error."""
    if picks.numel() and not 0 <= int(picks.min()) <= int(picks.max()) < experts:
        came = f"{int(picks.min())}..{int(picks.max())}"
        raise ProductionError(f"{where}: picks", expected=f"expert ids 0..{experts - 1}", came=came)
    return picks
