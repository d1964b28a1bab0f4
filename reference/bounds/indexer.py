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
    """keys [B, T, D] and unmasked scores [B, S, T]."""
    _, keys = compress(x, params, inv_freq, plan, rate=rate, overlap=True, eps=eps)
    q = linear(exact(q_residual), params["q_b_proj.weight"], plan.dtype("weight"))
    q = q.view(*q.y.shape[:-1], heads, -1)
    cos, sin = table(positions, inv_freq, plan.unit("table"), fp32_angle=plan.fp32_angle)
    q = rotate(
        tail_rounded(q, 2 * inv_freq.numel(), plan.dtype("q"), plan.dtype("q_rope")),
        *(Spread(t.y.unsqueeze(2), t.var.unsqueeze(2), t.lin.unsqueeze(2)) for t in (cos, sin)),
    )
    if plan.unit("q_rope") > V:
        q = q.rounded(plan.unit("q_rope"))
    weights = linear(exact(x), params["weights_proj.weight"], plan.dtype("weight"))
    if plan.unit("head_weight") > V:
        weights = weights.rounded(plan.unit("head_weight"))
    seen = keys.rounded(plan.unit("out")) if plan.unit("out") > V else keys
    return keys, scores(q, seen, weights, heads)


def scores(q: Spread, k: Spread, w: Spread, heads: int) -> Spread:
    """score_t = scale sum_h w_h relu(q_h . k_t), with scale = (D heads)^(-1/2).

    * The error of a key is the same for every head, so the heads are summed before the square:
      sum_d (sum_h w_h q_hd)^2 var(k_td), over the heads that are on. The error of q_h belongs to its head.
    * relu passes the error of a product that is positive or near enough to zero to become so.
    * fp32: accumulation of the products (:func:`contract`), two scalings (4 v), the product with w, the sum over heads.
    """
    b, s, h, d = q.y.shape
    t = k.y.shape[1]
    scale = (d * heads) ** -0.5
    out = [torch.zeros(b, s, t, dtype=torch.float64, device=q.y.device) for _ in range(3)]
    rows = max(1, _CHUNK // max(1, b * t * max(d, h)))
    for start in range(0, s, rows):
        cut = slice(start, start + rows)
        part = _score_rows(_rows(q, cut), _rows(w, cut), k, scale)
        for whole, piece in zip(out, (part.y, part.var, part.lin), strict=True):
            whole[:, cut] = piece
    return Spread(*out)


def _score_rows(q: Spread, w: Spread, k: Spread, scale: float) -> Spread:
    keys = Spread(*(x.unsqueeze(1) for x in (k.y, k.var, k.lin)))  # [B, 1, T, D] against [B, s, H, D]
    dot = contract(q.y, keys.y)  # [B, s, H, T]
    own = dot.var + q.var @ (keys.y**2).mT + 16 * V**2 * dot.y**2
    own_lin = dot.lin + q.lin @ keys.y.abs().mT + 8 * V * dot.y.abs()
    key_lin = q.y.abs() @ keys.lin.mT
    near = REACH * (own + q.y**2 @ keys.var.mT).sqrt()
    on = (dot.y > -torch.minimum(near, own_lin + key_lin)).double()
    c = (w.y * scale).unsqueeze(-1)  # [B, s, H, 1]
    relu = dot.y.clamp(min=0.0)
    g = (on * c).mT @ q.y  # [B, s, T, D]
    terms = c * relu
    total = terms.abs().sum(-2)
    width = w.y.shape[-1]
    var = (c**2 * on * own).sum(-2) + (g * g * keys.var).sum(-1) + ((scale * relu) ** 2 * w.var.unsqueeze(-1)).sum(-2)
    lin = (c.abs() * on * (own_lin + key_lin)).sum(-2) + (scale * relu * w.lin.unsqueeze(-1)).sum(-2)
    return Spread(terms.sum(-2), var, lin).plus(V * width**0.5 * total, V * total)


def _rows(x: Spread, cut: slice) -> Spread:
    return Spread(x.y[:, cut], x.var[:, cut], x.lin[:, cut])
