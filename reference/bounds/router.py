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
    function: an exponential of (3 + |l|) v, of which k arrives, a logarithm and a root of 2 v. The rounding of the
    logits is known; `scores` rounds the softplus (half of u arrives) and the root, or perhaps only one of them:
    unknown. Far below zero the softplus itself underflows: by up to 2^-126.
    """
    l = l.fixed(plan.dtype("logits"))
    soft = softplus(l.at, threshold=700.0)
    s = soft.sqrt()
    end = l.at - l.reach
    k = torch.sigmoid(end) / (2 * softplus(end, threshold=700.0)).clamp(min=torch.finfo(torch.float64).tiny)
    k = torch.where(end < -700.0, torch.full_like(k, 0.5), k)
    out = Spread(softplus(l.y, threshold=700.0).sqrt(), (s * torch.expm1(k * l.rss)) ** 2, s * torch.expm1(k * l.lin))
    out = out.moved(s).plus(V * s * k * (3 + l.at.abs()), 2 * V * s, (soft + TINY).sqrt() - s)
    unit = plan.unit("scores")
    return out.plus(unit * s / 2, unit * s) if unit > V else out


def selection(s: Spread, bias: Tensor | None) -> Spread:
    """s + bias, an fp32 addition: what the picks are chosen by."""
    if bias is None:
        return s
    return Spread(s.y + bias, s.var, s.lin, s.bias).plus(V * (s.at + bias))


def weights(s: Spread, picks: Tensor, factor: float, plan: Plan) -> Spread:
    """w = factor s_k / (sum of the picked s + 1e-20), in the order of the picks.

    dw_k = (w_k / s_k) [(1 - s_k / D) ds_k - (s_k / D) sum_{j != k} ds_j]. fp32: sum, division and scaling, (k + 4) v in
    all; `weights` rounds the sum and the quotient (the scaled result is the margin's h). A weight lies between 0 and
    factor whatever the errors.
    """
    own = s.map(lambda t: t.gather(-1, picks))
    plain = factor * own.y / (own.y.sum(-1, keepdim=True) + 1e-20)
    den = own.at.sum(-1, keepdim=True) + 1e-20
    share = own.at / den
    w = factor * share
    others = own.var.sum(-1, keepdim=True) - own.var
    others_lin = own.lin.sum(-1, keepdim=True) - own.lin
    gain = factor / den
    out = Spread(
        plain,
        gain**2 * ((1 - share) ** 2 * own.var + share**2 * others.clamp(min=0.0)),
        gain * ((1 - share) * own.lin + share * others_lin.clamp(min=0.0)),
    )
    out = out.moved(w).plus(V * (picks.shape[-1] + 4) * w)
    unit = plan.unit("weights")
    if unit > V:
        out = out.plus(unit * w, unit * w)
    return Spread(out.y, out.var.clamp(max=factor**2), out.lin.clamp(max=factor), out.bias)
