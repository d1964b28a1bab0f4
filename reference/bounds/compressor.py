"""Compressed keys: projections, pooling, norm and rotation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .algebra import Spread, exact
from .linear import linear
from .norm import rms_norm
from .plan import Plan
from .pooling import pool, windows
from .rope import rotate, table


def compress(
    x: Tensor, params: Mapping[str, Tensor], inv_freq: Tensor, plan: Plan, *, rate: int, overlap: bool, eps: float
) -> tuple[Spread, Spread]:
    """pooled and keys of [B, S, d] inputs; T = S // rate windows, entry i at position i * rate.

    proj rounds both projections, probs the pooling weights (and products), pooled the sum, norm the normed keys, table
    the cos and sin. The rounding of an output itself is the margin's h and is left out of that output's spread, but
    `pooled` and `norm` reach the keys. The channels that are not rotated are rounded by `norm` and by `out`, which is
    one rounding where both have one format.
    """
    kv = linear(exact(x), params["kv_proj.weight"], plan.dtype("weight"))
    gate = linear(exact(x), params["gate_proj.weight"], plan.dtype("weight"))
    kv, gate = kv.fixed(plan.dtype("proj")), gate.fixed(plan.dtype("proj"))
    pooled = pool(
        kv.map(lambda t: windows(t, rate, overlap, 0.0)),
        Spread(
            windows(gate.y, rate, overlap, float("-inf")),
            *(windows(t, rate, overlap, 0.0) for t in (gate.var, gate.lin, gate.bias)),
        ),
        _bias(params["position_bias"], overlap),
        plan.unit("probs"),
    )
    normed = rms_norm(pooled.fixed(plan.dtype("pooled")), params["kv_norm.weight"], eps)
    cos, sin = table(
        torch.arange(pooled.y.shape[1], device=x.device) * rate,
        inv_freq,
        plan.unit("table"),
        fp32_angle=plan.fp32_angle,
    )
    return pooled, rotate(tail_rounded(normed, 2 * inv_freq.numel(), plan.dtype("norm"), plan.dtype("out")), cos, sin)


def _bias(bias: Tensor, overlap: bool) -> Tensor:
    """Slot order of the windows: the previous window's series first."""
    return torch.cat(bias.chunk(2, dim=-1), 0) if overlap else bias


def tail_rounded(x: Spread, width: int, dtype: str, next_dtype: str) -> Spread:
    """Round before a rotation of the last `width` channels, whose result is then rounded to `next_dtype`.

    The other channels are copied by the rotation, so they see both roundings one after the other: of equal formats the
    second changes nothing, and that one is accounted for by whoever rounds the result.
    """
    rounded = x.fixed(dtype)
    if dtype != next_dtype:
        return rounded
    cut = x.y.shape[-1] - width
    parts = ((getattr(x, name)[..., :cut], getattr(rounded, name)[..., cut:]) for name in ("y", "var", "lin", "bias"))
    return Spread(*(torch.cat(pair, -1) for pair in parts))
