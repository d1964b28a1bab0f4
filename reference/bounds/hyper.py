"""Hyper-connections: the coefficients, the collapsed stream, and the mix of the streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .algebra import TINY, Spread, V, exact, short_sum
from .linear import linear
from .norm import arithmetic
from .sinkhorn import projection


@dataclass(frozen=True)
class Logits:
    """Pre-activations a = scale z + base: the value, errors of each, and the error that all share through the norm."""

    a: Tensor
    own: Tensor  # independent amplitude (root of sum of squares) of each
    own_lin: Tensor
    common: Tensor  # signed amplitude of the shared error, rss
    common_ratio: float  # its plain sum over its rss

    def part(self, start: int, stop: int) -> Logits:
        a, own, own_lin, common = (t[..., start:stop] for t in (self.a, self.own, self.own_lin, self.common))
        return Logits(a, own, own_lin, common, self.common_ratio)


def logits(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float) -> Logits:
    """a = scale (fn . x r) + base, x the flattened streams and r their rms factor.

    z = fn . (x r) accumulates over K = N d products (:func:`contract`); the roundings of x r are among its products.
    The relative error of r is one error for every coefficient of a token, so it is kept apart. Then dz scale,
    v |z scale| and v |a| for the two last operations. A production that norms after the product makes the same errors.
    """
    x = streams.flatten(-2)
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    z = linear(exact(normed), fn, "exact")
    scaled = z.y * scale
    a = scaled + base
    own = (z.var * scale**2 + V**2 * (scaled**2 + a**2)).sqrt()
    own_lin = z.lin * scale.abs() + V * (scaled.abs() + a.abs())
    rss, total = arithmetic(x.shape[-1])
    return Logits(a, own, own_lin, scaled * rss, total / rss)


def sigmoid(l: Logits) -> Spread:
    """sigma(a) in fp32, relative to its own size even in the tail.

    dsigma = sigma (1 - sigma) da, taken at the far end of a's error (sigma' grows at most by exp(da)). The function: an
    exponential of 3 v and v |a| (argument reduction, or a product with log2 e), of which 1 - sigma arrives, an addition
    and a division of 3 v. An implementation through tanh is off by v *absolutely*, which is many ulp of a closed gate;
    it is not covered. TINY covers exponentials that overflow or are flushed.
    """
    y = torch.sigmoid(l.a)
    slope = y * torch.sigmoid(-l.a) * torch.exp(l.own_lin + l.common.abs())
    tail = torch.sigmoid(-l.a) * (3 + l.a.abs())
    size = V * y * (tail**2 + 9).sqrt()
    out = Spread(
        y, (slope * l.own) ** 2 + (slope * l.common) ** 2, slope * (l.own_lin + l.common.abs() * l.common_ratio)
    )
    out = out.plus(size, torch.full_like(y, TINY))
    return Spread(out.y, out.var, out.lin + size)


def collapse(pre: Spread, streams: Tensor) -> Spread:
    """sum_n pre_n x_n. The pre of a token share their norm's error, so their errors are added plainly (N terms)."""
    terms = pre.y.unsqueeze(-1) * streams
    rss, total = short_sum(terms, -2)
    size = streams.abs()
    moved = (pre.rss.unsqueeze(-1) * size).sum(-2)
    return Spread(terms.sum(-2), moved**2 + rss**2, (pre.lin.unsqueeze(-1) * size).sum(-2) + total)


def connection(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, hc_eps: float, iterations: int
) -> dict[str, Spread]:
    """pre = sigma + eps, post = 2 sigma, comb (Sinkhorn) and the collapsed stream of one hyper-connection."""
    n = streams.shape[-2]
    widths = [n, n, n * n]
    each = torch.cat([scale[i].expand(w) for i, w in enumerate(widths)])
    l = logits(streams, fn, base, each, eps)
    pre = _opened(l.part(0, n), hc_eps)
    post = sigmoid(l.part(n, 2 * n)).times(2.0)
    c = l.part(2 * n, 2 * n + n * n)
    square = (*c.a.shape[:-1], n, n)
    comb = projection(
        c.a.reshape(square),
        c.own.reshape(square),
        c.common.reshape(square),
        torch.tensor(c.common_ratio),
        iterations,
        hc_eps,
    )
    return {"pre": pre, "post": post, "comb": Spread(*comb), "collapsed": collapse(pre, streams)}


def head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, hc_eps: float) -> dict[str, Spread]:
    """The last collapse: pre of N streams, and their weighted sum."""
    pre = _opened(logits(streams, fn, base, scale, eps), hc_eps)
    return {"pre": pre, "collapsed": collapse(pre, streams)}


def _opened(l: Logits, hc_eps: float) -> Spread:
    s = sigmoid(l)
    y = s.y + hc_eps
    return Spread(y, s.var, s.lin).plus(V * y)


def mix(streams: Tensor, post: Tensor, comb: Tensor, out: Tensor, *, coef: str, terms: float) -> Spread:
    """post_m y + sum_n comb[n, m] x_n for every output stream m.

    fp32: N + 1 products and their sum. `coef` rounds the coefficients, which are given, so what that does is known;
    `terms` rounds (to unit roundoff `terms`) the product with post and the sum of the others, which the reference holds
    as two tensors; a kernel may round other products, so these count as unknown.
    """
    weight, add = exact(comb).fixed(coef), exact(post).fixed(coef)

    def both(c: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return p.unsqueeze(-1) * out.unsqueeze(-2), (c.unsqueeze(-1) * streams.unsqueeze(-2)).sum(-3)  # [..., m, d]

    expanded, residual = both(weight.at, add.at)
    magnitude = (post.unsqueeze(-1) * out.unsqueeze(-2)).abs()
    magnitude = magnitude + (comb.unsqueeze(-1) * streams.unsqueeze(-2)).abs().sum(-3)
    count = streams.shape[-2] + 1
    zero = torch.zeros_like(magnitude)
    result = Spread(sum(both(comb, post), start=zero), V**2 * count * magnitude**2, V * (count + 1) * magnitude)
    result = result.moved(expanded + residual)
    return result.plus(terms * expanded, terms * residual) if terms > V else result
