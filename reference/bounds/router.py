"""Routing: logits, the scores behind the selection, and the weights of given picks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .algebra import TINY, Spread, V, exact
from .linear import linear
from .plan import Plan


def logits(x: Tensor, weight: Tensor, plan: Plan) -> Spread:
    """x . w of every expert; its own rounding is the margin's h."""
    return linear(exact(x), weight, plan.dtype("weight"))


def scores(l: Spread, plan: Plan) -> Spread:
    """s = sqrt(softplus(l)).

    d log s / dl = sigma(l) / (2 softplus(l)) =: k(l), at most 1/2 and falling, so ds <= s expm1(k(l - dl) dl). The
    function: an exponential of (3 + |l|) v, of which k arrives, a logarithm and a root of 2 v. `scores` rounds the
    softplus (half of u arrives) and the root. Far below zero the softplus itself underflows: by up to 2^-126.
    """
    l = l.rounded(plan.unit("logits")) if plan.unit("logits") > V else l
    soft = softplus(l.y, threshold=700.0)
    s = soft.sqrt()
    at = l.y - l.reach
    k = torch.sigmoid(at) / (2 * softplus(at, threshold=700.0)).clamp(min=torch.finfo(torch.float64).tiny)
    k = torch.where(at < -700.0, torch.full_like(k, 0.5), k)
    out = Spread(s, (s * torch.expm1(k * l.rss)) ** 2, s * torch.expm1(k * l.lin))
    out = out.plus(V * s * k * (3 + l.y.abs()), 2 * V * s, (soft + TINY).sqrt() - s)
    unit = plan.unit("scores")
    return out.plus(unit * s / 2, unit * s) if unit > V else out


def selection(s: Spread, bias: Tensor | None) -> Spread:
    """s + bias, an fp32 addition: what the picks are chosen by."""
    if bias is None:
        return s
    y = s.y + bias
    return Spread(y, s.var, s.lin).plus(V * y.abs())


def weights(s: Spread, picks: Tensor, factor: float, plan: Plan) -> Spread:
    """w = factor s_k / (sum of the picked s + 1e-20), in the order of the picks.

    dw_k = (w_k / s_k) [(1 - s_k / D) ds_k - (s_k / D) sum_{j != k} ds_j]. fp32: sum, division and scaling, (k + 4) v in
    all; `weights` rounds the sum and the quotient (the scaled result is the margin's h). A weight lies between 0 and
    factor whatever the errors.
    """
    own = Spread(*(t.gather(-1, picks) for t in (s.y, s.var, s.lin)))
    den = own.y.sum(-1, keepdim=True) + 1e-20
    share = own.y / den
    w = factor * share
    others = own.var.sum(-1, keepdim=True) - own.var
    others_lin = own.lin.sum(-1, keepdim=True) - own.lin
    gain = factor / den
    out = Spread(
        w,
        gain**2 * ((1 - share) ** 2 * own.var + share**2 * others.clamp(min=0.0)),
        gain * ((1 - share) * own.lin + share * others_lin.clamp(min=0.0)),
    ).plus(V * (picks.shape[-1] + 4) * w)
    unit = plan.unit("weights")
    if unit > V:
        out = out.plus(unit * w, unit * w)
    return Spread(w, out.var.clamp(max=factor**2), out.lin.clamp(max=factor))
