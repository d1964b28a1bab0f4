"""Clamped SwiGLU blocks: the shared expert, and the routed experts with their weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .algebra import TINY, Spread, V, exact, rounding_error, short_sum
from .linear import linear
from .plan import Plan


@dataclass(frozen=True)
class Block:
    """The four values of one block; each without its own output's rounding."""

    gate: Spread
    up: Spread
    act: Spread
    down: Spread


def clamped(x: Spread, low: float | None, high: float) -> Spread:
    """clamp(x): beyond the limit only the part of the error that reaches back across it counts."""
    y = x.y.clamp(min=low, max=high)
    over = (x.y - y).abs()
    passes = (over < x.reach) | (over == 0)
    return Spread(y, x.var * passes, (x.lin - over).clamp(min=0.0))


def silu(x: Spread) -> Spread:
    """x sigma(x). The slope changes by at most 1/2 a unit (|silu''| <= 1/2), so its sup is |silu'| + reach / 2.

    The function: the exponential's (3 + |x|) v, of which 1 - sigma arrives, and 4 v for addition, division and product.
    """
    s, t = torch.sigmoid(x.y), torch.sigmoid(-x.y)
    y = x.y * s
    slope = (s * (1 + x.y * t)).abs() + x.reach / 2
    out = Spread(y, (slope * x.rss) ** 2, slope * x.lin)
    return out.plus(V * y * t * (3 + x.y.abs()), 4 * V * y, TINY * x.y)


def activation(gate: Spread, up: Spread, limit: float, silu_unit: float) -> Spread:
    """silu(clamp(gate)) * clamp(up), with the product of both errors where both factors are near zero."""
    g = silu(clamped(gate, None, limit))
    if silu_unit > V:
        g = g.rounded(silu_unit)
    u = clamped(up, -limit, limit)
    y = g.y * u.y
    return Spread(
        y, u.y**2 * g.var + g.y**2 * u.var + g.reach**2 * u.var, u.y.abs() * g.lin + g.y.abs() * u.lin + g.lin * u.lin
    ).plus(V * y)


def block(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float, plan: Plan) -> Block:
    """One SwiGLU block on rows x [R, d].

    `gate`, `up`, `silu`, `act` round what the next step reads. The rounding of act is known as far as act is, and equal
    values (clamped channels) err alike, so the error that rounding to nearest makes joins the independent sum:
    (sum W e)^2 + sum (W u h)^2.
    """
    weight = plan.dtype("weight")
    g, u = linear(exact(x), gate, weight), linear(exact(x), up, weight)
    g_seen = g.rounded(plan.unit("gate")) if plan.unit("gate") > V else g
    u_seen = u.rounded(plan.unit("up")) if plan.unit("up") > V else u
    h = activation(g_seen, u_seen, limit, plan.unit("silu"))
    unit = plan.unit("act")
    d = linear(h.rounded(unit) if unit > V else h, down, weight)
    if unit > V:
        nominal = rounding_error(h.y, plan.dtype("act")) @ down.mT
        d = Spread(d.y, d.var + nominal**2, d.lin)
    return Block(g, u, h, d)


def experts(x: Tensor, picks: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float, plan: Plan) -> Block:
    """The blocks of every (row, slot): x [R, d], picks [R, k] -> values [R, k, ...]."""
    rows, slots = picks.shape
    widths = (gate.shape[1], up.shape[1], gate.shape[1], down.shape[1])
    parts = [[torch.zeros(rows, slots, w, dtype=torch.float64, device=x.device) for _ in range(3)] for w in widths]
    for e in sorted(set(picks.flatten().tolist())):
        if not 0 <= e < gate.shape[0]:
            continue
        row, slot = torch.where(picks == e)
        done = block(x[row], gate[e], up[e], down[e], limit, plan)
        for part, value in zip(parts, (done.gate, done.up, done.act, done.down), strict=True):
            for whole, piece in zip(part, (value.y, value.var, value.lin), strict=True):
                whole[row, slot] = piece
    return Block(*(Spread(*part) for part in parts))


def combine(down: Spread, weights: Tensor, picks: Tensor, plan: Plan) -> Spread:
    """sum_k w_k down_k over [R, k, d].

    `down` and `weighted` round each term; `sum` rounds the running sum after every addition but the last, which is the
    output's own rounding (index_add_ into a bf16 tensor, in the order of expert ids). With one or two experts a token
    no such rounding is left.
    """
    seen = down.rounded(plan.unit("down")) if plan.unit("down") > V else down
    w = weights.unsqueeze(-1)
    terms = seen.times(w)
    rss, total = short_sum(terms.y, -2)
    out = Spread(terms.y.sum(-2), terms.var.sum(-2), terms.lin.sum(-2))
    out = Spread(out.y, out.var + rss**2, out.lin + total)
    unit = plan.unit("weighted")
    if unit > V:
        out = out.plus(*(unit * t for t in terms.y.unbind(-2)))
    unit = plan.unit("sum")
    if unit > V:
        order = picks.argsort(-1).unsqueeze(-1).expand_as(terms.y)
        running = terms.y.gather(-2, order).cumsum(-2)[..., 1:-1, :]
        out = out.plus(*(unit * (t.abs() + terms.y.square().sum(-2).sqrt()) for t in running.unbind(-2)))
    return out
