"""One tensor, one verdict: the rules of a local or a free row put together, with the figures a reader needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.judge import cost as cost_rule
from harness.judge import exact as exact_rule
from harness.judge import figures, valid
from harness.judge import free as free_rule
from harness.judge import margin as margin_rule
from harness.judge import picks as picks_rule
from harness.judge.figures import number
from harness.judge.sample import carriers
from harness.judge.ulp import kappa, name_of, rms
from harness.records import TensorComparison, Verdict
from harness.types import Judged, Output

ORDER = (Verdict.INVALID, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.SKIPPED)


@dataclass(frozen=True)
class Pair:
    """One output as production and the reference returned it."""

    output: Output  # production's declaration
    produced: object
    reference: Tensor | None
    #: ids of the leading axes by the name of what they count (experts), for slices
    groups: Mapping[str, Tensor] = field(default_factory=dict)
    plan: Mapping[str, str] = field(default_factory=dict)
    #: a difference that the case declares: its reason and the relative RMS error that it may cost
    declared: tuple[str, float] | None = None


def local(pair: Pair, judged: Judged, own: Tensor) -> TensorComparison:
    """Rules 1 to 5 on one tensor. ``own`` is the oracle's value for the picks that the reference made."""
    base, production = _usable(pair, judged.value, own)
    if production is None:
        return base
    assert pair.reference is not None  # rule 1 looked
    if pair.output.role == "exact":
        return _exact(pair, base, production, judged.value)
    if pair.output.role == "picks":
        return _picks(pair, base, production, judged)
    return _value(pair, base, production, judged, own)


def free(pair: Pair, oracle: Tensor, *, replayed: bool = False) -> TensorComparison:
    """Rules 1, 2 and 6 on one tensor of a free run."""
    base, production = _usable(pair, oracle, oracle)
    if production is None:
        return base
    assert pair.reference is not None
    if pair.output.role == "exact":
        return _exact(pair, base, production, oracle)
    if pair.output.role == "picks":
        if replayed and not torch.equal(production.long(), pair.reference.long()):
            reason = "the picks returned are not the replayed ones, so nothing below is comparable"
            return replace(base, verdict=Verdict.FAIL, reason=reason)
        return replace(base, verdict=Verdict.SKIPPED, reason="the reference's picks are replayed")
    return _free_value(pair, base, production, oracle)


def unjudged(pair: Pair, verdict: Verdict, reason: str | None = None) -> TensorComparison:
    """A tensor's identity with a verdict that needs no figures."""
    reference, out = pair.reference, pair.output
    return TensorComparison(
        tensor=out.name,
        wire=out.wire,
        dims=tuple(out.dims),
        shape=tuple(reference.shape) if reference is not None else (),
        role=out.role,
        production_dtype=name_of(pair.produced.dtype) if isinstance(pair.produced, Tensor) else "none",
        reference_dtype=name_of(reference.dtype) if reference is not None else "none",
        verdict=verdict,
        reason=reason,
    )


def _usable(pair: Pair, oracle: Tensor, own: Tensor) -> tuple[TensorComparison, Tensor | None]:
    """Rule 1; the tensor comes back only if there is something to judge in it."""
    reference, out = pair.reference, pair.output
    base = unjudged(pair, Verdict.PASS)
    picks = out.role == "picks"  # the oracle's value is the score of every candidate there: another shape
    truth = reference.double() if picks and reference is not None else own
    if reason := valid.invalid_reference(reference, truth, out.role):
        return replace(base, verdict=Verdict.INVALID, reason=reason), None
    assert reference is not None
    if reason := valid.unusable(pair.produced, out, tuple(reference.shape), None if picks else oracle):
        return replace(base, verdict=Verdict.FAIL, reason=reason), None
    if not reference.numel():
        return replace(base, verdict=Verdict.SKIPPED, reason=valid.EMPTY), None
    if not picks and not valid.all_finite(oracle) and not torch.isfinite(oracle).any():
        return replace(base, verdict=Verdict.SKIPPED, reason=f"{valid.EMPTY}: no element is finite"), None
    assert isinstance(pair.produced, Tensor)
    return base, pair.produced


def _exact(pair: Pair, base: TensorComparison, production: Tensor, oracle: Tensor) -> TensorComparison:
    reference = pair.reference
    assert reference is not None
    base = replace(base, formula="production = oracle = reference, element by element")
    if (theirs := exact_rule.exact(reference, oracle)).first is not None:
        reason = f"the reference differs from the oracle in {theirs.mismatches} elements, first {list(theirs.first)}"
        return replace(base, verdict=Verdict.INVALID, reason=reason)
    mine = exact_rule.exact(production, oracle)
    if mine.first is None:
        return replace(base, mismatches=0)
    where = figures.coordinate(mine.first, production, reference, oracle)
    reason = (
        f"{mine.mismatches} of {production.numel()} elements differ, first {list(mine.first)}: "
        f"production {where.production}, reference {where.reference}"
    )
    return replace(base, verdict=Verdict.FAIL, reason=reason, mismatches=mine.mismatches, worst=(where,))


def _picks(pair: Pair, base: TensorComparison, production: Tensor, judged: Judged) -> TensorComparison:
    found = picks_rule.picks(production, judged)
    base = replace(
        base,
        margin=number(found.worst) if found.worst is not None else 0.0,
        mismatches=found.outside,
        flips=found.flips,
        formula=picks_rule.FORMULA,
        threshold={"lambda": margin_rule.LAMBDA, "plan": _plan(pair)},
    )
    if not found.outside:
        reason = f"{found.flips} picks differ inside their bound" if found.flips else None
        return replace(base, reason=reason)
    assert found.first is not None
    index = (*found.first, 0)
    reason = f"{found.outside} of {found.rows} rows hold {found.reason}, first row {list(found.first)}"
    where = figures.coordinate(index, production, pair.reference, None)
    return replace(base, verdict=Verdict.FAIL, reason=reason, worst=(where,))


def _value(pair: Pair, base: TensorComparison, production: Tensor, judged: Judged, own: Tensor) -> TensorComparison:
    """Rules 3 and 4 (a stat: rule 4, the margin below 32 elements)."""
    assert pair.reference is not None
    dtype = pair.output.dtype
    m = margin_rule.margin(production, judged, dtype)
    if not math.isfinite(m.worst):
        return replace(base, verdict=Verdict.INVALID, reason=f"the oracle's spread is not a number at {list(m.at)}")
    y, only = _finite(judged.value)
    theirs = _finite(pair.reference.double() - own)[0]
    c = cost_rule.cost(only(m.error), only(theirs), only(y), dtype, carriers(theirs))
    base = _described(pair, base, production, y, m.error, m.signed.abs(), m.bound)
    size = rms(only(y))
    base = replace(
        base,
        margin=number(m.worst),
        cost=number(c.ratio),
        rms_oracle=number(size),
        rms_error=number(c.error),
        rms_reference_error=number(c.reference_error),
        errors=figures.histogram(m.signed),
        formula=f"{margin_rule.FORMULA}; {cost_rule.FORMULA}",
        threshold={
            "lambda": margin_rule.LAMBDA,
            "plan": _plan(pair),
            "output": dtype,
            "bound at worst": number(float(m.bound[m.at])),
            "RSS at worst": number(float(judged.rss[m.at])),
            "sum at worst": number(float(judged.total[m.at])),
            "blind share": m.blind,
            "F": number(c.factor),
            "n": number(c.tokens),
            "kappa": kappa(dtype),
            "floor": number(c.floor),
            "allowed RMS": number(c.allowed),
        },
    )
    decides = pair.output.role != "stat" or c.ratio is None
    reasons = []
    if decides and not m.worst <= 1:
        at = base.worst[0]
        reasons.append(
            f"{m.worst:.3g} x the margin at {list(m.at)}: production {at.production:.6g}, oracle {at.oracle:.6g}"
            + _zeros(production, y)
        )
    if c.ratio is not None and not c.ratio <= 1:
        reasons.append(f"RMS error {c.error:.3g}, {c.ratio:.3g} x the allowed {c.allowed:.3g}")
    hollow = m.vacuous and (c.ratio is None or size <= c.allowed) and pair.output.role != "stat"
    constant = valid.constant(own) and valid.constant(pair.reference)
    return _settle(pair, base, reasons, c.error, size, constant, hollow)


def _free_value(pair: Pair, base: TensorComparison, production: Tensor, oracle: Tensor) -> TensorComparison:
    """Rule 6."""
    assert pair.reference is not None
    dtype = pair.output.dtype
    y, only = _finite(oracle)
    error, theirs = (_finite(t.double() - oracle)[0] for t in (production, pair.reference))
    c = free_rule.free(only(error), only(theirs), only(y), dtype, carriers(theirs))
    base = _described(pair, base, production, y, error, None, None)
    size = rms(only(y))
    base = replace(
        base,
        cost=number(c.ratio),
        rms_oracle=number(size),
        rms_error=number(c.error),
        rms_reference_error=number(c.reference_error),
        errors=figures.histogram(error / c.error) if c.error > 0 else None,
        formula=free_rule.FORMULA,
        threshold={
            "F": number(c.factor),
            "n": number(c.tokens),
            "output": dtype,
            "kappa": kappa(dtype),
            "floor": number(c.floor),
            "allowed RMS": number(c.allowed),
        },
    )
    if c.ratio is None:
        reason = f"{only(error).numel()} elements: below {cost_rule.FEWEST} an RMS says nothing"
        return replace(base, verdict=Verdict.SKIPPED, reason=reason)
    reasons = []
    if not c.ratio <= 1:
        reasons.append(f"RMS error {c.error:.3g}, {c.ratio:.3g} x the allowed {c.allowed:.3g}")
    hollow = size <= c.allowed and pair.output.role != "stat"
    if hollow and not reasons and c.factor > free_rule.FACTOR:
        reason = "too few tokens carry the reference's error to compare two RMS values"
        return replace(base, verdict=Verdict.SKIPPED, reason=reason)
    constant = valid.constant(oracle) and valid.constant(pair.reference)
    return _settle(pair, base, reasons, c.error, size, constant, hollow)


def _finite(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A tensor with zeros in place of infinities, and a function that keeps only its finite places of others."""
    if valid.all_finite(x):
        return x, lambda other: other
    mask = torch.isfinite(x)
    return torch.where(mask, x, 0.0), lambda other: other[mask]


def _settle(
    pair: Pair, base: TensorComparison, reasons: Sequence[str], error: float, size: float, constant: bool, hollow: bool
) -> TensorComparison:
    """The verdict from what the rules found."""
    if reasons and pair.declared and error <= pair.declared[1] * size:
        reason = f"declared difference ({pair.declared[0]}; at most {pair.declared[1]:g} of the RMS): {reasons[0]}"
        return replace(base, reason=reason, threshold={**base.threshold, "declared floor": pair.declared[1]})
    if reasons:
        return replace(base, verdict=Verdict.FAIL, reason="; ".join(reasons))
    if constant:
        return replace(base, verdict=Verdict.SKIPPED, reason=valid.CONSTANT)
    if hollow:
        reason = "the bound is as wide as the signal: zeros would pass, the reference is ill-conditioned here"
        return replace(base, verdict=Verdict.INCONCLUSIVE, reason=reason)
    return base


def _described(
    pair: Pair,
    base: TensorComparison,
    production: Tensor,
    oracle: Tensor,
    error: Tensor,
    size: Tensor | None,
    bound: Tensor | None,
) -> TensorComparison:
    """Worst elements, slices, tokens and density, from tensors without infinities."""
    assert pair.reference is not None
    e2, y2 = error.square(), oracle.square()
    bad = size is not None and bool((size > 1).any())
    worst = []
    for index in figures.largest(error.abs() if size is None else size, 8 if bad else 3):
        b, ratio = (None, None) if size is None or bound is None else (float(bound[index]), float(size[index]))
        worst.append(figures.coordinate(index, production, pair.reference, oracle, b, ratio))
    dims = base.dims
    groups = {name: ids for name, ids in pair.groups.items() if ids.shape == production.shape[: ids.dim()]}
    tokens, width = figures.per_token(dims, size, e2, y2)
    return replace(
        base,
        worst=tuple(worst),
        slope=figures.slope(_finite(production.double())[0], oracle),
        slices=figures.slices(dims, size, e2, y2, groups),
        tokens=tokens,
        token_width=width,
        density=figures.density(production, pair.reference),
    )


def _zeros(production: Tensor, oracle: Tensor) -> str:
    """A hint in words: part of the tensor may never have been written."""
    share = float(((production == 0) & (oracle != 0)).double().mean())
    return f"; {100 * share:.3g} % of the elements are exactly zero where the oracle is not" if share > 0.01 else ""


def _plan(pair: Pair) -> str:
    return " ".join(f"{point}:{dtype}" for point, dtype in pair.plan.items()) or "out only"


def combine(tensors: Sequence[TensorComparison]) -> tuple[Verdict, TensorComparison | None]:
    """The verdict of a row and the tensor that decides it: the worst of the worst kind."""
    if not tensors:
        return Verdict.SKIPPED, None
    verdict = min((t.verdict for t in tensors), key=ORDER.index)
    alike = [t for t in tensors if t.verdict == verdict]

    def size(t: TensorComparison) -> float:
        figure = [f for f in (t.margin, t.cost) if f is not None]
        return max(figure, default=float("inf") if t.verdict == Verdict.FAIL else -1.0)

    return verdict, max(alike, key=size)
