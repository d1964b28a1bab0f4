"""Softmax pooling over windows of tokens: the body of both compressors and of the indexer's."""

from __future__ import annotations

import torch
from torch import Tensor

from .algebra import REACH, Spread, V, coherent, rounding_key


def windows(t: Tensor, rate: int, overlap: bool, fill: float) -> Tensor:
    """[B, S, W] -> [B, T, slots, D]: `rate` tokens a window, preceded (CSA) by the previous window's other series.

    With overlap W = 2 D: the first D channels of a window go to the next entry, the last D to its own; the first entry
    has no predecessor and gets `fill`.
    """
    count = t.shape[1] // rate
    t = t[:, : count * rate].reshape(t.shape[0], count, rate, t.shape[-1])
    if not overlap:
        return t
    ahead, own = t.chunk(2, dim=-1)
    first = torch.full_like(own[:, :1], fill)
    return torch.cat((torch.cat((first, ahead[:, :-1]), 1)[:, :count], own), 2)


def pool(kv: Spread, gate: Spread, bias: Tensor, probs_unit: float) -> Spread:
    """y = sum_t p_t k_t per channel, p = softmax over the slots (axis -2) of gate + bias.

    Exactly, with l moved by d_t:  dy = sum_t p_t (e^{d_t} - 1) (k_t - y) / (1 + sum_t p_t (e^{d_t} - 1)), so

        var = sum (p_t dk_t)^2 + sum (p_t (k_t - y) expm1(d_t))^2 + the roundings of p and of p k,

    divided by the smallest denominator. d_t: the projection's error, v |l| for the bias and 2 v |l - max| + 3 v for the
    exponential. Known errors of k and l move the pooled value to a known place, around which all this is taken. Tokens
    of one window are often the same token, whose projections are bit for bit the same and err alike, so each sum is
    taken over classes of equal values (:func:`coherent`). Masked slots have l = -inf and no effect. A reduced `probs`
    rounds p and, as a product of two bf16 tensors, p k as well; a fused kernel may round e^{l - max} instead, so these
    count as unknown.
    """
    plain = (torch.softmax(gate.y + bias, -2) * kv.y).sum(-2)
    l, k = gate.at + bias, kv.at
    p = torch.softmax(l, -2)
    live = l.isfinite()
    away = torch.where(live, l - l.amax(-2, keepdim=True), torch.zeros_like(l)).abs()
    size = torch.where(live, l, torch.zeros_like(l)).abs()
    moved = gate.plus(V * size, 2 * V * away, torch.full_like(p, 3 * V))
    d, d_lin = torch.expm1(moved.rss), torch.expm1(moved.lin)
    y = (p * k).sum(-2)
    tilt = p * (k - y.unsqueeze(-2)).abs()
    terms = p * k
    gate_key = rounding_key(torch.where(live, gate.y, torch.zeros_like(l)))
    var = coherent(p * kv.rss, rounding_key(kv.y), -2) + coherent(tilt * d, gate_key, -2)
    lin = (p * kv.lin).sum(-2) + (tilt * d_lin).sum(-2)
    if probs_unit > V:
        magnitude = probs_unit * terms
        var = var + coherent(magnitude, rounding_key(p), -2) + coherent(magnitude, rounding_key(terms), -2)
        lin = lin + 2 * magnitude.abs().sum(-2)
    shift = REACH * coherent(p * d, gate_key, -2).sqrt()
    shift = torch.minimum(shift, (p * -torch.expm1(-moved.lin)).sum(-2)).clamp(max=0.9)
    grow = 1 / (1 - shift)
    around = Spread(plain, var * grow**2, lin * grow).moved(y)
    return around.plus(V * p.shape[-2] ** 0.5 * terms.abs().sum(-2), 3 * V * y.abs())
