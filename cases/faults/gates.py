"""What common acceptance tests would have said: each gate as it is usually written, on the faulted stage's outputs.

Production is compared with the reference's outputs on the same inputs, every floating output by itself (statistics
left out); a gate passes if all of them do. Elements that are not finite on both sides (masked scores) are left out of
cosine, Pearson and DeepGEMM's diff, and ``allclose`` takes equal infinities as close. All arithmetic is float64.

allclose        |production - reference| <= 1e-2 + 1e-2 |reference|          value: the worst excess, as a ratio
cosine          <p, r> / (|p| |r|) >= 0.999
pearson         the same of the deviations from their means >= 0.99
diff            1 - 2 <p, r> / (<p, p> + <r, r>) < 1e-3                       (DeepGEMM's ``calc_diff``)
top1            share of positions with the reference's first token >= 0.95, from the logits of a run that goes on from
                the faulted stage
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TOP1 = 0.95
NAMES = ("allclose", "cosine", "pearson", "diff", "top1")


@dataclass(frozen=True)
class Gate:
    """One gate's word; ``value`` is None where it cannot be computed (a shape that differs, a crash)."""

    value: float | None
    passed: bool


def judge(produced: Mapping[str, object], reference: Mapping[str, Tensor], top1: float | None) -> dict[str, Gate]:
    """All gates. Both mappings are by output name."""
    found = [_tensors(produced.get(name), r) for name, r in reference.items() if r.is_floating_point()]
    gates = {}
    for name, worst, good in (
        ("allclose", max, lambda v: v <= 1),
        ("cosine", min, lambda v: v >= 0.999),
        ("pearson", min, lambda v: v >= 0.99),
        ("diff", max, lambda v: v < 1e-3),
    ):
        values = [f[name] for f in found if f is None or f[name] is not None] if None not in found else [None]
        finite = [v for v in values if v is not None and math.isfinite(v)]
        whole = len(finite) == len(values)
        gates[name] = Gate(_short(worst(finite)) if whole and finite else None, whole and all(map(good, finite)))
    gates["top1"] = Gate(_short(top1), top1 is not None and top1 >= TOP1)
    return gates


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _tensors(produced: object, reference: Tensor) -> dict[str, float | None] | None:
    """The figures of one output; None: it is missing or has another shape."""
    if not isinstance(produced, Tensor) or produced.shape != reference.shape:
        return None
    p, r = produced.double().flatten(), reference.double().flatten()
    if not r.numel():
        return {"allclose": 0.0, "cosine": 1.0, "pearson": 1.0, "diff": 0.0}
    excess = torch.where(p == r, 0.0, (p - r).abs() / (1e-2 + 1e-2 * r.abs()))
    finite = ~torch.isinf(r) | ~torch.isinf(p)
    p, r = p[finite], r[finite]
    return {
        "allclose": float(torch.nan_to_num(excess, nan=math.inf).max()),
        "cosine": _cosine(p, r),
        "pearson": _cosine(p - p.mean(), r - r.mean()),
        "diff": _diff(p, r),
    }


def _cosine(p: Tensor, r: Tensor) -> float | None:
    scale = float(p.norm() * r.norm())
    if scale == 0:
        return 1.0 if torch.equal(p, r) else 0.0
    return float(p @ r) / scale


def _diff(p: Tensor, r: Tensor) -> float:
    total = float(p @ p + r @ r)
    return 0.0 if total == 0 else 1 - 2 * float(p @ r) / total
