"""Rounding plans: the points of each stage and the dtypes they may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.types import UsageError

from .algebra import UNIT

_LINEAR = ("weight", "acc", "out")
_NORM = ("out",)
_ROPE = ("table", "out")
_HC = ("collapsed", "out")
_MIX = ("coef", "terms", "out")
_POOL = ("weight", "acc", "proj", "probs", "pooled", "norm", "angle", "table", "out")
_MLP = ("weight", "acc", "gate", "up", "silu", "act")

#: Stage kind -> its rounding points (docs/stages.md).
POINTS: dict[str, tuple[str, ...]] = {
    "embed": ("out",),
    "rope_cache": ("angle", "out"),
    "hc_head": _HC,
    "attn_hc": _HC,
    "ffn_hc": _HC,
    "attn_mix": _MIX,
    "ffn_mix": _MIX,
    "final_norm": _NORM,
    "attn_norm": _NORM,
    "ffn_norm": _NORM,
    "q_a_norm": _NORM,
    "kv_norm": _NORM,
    "q_b_norm": ("rsqrt", "out"),
    "q_rope": _ROPE,
    "kv_rope": _ROPE,
    "attn_unrope": _ROPE,
    "lm_head": _LINEAR,
    "q_a": _LINEAR,
    "q_b": _LINEAR,
    "kv": _LINEAR,
    "o_a": _LINEAR,
    "o_b": _LINEAR,
    "compressor": _POOL,
    "indexer": (*_POOL, "q", "q_rope", "head_weight", "scores"),
    "attn_core": ("logits", "probs", "acc", "out"),
    "router": ("weight", "acc", "logits", "scores", "weights"),
    "experts": (*_MLP, "down", "weighted", "sum", "out"),
    "shared_expert": (*_MLP, "out"),
    "moe_sum": ("out",),
}


#: Points whose precision is part of the margin's derivation and not negotiable: a bf16 accumulator's bound would exceed
#: the signal (zeros would pass), and a bf16 angle makes the table meaningless beyond position 256.
FP32_ONLY = ("acc", "angle")


@dataclass(frozen=True)
class Plan:
    """A validated plan of one stage."""

    kind: str
    dtypes: Mapping[str, str]

    def dtype(self, point: str) -> str:
        return self.dtypes.get(point, "exact")

    @property
    def fp32_angle(self) -> bool:
        """Are rope phases fp32 products? The one point that absence does not leave to fp32: they are exact then."""
        return self.dtypes.get("angle", "exact") != "exact"

    def unit(self, point: str) -> float:
        """Unit roundoff at a point; an absent point is rounded no further than fp32 arithmetic does."""
        return UNIT[self.dtype(point)]


def parse(name: str, kind: str, plan: Mapping[str, str]) -> Plan:
    """Check a plan's points and dtypes. A point may carry the stage's own full name in front, as fused plans do."""
    if kind not in POINTS:
        raise UsageError(
            f"{name}: no rounding bounds for stage kind {kind!r}; known kinds: {', '.join(sorted(POINTS))}"
        )
    valid = POINTS[kind]
    dtypes: dict[str, str] = {}
    for key, dtype in plan.items():
        point = key.removeprefix(f"{name}.")
        if point not in valid:
            raise UsageError(f"{name}: unknown rounding point {key!r}; valid points: {', '.join(valid)}")
        if dtype not in UNIT:
            raise UsageError(f"{name}: point {key!r} has dtype {dtype!r}; valid dtypes: {', '.join(UNIT)}")
        if point in FP32_ONLY and UNIT[dtype] > UNIT["fp32"]:
            raise UsageError(f"{name}: point {key!r} cannot be {dtype}: no margin can be derived below fp32")
        dtypes[point] = dtype
    return Plan(kind, dtypes)
