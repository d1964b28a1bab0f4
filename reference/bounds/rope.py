"""Rotary embedding: the cos/sin tables and the interleaved rotation of the trailing channels."""

from __future__ import annotations

import torch
from torch import Tensor

from .algebra import Spread, V, exact
from .linear import stack


def table(positions: Tensor, inv_freq: Tensor, unit: float, *, fp32_angle: bool) -> tuple[Spread, Spread]:
    """cos and sin of position * inv_freq, rounded to `unit`.

    An fp32 angle is the product of an exact integer and an fp32 frequency: errors of the power and reciprocal behind
    the frequency (YaRN's blend included) and of the product, 4 v relative together and 10 v at most, so dcos =
    |phi sin| dphi/phi + |cos| dphi^2 / 2. At position 10^6 that is a quarter of a radian: two right tables may differ
    by it. A plan without it is held to an exact angle. The functions themselves are good to 1-2 ulp: 2 v |cos|, 4 v
    |cos| at most.
    """
    phase = positions.double().unsqueeze(-1) * inv_freq.double()
    cos, sin = phase.cos(), phase.sin()

    stray = V * phase.abs() if fp32_angle else torch.zeros_like(phase)

    def one(y: Tensor, slope: Tensor) -> Spread:
        moved, size = stray * slope.abs(), V * y.abs()
        out = Spread(y, 4 * size**2 + 16 * moved**2, 4 * size + 10 * moved)
        return out.plus((10 * stray) ** 2 / 2 * y.abs()).rounded(unit)

    return one(cos, sin), one(sin, cos)


def rotate(x: Spread, cos: Spread, sin: Spread, *, inverse: bool = False) -> Spread:
    """Rotate the last 2 R channels of x [..., D], interleaved pairs (a, b) -> (a c - b s, b c + a s).

    cos and sin [..., R] broadcast against x. Each result has two products and a sum in fp32: v (|ac| + |bs| + |y|). The
    channels in front are copied.
    """
    head = x.y.shape[-1] - 2 * cos.y.shape[-1]
    a, b = x.map(lambda t: t[..., head::2]), x.map(lambda t: t[..., head + 1 :: 2])
    front, turn = x.map(lambda t: t[..., :head]), sin.times(-1.0 if inverse else 1.0)
    turned = stack([_half(a, cos, b, turn.times(-1.0)), _half(b, cos, a, turn)], -1).map(lambda t: t.flatten(-2))
    return Spread(*(torch.cat((getattr(front, p), getattr(turned, p)), -1) for p in ("y", "var", "lin", "bias")))


def _half(p: Spread, c: Spread, q: Spread, s: Spread) -> Spread:
    """p c + q s."""
    pc, qs = p.y * c.y, q.y * s.y
    out = Spread(
        pc + qs,
        c.y**2 * p.var + s.y**2 * q.var + p.y**2 * c.var + q.y**2 * s.var,
        c.y.abs() * p.lin + s.y.abs() * q.lin + p.y.abs() * c.lin + q.y.abs() * s.lin,
        c.y * p.bias + s.y * q.bias,
    )
    return out.plus(V * pc, V * qs, V * out.y)


def apply(x: Tensor, cos: Tensor, sin: Tensor, unit: float, *, inverse: bool = False) -> Spread:
    """The rope stages: x [B, S, (H,) D] and given tables [B, S, R]; the plan's `table` point rounds them once more."""
    shape = (*cos.shape[:-1], *(1,) * (x.ndim - cos.ndim), cos.shape[-1])
    c, s = exact(cos.reshape(shape)).rounded(unit), exact(sin.reshape(shape)).rounded(unit)
    return rotate(exact(x), c, s, inverse=inverse)
