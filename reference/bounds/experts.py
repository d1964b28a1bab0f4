"""Clamped SwiGLU blocks: the shared expert, and the routed experts with their weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .algebra import TINY, Spread, V, exact, short_sum
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
    at = x.at.clamp(min=low, max=high)
    over = (x.at - at).abs()
    passes = (over < x.reach) | (over == 0)
    return Spread(x.y.clamp(min=low, max=high), x.var * passes, (x.lin - over).clamp(min=0.0)).moved(at)


def silu(x: Spread) -> Spread:
    """x sigma(x). The slope changes by at most 1/2 a unit (|silu''| <= 1/2), so its sup is |silu'| + reach / 2.

    The function: the exponential's (3 + |x|) v, of which 1 - sigma arrives, and 4 v for addition, division and product.
    """
    at = x.at
    s, t = torch.sigmoid(at), torch.sigmoid(-at)
    slope = (s * (1 + at * t)).abs() + x.reach / 2
    out = Spread(x.y * torch.sigmoid(x.y), (slope * x.rss) ** 2, slope * x.lin).moved(at * s)
    return out.plus(V * at * s * t * (3 + at.abs()), 4 * V * at * s, TINY * at)


def activation(gate: Spread, up: Spread, limit: float, silu_dtype: str) -> Spread:
    """silu(clamp(gate)) * clamp(up), with the product of both errors where both factors are near zero."""
    g = silu(clamped(gate, None, limit)).fixed(silu_dtype)
    u = clamped(up, -limit, limit)
    var = u.at**2 * g.var + g.at**2 * u.var + g.reach**2 * u.var
    lin = u.at.abs() * g.lin + g.at.abs() * u.lin + g.lin * u.lin
    return Spread(g.y * u.y, var, lin).moved(g.at * u.at).plus(V * g.at * u.at)


def block(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float, plan: Plan) -> Block:
    """One SwiGLU block on rows x [R, d].

    `gate`, `up`, `silu` and `act` round what the next step reads, each at one place that leaves no choice, so these
    roundings are known (:meth:`Spread.fixed`), and so is what they do to the result.
    """
    weight = plan.dtype("weight")
    g, u = linear(exact(x), gate, weight), linear(exact(x), up, weight)
    h = activation(g.fixed(plan.dtype("gate")), u.fixed(plan.dtype("up")), limit, plan.dtype("silu"))
    return Block(g, u, h, linear(h.fixed(plan.dtype("act")), down, weight))


def experts(x: Tensor, picks: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float, plan: Plan) -> Block:
    """The blocks of every (row, slot): x [R, d], picks [R, k] -> values [R, k, ...]; zeros for an id of no expert."""
    widths = (gate.shape[1], up.shape[1], gate.shape[1], down.shape[1])
    empty = [torch.zeros(4, *picks.shape, width, dtype=torch.float64, device=x.device) for width in widths]
    whole = [Spread(*parts.unbind(0)) for parts in empty]
    for e in sorted(set(picks.flatten().tolist()) & set(range(gate.shape[0]))):
        row, slot = torch.where(picks == e)
        done = block(x[row], gate[e], up[e], down[e], limit, plan)
        values = (done.gate, done.up, done.act, done.down)
        for target, value in zip(whole, values, strict=True):
            for name in ("y", "var", "lin", "bias"):
                getattr(target, name)[row, slot] = getattr(value, name)
    return Block(*whole)


def combine(down: Spread, weights: Tensor, picks: Tensor, plan: Plan) -> Spread:
    """sum_k w_k down_k over [R, k, d].

    `down` and `weighted` round each term; `sum` rounds the running sum after every addition but the last, which is the
    output's own rounding (index_add_ into a bf16 tensor, in the order of expert ids; another order has other partial
    sums, so these count as unknown). With one or two experts a token no such rounding is left.
    """
    terms = down.fixed(plan.dtype("down")).times(weights.unsqueeze(-1))
    terms = terms.plus(V * terms.at).fixed(plan.dtype("weighted"))
    rss, total = short_sum(terms.y, -2)
    out = terms.map(lambda t: t.sum(-2))
    out = Spread(out.y, out.var + rss**2, out.lin + total, out.bias)
    unit = plan.unit("sum")
    if unit > V:
        order = picks.argsort(-1).unsqueeze(-1).expand_as(terms.y)
        running = terms.y.gather(-2, order).cumsum(-2)[..., 1:-1, :]
        out = out.plus(*(unit * (t.abs() + terms.y.square().sum(-2).sqrt()) for t in running.unbind(-2)))
    return out
