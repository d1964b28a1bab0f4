"""Compressed keys: projections, pooling, norm and rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .algebra import Spread, exact
from .linear import linear
from .norm import rms_norm
from .plan import Plan
from .pooling import pool, windows
from .rope import rotate, table


@dataclass(frozen=True)
class Kept:
    """What a compressor kept from earlier calls, exact as any input (docs/stages.md, caches)."""

    entries: Tensor  # [B, T, D]
    open_kv: Tensor  # [B, O, C]
    open_gate: Tensor
    overlap_kv: Tensor | None = None  # [B, m or 0, D], with overlap
    overlap_gate: Tensor | None = None


def project(x: Tensor, params: Mapping[str, Tensor], plan: Plan) -> tuple[Spread, Spread]:
    """Both projections of the tokens x, without a rounding of their own."""
    kv = linear(exact(x), params["kv_proj.weight"], plan.dtype("weight"))
    return kv, linear(exact(x), params["gate_proj.weight"], plan.dtype("weight"))


def join(kept: Tensor, new: Spread) -> Spread:
    """Kept rows in front of new ones, along the tokens."""
    old = exact(kept)
    return Spread(*(torch.cat((getattr(old, n), getattr(new, n)), 1) for n in ("y", "var", "lin", "bias")))


def compress(
    x: Tensor,
    params: Mapping[str, Tensor],
    inv_freq: Tensor,
    plan: Plan,
    *,
    rate: int,
    overlap: bool,
    eps: float,
    kept: Kept | None = None,
) -> tuple[Spread, Spread]:
    """pooled and keys of [B, S, d] inputs; T = S // rate windows, entry i at position i * rate.

    With ``kept`` the call continues: its open window comes before x, and the entries that come out are the new ones.

    proj rounds both projections, probs the pooling weights (and products), pooled the sum, norm the normed keys, table
    the cos and sin. The rounding of an output itself is the margin's h and is left out of that output's spread, but
    `pooled` and `norm` reach the keys. The channels that are not rotated are rounded by `norm` and by `out`, which is
    one rounding where both have one format.
    """
    kv, gate = (side.fixed(plan.dtype("proj")) for side in project(x, params, plan))
    first, bias = 0, _bias(params["position_bias"], overlap)
    if kept is not None:
        first, kv, gate = kept.entries.shape[1], join(kept.open_kv, kv), join(kept.open_gate, gate)
    slots = kv.map(lambda t: windows(t, rate, overlap, 0.0))
    logits = Spread(
        windows(gate.y, rate, overlap, float("-inf")),
        *(windows(t, rate, overlap, 0.0) for t in (gate.var, gate.lin, gate.bias)),
    )
    if kept is not None and kept.overlap_kv is not None and kept.overlap_gate is not None:
        slots = Spread(_before(slots.y, kept.overlap_kv), slots.var, slots.lin, slots.bias)
        # The kept gate has the bias in it, which pooling adds to every slot.
        plain = kept.overlap_gate - bias[: kept.overlap_gate.shape[1]]
        logits = Spread(_before(logits.y, plain), logits.var, logits.lin, logits.bias)
    pooled = pool(slots, logits, bias, plan.unit("probs"))
    normed = rms_norm(pooled.fixed(plan.dtype("pooled")), params["kv_norm.weight"], eps)
    cos, sin = table(
        (first + torch.arange(pooled.y.shape[1], device=x.device)) * rate,
        inv_freq,
        plan.unit("table"),
        fp32_angle=plan.fp32_angle,
    )
    return pooled, rotate(tail_rounded(normed, 2 * inv_freq.numel(), plan.dtype("norm"), plan.dtype("out")), cos, sin)


def _before(slots: Tensor, kept: Tensor) -> Tensor:
    """The first new window's slots for the window before it, where there was one: [B, T, 2 m, D]."""
    if not slots.shape[1] or not kept.shape[1]:
        return slots
    head = torch.cat((kept, slots[:, 0, kept.shape[1] :]), 1)
    return torch.cat((head.unsqueeze(1), slots[:, 1:]), 1)


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
