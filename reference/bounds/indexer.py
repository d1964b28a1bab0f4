"""The lightning indexer's keys and scores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .algebra import REACH, Spread, V, exact
from .compressor import compress, tail_rounded
from .linear import contract, linear
from .plan import Plan
from .rope import rotate, table

#: Elements of the [rows, T, D] intermediate that are held at once.
_CHUNK = 1 << 23


def index(
    x: Tensor,
    q_residual: Tensor,
    positions: Tensor,
    params: Mapping[str, Tensor],
    inv_freq: Tensor,
    plan: Plan,
    *,
    rate: int,
    heads: int,
    eps: float,
) -> tuple[Spread, Spread]:
    """keys [B, T, D] and unmasked scores [B, S, T].

    Where projections and rotation are fp32, rotated queries and keys are known to far less than a bf16 ulp, so that
    their roundings are known (:meth:`Spread.fixed`); after bf16 tables and pooling they are not, and count as unknown.
    """
    _, keys = compress(x, params, inv_freq, plan, rate=rate, overlap=True, eps=eps)
    q = linear(exact(q_residual), params["q_b_proj.weight"], plan.dtype("weight"))
    q = q.map(lambda t: t.reshape(*t.shape[:-1], heads, -1))
    angle = table(positions, inv_freq, plan.unit("table"), fp32_angle=plan.fp32_angle)
    cos, sin = (t.map(lambda part: part.unsqueeze(2)) for t in angle)
    q = rotate(tail_rounded(q, 2 * inv_freq.numel(), plan.dtype("q"), plan.dtype("q_rope")), cos, sin)
    weights = linear(exact(x), params["weights_proj.weight"], plan.dtype("weight")).fixed(plan.dtype("head_weight"))
    return keys, scores(q.fixed(plan.dtype("q_rope")), keys.fixed(plan.dtype("out")), weights)


def scores(q: Spread, k: Spread, w: Spread) -> Spread:
    """score_t = scale sum_h w_h relu(q_h . k_t), with scale = (D heads)^(-1/2).

    * Known errors move the operands, and so the scores: their bias is the score of the moved operands minus the score.
    * The error of a key is the same for every head, so the heads are summed before the square:
      sum_d (sum_h w_h q_hd)^2 var(k_td), over the heads that are on. The error of q_h belongs to its head.
    * relu passes the error of a product that is positive or near enough to zero to become so.
    * fp32: accumulation of the products (:func:`contract`), two scalings (4 v), the product with w, the sum over heads.
    """
    b, s, h, d = q.y.shape
    t = k.y.shape[1]
    rows = max(1, _CHUNK // max(1, b * t * max(d, h)))
    keys = k.map(lambda part: part.unsqueeze(1))  # [B, 1, T, D] against [B, s, H, D]
    parts = [_score_rows(_cut(q, i, rows), _cut(w, i, rows), keys) for i in range(0, s, rows)]
    return Spread(*(torch.cat([getattr(p, name) for p in parts], 1) for name in ("y", "var", "lin", "bias")))


def _score_rows(q: Spread, w: Spread, k: Spread) -> Spread:
    heads, width = q.y.shape[-2:]
    scale = (heads * width) ** -0.5
    query, key = q.y + q.bias, k.y + k.bias
    dot = contract(query, key)  # [B, s, H, T]
    own = dot.var + q.var @ (key**2).mT + 16 * V**2 * dot.y**2
    own_lin = dot.lin + q.lin @ key.abs().mT + 8 * V * dot.y.abs()
    key_lin = query.abs() @ k.lin.mT
    near = REACH * (own + query**2 @ k.var.mT).sqrt()
    on = (dot.y > -torch.minimum(near, own_lin + key_lin)).double()
    c = ((w.y + w.bias) * scale).unsqueeze(-1)  # [B, s, H, 1]
    relu = dot.y.clamp(min=0.0)
    g = (on * c).mT @ query  # [B, s, T, D]
    terms = c * relu
    total = terms.abs().sum(-2)
    exactly = (w.y.unsqueeze(-1) * scale * (q.y @ k.y.mT).clamp(min=0.0)).sum(-2)
    var = (c**2 * on * own).sum(-2) + (g * g * k.var).sum(-1) + ((scale * relu) ** 2 * w.var.unsqueeze(-1)).sum(-2)
    lin = (c.abs() * on * (own_lin + key_lin)).sum(-2) + (scale * relu * w.lin.unsqueeze(-1)).sum(-2)
    return Spread(exactly, var, lin, terms.sum(-2) - exactly).plus(V * heads**0.5 * total, V * total)


def _cut(x: Spread, start: int, count: int) -> Spread:
    return x.map(lambda part: part[:, start : start + count])
