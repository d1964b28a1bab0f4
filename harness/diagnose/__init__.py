"""Why a stage fails: known mistakes made on purpose in the oracle, then forms that the tensors show, then where.

*confirmed*: one known mistake brings production back inside its margin, and no other does that is not the same here.
*suspected*: anything else that explains half of the error or more, ranked by how much. *unexplained*: nothing does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.diagnose import algebra
from harness.diagnose.carriers import carriers
from harness.diagnose.score import Failing, Score, same, score
from harness.records import Cause, Comparison, Verdict
from harness.types import Judged, Suspect, SuspectingOracle, one_line

if TYPE_CHECKING:
    from harness.bench import Bench
    from harness.plan import Step

MOST = 5
ENOUGH = 0.5


def explained(
    bench: Bench,
    step: Step,
    record: Comparison,
    inputs: Mapping[str, Tensor],
    produced: Mapping[str, object],
    judged: Mapping[str, Judged],
) -> Comparison:
    """A failing local row with its causes, if the run wants them. ``inputs`` and ``judged`` are by wire."""
    bench.diagnosed += 1
    if bench.diagnose == "none" or (bench.diagnose == "first" and bench.diagnosed > 1):
        return record
    try:
        found = _causes(bench, step, record, inputs, produced, judged)
    except Exception as error:  # a diagnosis that breaks must not take the verdict with it
        found = (Cause("unexplained", "unexplained", None, f"the diagnosis raised {one_line(error)}"),)
    return dataclasses.replace(record, causes=found)


def _causes(
    bench: Bench,
    step: Step,
    record: Comparison,
    inputs: Mapping[str, Tensor],
    produced: Mapping[str, object],
    judged: Mapping[str, Judged],
) -> tuple[Cause, ...]:
    tensors = {n: t for n, t in produced.items() if isinstance(t, Tensor)}
    failing = [
        Failing(t, tensors[t.tensor], judged[t.wire])
        for t in record.tensors
        if t.verdict == Verdict.FAIL and t.role != "picks" and t.wire in judged and t.tensor in tensors
        if tensors[t.tensor].shape == judged[t.wire].value.shape and bool(torch.isfinite(tensors[t.tensor]).all())
    ]
    if not failing:
        return (Cause("unexplained", "unexplained", None, "no failing tensor can be measured"),)
    by_name = _best(_catalogue(bench, step, inputs, tensors), failing)
    by_form = _best(_forms(bench, step, record, inputs, failing), failing[:1])
    return rank(by_name, by_form, failing)


def rank(by_name: Sequence[Score], by_form: Sequence[Score], failing: Sequence[Failing]) -> tuple[Cause, ...]:
    """At most five causes from the best score of every id: known mistakes before forms that explain no more."""
    inside = [s for s in by_name if s.inside and s.explains >= ENOUGH]
    sure = bool(inside) and all(same(inside[0].suspect, s.suspect, failing) for s in inside[1:])
    found = [
        Cause(s.suspect.id, "confirmed" if sure and s is inside[0] else "suspected", _share(s), s.suspect.text)
        for s in (*inside, *sorted((*by_name, *by_form), key=lambda s: -s.explains))
        if s.explains >= ENOUGH
    ]
    unique = list({cause.id: cause for cause in reversed(found)}.values())[::-1]
    if unique:
        unique = sorted(unique, key=lambda c: found.index(next(f for f in found if f.id == c.id)))
        return tuple(next(f for f in found if f.id == c.id) for c in unique)[:MOST]
    first = max(failing, key=lambda f: f.record.margin or 0.0)
    error = torch.nan_to_num(first.produced.double() - first.judged.value, 0.0, 0.0, 0.0)
    where = f"{first.record.tensor}: {carriers(first.record.dims, error)}"
    return (Cause("unexplained", "unexplained", None, where),)


def _share(s: Score) -> float:
    return float(f"{s.explains:.6g}")


def _best(suspects: Iterator[Suspect], failing: Sequence[Failing]) -> list[Score]:
    """The best variant of every id, those inside first."""
    best: dict[str, Score] = {}
    for suspect in suspects:
        found = score(suspect, failing)
        now = best.get(suspect.id)
        if now is None or (found.inside, found.explains) > (now.inside, now.explains):
            best[suspect.id] = found
    return sorted(best.values(), key=lambda s: -s.explains)


def _catalogue(
    bench: Bench, step: Step, inputs: Mapping[str, Tensor], produced: Mapping[str, Tensor]
) -> Iterator[Suspect]:
    """Known mistakes of the stage. A fused stage has none: its parts are not compared one by one."""
    if len(step.covers) != 1 or not isinstance(bench.oracle, SuspectingOracle):
        return
    stage, truth = bench.production[step.stage], bench.oracle_stages[step.covers[0]]
    seen = {**bench.wires, **inputs}
    arguments = {name: seen[wire] for name, wire in truth.inputs.items()}
    picks = {o.name: produced[o.name] for o in stage.outputs if o.role == "picks" and o.name in produced}
    yield from bench.oracle.suspects(truth.name, arguments, produced, plan=stage.plan, given=picks or None)


def _forms(
    bench: Bench, step: Step, record: Comparison, inputs: Mapping[str, Tensor], failing: Sequence[Failing]
) -> Iterator[Suspect]:
    """Forms of the first failing output of floats."""
    first = failing[0]
    finite = bool(torch.isfinite(first.judged.value).all())
    if first.record.role == "exact" or not finite:
        return
    truth = bench.oracle_stages.get(step.covers[0])
    constants = algebra.known(truth.config, truth.params) if truth else {}
    wide = {wire: t.double() if t.is_floating_point() else t for wire, t in inputs.items()}
    produced = first.produced.double()
    yield from algebra.forms(first.record.tensor, first.record.dims, produced, first.judged, wide, constants)
