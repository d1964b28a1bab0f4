"""The lightning indexer: which compressed entries a query may read on a CSA layer.

It has small overlapping-window keys of its own and scores them with ReLU heads (paper section 2.3.1, eqs. 13-17;
HF: DeepseekV4Indexer, DeepseekV4IndexerScorer):

    score[t, e] = sum_h w[t, h] * ReLU(q[t, h] . key[e]) / sqrt(DI),    w = (W x) / sqrt(HI)

with q projected from the *normed* q residual and rotated at the query's absolute position by the compress table. Entry
e is visible to a query at position t iff its window is complete: e < (t + 1) // m; other scores are -inf.

picks: the min(index_topk, T) best visible entries in order of score, equal scores by the lower index, -1 where fewer
are visible. A replayed ``picks`` is returned as it came.

Rounding: projections, softmax, norm, rotation, head weights and scores are fp32; keys and rotated queries are rounded
to the model's dtype before they meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from production.component import Call, Component, Params, port, ports, rounding
from production.compressor import finish, pool_overlapping, require_start, windows
from production.config import Rope
from production.linear import product
from production.rope import rotate, table

#: Queries scored at a time, times index heads and entries: bounds the [.., HI, T] products in memory.
SCORE_BUDGET = 1 << 24


def ready_entries(positions: Tensor, rate: int, entries: int) -> Tensor:
    """bool [B, S, T]: the entry's window is complete at the query's position."""
    index = torch.arange(entries, device=positions.device)
    return index < ((positions + 1) // rate).unsqueeze(-1)


def relu_scores(q: Tensor, keys: Tensor, head_weight: Tensor) -> Tensor:
    """fp32 [B, S, T] from q [B, S, HI, DI], keys [B, T, DI] and head_weight [B, S, HI] (both scalings included)."""
    batch, queries, heads, _ = q.shape
    keys_t = keys.float().transpose(-1, -2)
    block = max(1, SCORE_BUDGET // max(1, batch * heads * keys.shape[1]))
    parts = []
    for start in range(0, queries, block):
        part = q[:, start : start + block].float()
        products = torch.matmul(part.flatten(1, 2), keys_t).relu_().unflatten(1, (-1, heads))
        parts.append(torch.matmul(head_weight[:, start : start + block].unsqueeze(-2), products).squeeze(-2))
    return torch.cat(parts, dim=1)


def choose(scores: Tensor, count: int) -> Tensor:
    """int64 [B, S, count]: best first, ties to the lower index (a stable sort), -1 for what is not visible."""
    best, index = torch.sort(scores, dim=-1, descending=True, stable=True)
    return torch.where(best[..., :count] == -torch.inf, -1, index[..., :count])


@dataclass(frozen=True, kw_only=True)
class LightningIndexer(Component):
    """Params: kv_proj.weight and gate_proj.weight bf16 (2 DI, d), position_bias fp32 (m, 2 DI), kv_norm.weight bf16
    (DI), q_b_proj.weight in any format (HI DI, QL), weights_proj.weight bf16 (HI, d)."""

    plan = rounding(
        proj="fp32",
        probs="fp32",
        pooled="fp32",
        norm="fp32",
        table="fp32",
        q="fp32",
        q_rope="bf16",
        head_weight="fp32",
        out="bf16",
    )
    takes = ports(x=port("B S d"), q_residual=port("B S QL"), positions=port("B S", "int64"))
    gives = ports(
        keys=port("B T DI"),
        scores=port("B S T", "fp32"),
        picks=port("B S K", "int64", role="picks"),
    )
    replays = "picks"

    index_n_heads: int
    index_head_dim: int
    index_topk: int
    compress_rate: int
    rms_norm_eps: float
    rope: Rope

    def compute(  # type: ignore[override]
        self, p: Params, call: Call, *, x: Tensor, q_residual: Tensor, positions: Tensor
    ) -> dict[str, Tensor]:
        require_start(positions, "indexer")
        pooled = pool_overlapping(*windows(x, p["position_bias"], p))
        keys = finish(pooled, p["kv_norm.weight"], self.rms_norm_eps, self.rope, self.compress_rate).to(self.act)
        scores = relu_scores(self.queries(p, q_residual, positions), keys, self.head_weight(p, x))
        scores.masked_fill_(~ready_entries(positions, self.compress_rate, keys.shape[1]), -torch.inf)
        picks = choose(scores, min(self.index_topk, keys.shape[1])) if call.picks is None else call.picks
        return {"keys": keys, "scores": scores, "picks": picks}

    def queries(self, p: Params, q_residual: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [B, S, HI, DI] in the model's dtype."""
        q = product(q_residual, p, "q_b_proj.").unflatten(-1, (self.index_n_heads, self.index_head_dim))
        cos, sin = table(self.rope, positions)
        return rotate(q, cos.unsqueeze(2), sin.unsqueeze(2)).to(self.act)

    def head_weight(self, p: Params, x: Tensor) -> Tensor:
        """fp32 [B, S, HI], both scalings included."""
        return product(x, p, "weights_proj.") * (self.index_n_heads**-0.5 * self.index_head_dim**-0.5)
