"""Rotary embedding: the cos/sin tables and the interleaved rotation of the trailing channels."""

from __future__ import annotations

import torch
from torch import Tensor

from .algebra import Spread, V, exact


def table(positions: Tensor, inv_freq: Tensor, unit: float, *, fp32_angle: bool) -> tuple[Spread, Spread]:
    """cos and sin of position * inv_freq, rounded to `unit`.

    An fp32 angle is the product of an exact integer and an fp32 frequency: errors of the power and reciprocal behind
    the frequency (YaRN's blend included) and of the product, 4 v relative together and 10 v at most, so dcos =
    |phi sin| dphi/phi. At position 10^6 that is a quarter of a radian: two right tables may differ by it. A plan
    without it is held to an exact angle. The functions themselves are good to 1-2 ulp: 2 v |cos|, 4 v |cos| at most.
    """
    angle = 1.0 if fp32_angle else 0.0
    phase = positions.double().unsqueeze(-1) * inv_freq.double()
    cos, sin = phase.cos(), phase.sin()

    def one(y: Tensor, slope: Tensor) -> Spread:
        moved = phase.abs() * slope.abs()
        size = y.abs()
        out = Spread(y, V**2 * (4 * size**2 + angle * 16 * moved**2), V * (4 * size + angle * 10 * moved))
        return out.rounded(unit) if unit > V else out

    return one(cos, sin), one(sin, cos)


def rotate(x: Spread, cos: Spread, sin: Spread, *, inverse: bool = False) -> Spread:
    """Rotate the last 2 R channels of x [..., D], interleaved pairs (a, b) -> (a c - b s, b c + a s).

    cos and sin [..., R] broadcast against x. Each result has two products and a sum in fp32: v (|ac| + |bs| + |y|). The
    channels in front are copied.
    """
    width = 2 * cos.y.shape[-1]
    head = x.y.shape[-1] - width
    c, s = cos, (sin.times(-1.0) if inverse else sin)

    def pairs(t: Tensor) -> tuple[Tensor, Tensor]:
        tail = t[..., head:]
        return tail[..., 0::2], tail[..., 1::2]

    (a, b), (var_a, var_b), (lin_a, lin_b) = pairs(x.y), pairs(x.var), pairs(x.lin)

    def half(y: Tensor, near: tuple[Tensor, ...], far: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        (p, var_p, lin_p), (q, var_q, lin_q) = near, far  # y = p c -/+ q s
        pc, qs = (p * c.y).abs(), (q * s.y).abs()
        var = c.y**2 * var_p + s.y**2 * var_q + p**2 * c.var + q**2 * s.var + V**2 * (pc**2 + qs**2 + y**2)
        lin = c.y.abs() * lin_p + s.y.abs() * lin_q + p.abs() * c.lin + q.abs() * s.lin + V * (pc + qs + y.abs())
        return y, var, lin

    first = half(a * c.y - b * s.y, (a, var_a, lin_a), (b, var_b, lin_b))
    second = half(b * c.y + a * s.y, (b, var_b, lin_b), (a, var_a, lin_a))
    joined = [torch.stack(t, -1).flatten(-2) for t in zip(first, second, strict=True)]
    front = [t[..., :head] for t in (x.y, x.var, x.lin)]
    return Spread(*(torch.cat((f, j), -1) for f, j in zip(front, joined, strict=True)))


def apply(x: Tensor, cos: Tensor, sin: Tensor, unit: float, *, inverse: bool = False) -> Spread:
    """The rope stages: x [B, S, (H,) D] and given tables [B, S, R]; the plan's `table` point rounds them once more."""
    shape = (*cos.shape[:-1], *(1,) * (x.ndim - cos.ndim), cos.shape[-1])
    c, s = exact(cos.reshape(shape)), exact(sin.reshape(shape))
    if unit > V:
        c, s = c.rounded(unit), s.rounded(unit)
    return rotate(exact(x), c, s, inverse=inverse)
