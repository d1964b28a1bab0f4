"""Local rows: a production stage on the reference's inputs, judged by the oracle on exactly the same inputs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness import diagnose, fused
from harness.bench import Bench
from harness.dump import Row
from harness.execute import Outcome, Wires, narrows, run_production, run_trusted, widen
from harness.judge import entropy, rows, valid
from harness.judge import picks as picks_rule
from harness.plan import Step
from harness.records import Comparison, Routing, Skip, TensorComparison, Verdict
from harness.types import InvalidRun, Judged, Output, Stage, one_line

LOAD_UP_TO = 1024  # candidates whose load is worth a number each


@dataclass(frozen=True)
class _Judgement:
    """The oracle's word on one stage, by wire."""

    mine: Mapping[str, Judged]  # with the picks that production made
    theirs: Mapping[str, Judged]  # with the picks that the reference made
    picks_usable: bool = True


@torch.no_grad()
def row(bench: Bench, step: Step) -> Iterator[Comparison | Routing | Skip]:
    """The local row of a step, and the routing record of a stage that picks."""
    start = time.perf_counter()
    if reason := step.skips_local:
        yield bench.skip(step, "local", reason)
        return
    if step.fault:
        yield bench.verdict(step, "local", Verdict.FAIL, step.fault)
        return
    stage = bench.production[step.stage]
    if absent := [w for w in stage.inputs.values() if w not in bench.wires]:
        yield bench.skip(step, "local", f"its input {absent[0]} does not exist in this run")
        return
    inputs = {w: widen(bench.wires[w], bench.dtype_for_production(w)) for w in stage.inputs.values()}
    outcome = _run(bench, step, inputs)
    verdict = _unfit(bench, outcome)
    if verdict is None:
        try:
            reference = _reference(bench, step, inputs)
            judgement = _judge(bench, step, stage, inputs, outcome.outputs, reference)
        except Exception as error:  # the oracle broke: nothing can be said of this stage, but the run goes on
            text = str(error) if isinstance(error, InvalidRun) else f"the oracle raised {one_line(error)}"
            verdict = Verdict.INVALID, text
    if verdict is not None:
        record = bench.verdict(step, "local", *verdict, time.perf_counter() - start)
        if bench.keeper:
            bench.keeper.offer(Row(stage, record, inputs, outcome.outputs, bench.wires))
        yield record
        return

    tensors = []
    for output in stage.outputs:
        if output.wire in bench.wires:
            tensors.append(_tensor(bench, step, stage, output, outcome, reference, judgement))
    record = bench.comparison(step, "local", tensors, outcome.outputs, time.perf_counter() - start)
    if record.verdict == Verdict.FAIL:
        record = diagnose.explained(bench, step, record, inputs, outcome.outputs, judgement.mine)
    if bench.keeper:
        truth, own = ({w: j.value for w, j in side.items()} for side in (judgement.mine, judgement.theirs))
        bench.keeper.offer(Row(stage, record, inputs, outcome.outputs, reference, truth, own, judgement.mine))
    yield record
    for output, tensor in zip([o for o in stage.outputs if o.wire in bench.wires], tensors, strict=True):
        if output.role == "picks" and tensor.mismatches is not None:
            yield _routing(step, stage, output, outcome.outputs, judgement.mine[output.wire], reference)


def _run(bench: Bench, step: Step, inputs: Wires) -> Outcome:
    """Run on copies: production can neither change nor return the reference's own tensors."""
    copies = {wire: tensor.clone() for wire, tensor in inputs.items()}
    outcome = run_production(bench.ways[step.stage], copies, None)
    changed = [w for w in inputs if not torch.equal(torch.nan_to_num(copies[w]), torch.nan_to_num(inputs[w]))]
    if changed and not outcome.error:
        return Outcome(error=f"changed its input {changed[0]} in place")
    return outcome


def _unfit(bench: Bench, outcome: Outcome) -> tuple[Verdict, str] | None:
    """What ends a row before any tensor is looked at."""
    if outcome.error:
        return Verdict.FAIL, outcome.error
    if reason := valid.aliased(outcome.outputs, bench.wires.items()):
        return Verdict.INVALID, reason
    return None


def _reference(bench: Bench, step: Step, inputs: Wires) -> Mapping[str, Tensor]:
    """The reference's outputs on the same inputs: run again only if production's dtypes lost bits of them."""
    if not any(narrows(bench.wires[w], bench.dtype_for_production(w)) for w in inputs):
        return bench.wires
    wires = {**bench.wires, **{w: t.to(bench.wires[w].dtype) for w, t in inputs.items()}}
    for name in step.covers:
        wires.update(run_trusted(bench.reference[name], wires, None, direct=False))
    return wires


def _judge(
    bench: Bench,
    step: Step,
    stage: Stage,
    inputs: Wires,
    produced: Mapping[str, object],
    reference: Mapping[str, Tensor],
) -> _Judgement:
    """Ask the oracle, for each side with the picks that this side made."""
    covers = [bench.oracle_stages[name] for name in step.covers]
    seen = {w: bench.wires[w] for s in covers for w in s.inputs.values() if w in bench.wires} | inputs
    picks = [o for o in stage.outputs if o.role == "picks"]
    theirs = {o.name: reference[o.wire] for o in picks if o.wire in reference}
    mine = {o.name: t for o in picks if (t := _choice(produced.get(o.name), reference.get(o.wire))) is not None}
    if not picks or len(mine) < len(picks) or all(torch.equal(mine[n].long(), theirs[n].long()) for n in theirs):
        judged = fused.judge(bench.oracle, covers, seen, stage.plan, theirs or None)
        return _Judgement(judged, judged, picks_usable=len(mine) == len(picks))
    by_reference = fused.judge(bench.oracle, covers, seen, stage.plan, theirs)
    for o in picks:
        if not picks_rule.picks(mine[o.name], by_reference[o.wire]).usable:
            return _Judgement(by_reference, by_reference, picks_usable=False)
    return _Judgement(fused.judge(bench.oracle, covers, seen, stage.plan, mine), by_reference)


def _choice(produced: object, reference: Tensor | None) -> Tensor | None:
    """Production's picks if they have the form of picks at all."""
    fits = isinstance(produced, Tensor) and reference is not None and produced.shape == reference.shape
    return produced if fits and isinstance(produced, Tensor) and not produced.is_floating_point() else None


def _tensor(
    bench: Bench,
    step: Step,
    stage: Stage,
    output: Output,
    outcome: Outcome,
    reference: Mapping[str, Tensor],
    judgement: _Judgement,
) -> TensorComparison:
    pair = bench.pair(step, output, outcome.outputs.get(output.name), reference)
    if output.wire not in judgement.mine:
        return rows.unjudged(pair, Verdict.INVALID, "the oracle does not judge it")
    if not judgement.picks_usable and _follows(output, stage):
        return rows.unjudged(pair, Verdict.SKIPPED, "its picks are unusable")
    return rows.local(pair, judgement.mine[output.wire], judgement.theirs[output.wire].value)


def _follows(output: Output, stage: Stage) -> bool:
    """Whether an output lines up with picks of the same stage (routing weights)."""
    return output.role != "picks" and any(o.role == "picks" and o.dims == output.dims for o in stage.outputs)


def _routing(
    step: Step,
    stage: Stage,
    output: Output,
    produced: Mapping[str, object],
    judged: Judged,
    reference: Mapping[str, Tensor],
) -> Routing:
    chosen = produced[output.name]
    assert isinstance(chosen, Tensor)
    found = picks_rule.picks(chosen, judged)
    candidates = judged.value.shape[-1]
    load: Sequence[int] = ()
    if candidates <= LOAD_UP_TO and found.usable:
        load = torch.bincount(chosen[chosen >= 0].flatten(), minlength=candidates).tolist()
    weights = next((o for o in stage.outputs if _follows(o, stage) and o.role == "value"), None)
    mine = produced.get(weights.name) if weights else None
    theirs = reference.get(weights.wire) if weights else None
    return Routing(
        stage=step.stage,
        layer=step.layer,
        mode="local",
        rows=found.rows,
        flips=found.flips,
        outside=found.outside,
        examples=tuple((row, float(f"{gap:.6g}"), float(f"{room:.6g}")) for row, gap, room in found.examples),
        load=tuple(load),
        entropy=entropy.of_weights(mine) if isinstance(mine, Tensor) else None,
        entropy_reference=entropy.of_weights(theirs) if theirs is not None else None,
    )
