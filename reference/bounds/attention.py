"""Attention with a sink over window and compressed keys: output, log-sum-exp, entropy and sink mass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .algebra import REACH, TINY, Spread, V, chain, class_sums, rounding_key
from .linear import contract
from .plan import Plan

#: Elements of a [B, rows, H, J] intermediate that are held at once.
_CHUNK = 1 << 21


@dataclass(frozen=True)
class _Soft:
    """Softmax of one chunk of rows and the error of its logits; [B, S, H, J] and [B, S, H]."""

    l: Tensor  # logits, 0 where not visible
    p: Tensor
    sink: Tensor  # the sink's logit
    mass: Tensor  # the sink's probability
    lse: Tensor
    top: Tensor  # the largest logit, sink included
    count: Tensor  # visible keys
    d: Tensor  # e^{error of l} - 1, root of sum of squares
    d_lin: Tensor
    d_sink: Tensor
    key: Tensor  # logits of one key err alike
    moved: Tensor  # squared relative error of the denominator through the logits
    moved_lin: Tensor
    grow: Tensor  # 1 / the smallest denominator, relative


def attention(q: Tensor, keys: Tensor, visible: Tensor, sinks: Tensor, scaling: float, plan: Plan) -> dict[str, Spread]:
    """out [B, S, H, D], lse, entropy and sink_mass [B, S, H] for q [B, S, H, D], keys = values [B, J, D]."""
    b, s, h, _ = q.shape
    rows = max(1, _CHUNK // max(1, b * h * keys.shape[1]))
    parts = []
    for start in range(0, s, rows):
        cut = slice(start, start + rows)
        soft = _softmax(q[:, cut], keys, visible[:, cut], sinks, scaling, plan)
        parts.append((_output(soft, keys, plan), _lse(soft), _entropy(soft), _sink_mass(soft)))
    whole = [
        Spread(*(torch.cat([getattr(p[i], name) for p in parts], 1) for name in ("y", "var", "lin"))) for i in range(4)
    ]
    return dict(zip(("out", "lse", "entropy", "sink_mass"), whole, strict=True))


def _softmax(q: Tensor, keys: Tensor, visible: Tensor, sinks: Tensor, scaling: float, plan: Plan) -> _Soft:
    """Logits, probabilities, and d_t = expm1(error of l_t).

    Errors of a logit: accumulation over D (:func:`contract`), 2 v |l| for the scaling and a conversion to base 2,
    2 v |l - max| for the argument of the exponential, and v (3 + sqrt(J)/4) for the exponential and the rescalings of a
    blockwise softmax. `logits` rounds the product and the scaled product: 2 u |l|.
    Equal logits (repeated keys) err alike; their probabilities are summed before the square (:func:`class_sums`).
    """
    b, s, h, width = q.shape
    product = contract(q.reshape(b, s * h, width), keys)
    raw = product.map(lambda t: t.reshape(b, s, h, -1)).times(scaling)
    seen = visible.unsqueeze(2)
    l = torch.where(seen, raw.y, torch.full_like(raw.y, float("-inf")))
    sink = sinks.expand(b, s, h)
    lse = torch.logsumexp(torch.cat((l, sink.unsqueeze(-1)), -1), -1)
    top = torch.maximum(l.amax(-1), sink) if l.shape[-1] else sink
    p = torch.exp(l - lse.unsqueeze(-1))
    l = torch.where(seen, raw.y, torch.zeros_like(raw.y))
    away = torch.where(seen, l - top.unsqueeze(-1), torch.zeros_like(l)).abs()
    size = l.abs()
    error = Spread(l, raw.var, raw.lin).plus(
        2 * V * size, 2 * V * away, torch.full_like(l, V * (3 + l.shape[-1] ** 0.5 / 4))
    )
    unit = plan.unit("logits")
    if unit > V:
        error = error.plus(unit * size, unit * size)
    d, d_lin = torch.expm1(error.rss) * seen, torch.expm1(error.lin) * seen
    d_sink = V * (3 + 2 * (sink - top).abs())
    mass = torch.exp(sink - lse)
    key = rounding_key(l)
    moved = (p * class_sums(p, key, -1) * d * d).sum(-1) + (mass * d_sink) ** 2
    moved_lin = (p * d_lin).sum(-1) + mass * d_sink
    shrink = (p * -torch.expm1(-error.lin)).sum(-1) + mass * d_sink
    grow = 1 / (1 - torch.minimum(REACH * moved.sqrt(), shrink).clamp(max=0.9))
    return _Soft(
        l,
        p,
        sink,
        mass,
        lse,
        top,
        visible.sum(-1, keepdim=True).double(),
        d,
        d_lin,
        d_sink,
        key,
        moved,
        moved_lin,
        grow,
    )


def _output(soft: _Soft, keys: Tensor, plan: Plan) -> Spread:
    """o = sum_t p_t v_t. With logits moved by d_t, exactly

        do = sum_t p_t (e^{d_t} - 1) (v_t - o) / (1 + sum_t p_t (e^{d_t} - 1))       (the sink's v is 0),

    so var = sum p_t P_t d_t^2 (v_t - o)^2 with P_t the probability of t's class of equal logits, divided by the
    smallest denominator. `probs` rounds each p: u p_t v_t, alike for equal p. Where the logits are rounded to bf16,
    probabilities are equal as soon as the rounded logits are, so the classes are those. Accumulation over the visible
    keys, the sum and the division of the denominator (chain(n)/2 + 4 v), and probabilities below the smallest normal
    number, which some hardware flushes: 2^-126 sum |v|.
    """
    b, s, h, j = soft.p.shape
    width = keys.shape[-1]
    values = keys.mT.contiguous()  # [B, D, J]

    def over_keys(weights: Tensor, v: Tensor) -> Tensor:
        return (weights.reshape(b, s * h, j) @ v).view(b, s, h, width)

    acc = contract(soft.p.reshape(b, s * h, j), values).map(lambda t: t.reshape(b, s, h, width))
    count = soft.count.unsqueeze(-1)
    o = acc.y
    a = soft.p * class_sums(soft.p, soft.key, -1) * soft.d**2
    spread = over_keys(a, keys**2) - 2 * o * over_keys(a, keys) + o**2 * a.sum(-1, keepdim=True)
    grow = soft.grow.unsqueeze(-1)
    var = spread.clamp(min=0.0) * grow**2 + (soft.mass * soft.d_sink).unsqueeze(-1) ** 2 * o**2
    magnitude = over_keys(soft.p, keys.abs())
    tilt = soft.p * soft.d_lin
    lin = (over_keys(tilt, keys.abs()) + o.abs() * tilt.sum(-1, keepdim=True)) * grow
    lin = lin + o.abs() * (soft.mass * soft.d_sink).unsqueeze(-1)
    unit = plan.unit("probs")
    if unit > V:
        key = rounding_key(soft.l, 8) if plan.unit("logits") > V else rounding_key(soft.p)
        var = var + unit**2 * over_keys(soft.p * class_sums(soft.p, key, -1), keys**2)
        lin = lin + unit * magnitude
    var = var + acc.var * (count / j)
    lin = lin + V * count * magnitude
    flushed = TINY * over_keys((soft.d_lin > 0).double(), keys.abs())
    return Spread(o, var, lin).plus(V * (chain(count) / 2 + 4) * o.abs(), flushed)


def _lse(soft: _Soft) -> Spread:
    """log sum e^l, sink included: dlse = log(1 + sum p_t (e^{d_t} - 1)), the denominator's relative error.

    Around it: its sum (chain(n)/2 + 3) v, and max + log(sum), possibly in base 2: 2 v |max| + 2 v |lse - max|.
    """
    count = chain(soft.count)
    out = Spread(soft.lse, soft.moved * soft.grow**2, soft.moved_lin * soft.grow)
    return out.plus(V * (count / 2 + 3), 2 * V * soft.top.abs(), 2 * V * (soft.lse - soft.top).abs())


def _sink_mass(soft: _Soft) -> Spread:
    """e^{sink - lse}: the relative error is that of the denominator and of the argument, 2 v (|lse| + |sink - lse|)."""
    count = chain(soft.count)
    size = V * (count / 2 + 6 + 2 * soft.lse.abs() + 2 * (soft.sink - soft.lse).abs())
    out = Spread(soft.mass, soft.mass**2 * soft.moved * soft.grow**2, soft.mass * soft.moved_lin * soft.grow)
    return out.plus(soft.mass * size, torch.full_like(soft.mass, TINY))


def _entropy(soft: _Soft) -> Spread:
    """H = -sum r log r of r = p / (1 - sink mass): dH = -sum r_t (log r_t + H) d_t, to first order.

    For equal logits that vanishes, and the second order, sum r d^2 (1 + |log r + H|) / 2, is what is left: it is added.
    H is evaluated as lse - sum r l or as -sum r log r: v times 4 (sum r |l| + |lse|), and v (chain(n) + 4) (H + 1) for
    the normalisation of r. One visible key has H = 0 and only these.
    """
    visible = soft.p > 0
    share = soft.p.sum(-1, keepdim=True)
    safe = torch.where(share > 0, share, torch.ones_like(share))
    r = soft.p / safe
    log_r = torch.where(visible, torch.where(visible, r, torch.ones_like(r)).log(), torch.zeros_like(r))
    h = -(r * log_r).sum(-1)
    slope = (log_r + h.unsqueeze(-1)).abs() * visible
    c = r * slope * soft.d
    second = 0.5 * (r * soft.d**2 * (1 + slope)).sum(-1)
    grow = soft.grow
    var = (c * class_sums(c, soft.key, -1)).sum(-1) * grow**2
    lin = (r * slope * soft.d_lin).sum(-1) * grow
    count = chain(soft.count)
    inner = soft.lse + torch.where(share > 0, safe, torch.ones_like(safe)).squeeze(-1).log()
    size = V * (4 * ((r * soft.l.abs()).sum(-1) + inner.abs()) + (count + 4) * (h + 1))
    return Spread(h, var, lin).plus(size * (soft.count > 0), second * grow)
