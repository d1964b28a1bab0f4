"""The weights audit: every parameter as production will use it, decoded, against the reference's own decode.

Both decodes are float64 without a rounding of their own, so they are equal or something is wrong: an N/K swap, a
dropped or folded scale, a scale layout, an expert order, a table that never loaded. Production may declare that it
keeps weights in a narrower dtype (plan point ``weight``); then the expectation is the reference's exact value rounded
once to that dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from harness.judge import figures
from harness.judge.ulp import DTYPES
from harness.judge.valid import first
from harness.records import Verdict, Weights
from harness.types import Stage

#: one factor explains a mismatch if what is left is below the unit round-off of bf16, the coarsest weight dtype
RESIDUAL = 2.0**-8


def audit(production: Stage, covered: Mapping[str, Stage]) -> Iterator[Weights]:
    """Audit one production stage against the oracle stages that it covers."""
    try:
        mine = dict(production.decoded())
    except Exception as error:  # a decoder that raises is a finding about production, like a stage that raises
        reason = f"decoding raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        yield _record(production, "*", Verdict.FAIL, reason, ())
        return
    theirs: dict[str, Tensor] = {}
    for name, stage in covered.items():
        prefix = f"{name}." if len(covered) > 1 else ""
        theirs.update({prefix + leaf: tensor for leaf, tensor in stage.decoded().items()})
    for name, tensor in theirs.items():
        yield _compare(production, name, mine.pop(name, None), tensor)
    for name, tensor in mine.items():
        reason = "production has this parameter, the reference does not"
        yield _record(production, name, Verdict.FAIL, reason, tuple(tensor.shape))


def _compare(stage: Stage, name: str, mine: Tensor | None, theirs: Tensor) -> Weights:
    shape = tuple(theirs.shape)
    if mine is None:
        return _record(stage, name, Verdict.FAIL, "production does not have this parameter", shape)
    if tuple(mine.shape) != shape:
        reason = f"shape {list(mine.shape)}, the reference has {list(shape)}"
        if mine.shape == theirs.mT.shape and theirs.dim() >= 2:
            reason += ": transposed"
        return _record(stage, name, Verdict.FAIL, reason, tuple(mine.shape))
    if mine.numel() and mine.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr():
        return _record(stage, name, Verdict.INVALID, "both sides share its storage", shape)
    if theirs.is_floating_point() and not torch.isfinite(theirs).all():
        return _record(stage, name, Verdict.INVALID, "the reference's decode is not finite", shape)
    expected = _rounded(theirs, stage.plan.get("weight"))
    mine, expected = (t.double() if theirs.is_floating_point() else t.long() for t in (mine, expected))
    differs = mine != expected  # NaN differs from everything
    count = int(differs.sum())
    if not count:
        return _record(stage, name, Verdict.PASS, None, shape)
    index = first(differs)
    where = figures.coordinate(index, mine, expected, None)
    factor = _factor(mine, expected) if theirs.is_floating_point() else None
    reason = f"{count} of {mine.numel()} elements differ, first {list(index)}: {where.production} for {where.reference}"
    if factor is not None:
        reason += f"; one factor explains it: production = {factor:.6g} x reference"
    return Weights(stage.name, stage.layer, name, Verdict.FAIL, reason, shape, count, where, factor)


def _record(stage: Stage, name: str, verdict: Verdict, reason: str | None, shape: tuple[int, ...]) -> Weights:
    return Weights(stage.name, stage.layer, name, verdict, reason, shape, 0, None, None)


def _rounded(exact: Tensor, dtype: str | None) -> Tensor:
    """The exact value as production declares to keep it; ``exact`` and unknown words mean no rounding."""
    target = DTYPES.get(dtype or "")
    return exact.to(target) if target is not None and target.is_floating_point and exact.is_floating_point() else exact


def _factor(mine: Tensor, theirs: Tensor) -> float | None:
    """The scalar s for which mine = s * theirs holds everywhere, up to one rounding, if there is one."""
    if not torch.isfinite(mine).all():
        return None
    s = figures.slope(mine, theirs)
    if s is None or s == 0:
        return None
    fits = (mine - s * theirs).abs() <= RESIDUAL * mine.abs()
    return s if bool(fits.all()) and abs(s - 1) > RESIDUAL else None
