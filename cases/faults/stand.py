"""One scenario made ready: both sides, the reference's wires and the oracle's words, computed once for all its faults.

A fault changes one production stage. In local mode every other stage gets the reference's inputs and does what it did
in the clean run, so its clean row stands; only the faulted stage's row is made again, by the engine's own code
(``harness.local``). The first fault of the run is then the first FAIL in execution order, as in ``harness diff``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from cases.faults.catalogue import Fault, Scenario, Stress
from harness import case as cases
from harness import engine, history, local, select, sides
from harness.bench import Bench
from harness.dump import Keeper, Row
from harness.execute import Way, Wires, compose, run_production, run_trusted, widen
from harness.phase import parse
from harness.plan import Request, Step, make_plan
from harness.records import Comparison, Verdict
from harness.types import InvalidRun, Judged, Oracle, Reference, Side, StepReference, Steps, UsageError


class Remembering:
    """An oracle that answers the same question once. Questions of a stand differ by stage, picks and inputs only."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._answers: dict[Any, Mapping[str, Judged]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._oracle, name)

    def judge(
        self,
        stage: str,
        inputs: Mapping[str, Tensor],
        *,
        plan: Mapping[str, str],
        given: Mapping[str, Tensor] | None = None,
    ) -> Mapping[str, Judged]:
        """The oracle's own answer, kept."""
        key = stage, tuple(sorted(plan.items())), _print(inputs), _print(given or {})
        if key not in self._answers:
            self._answers[key] = self._oracle.judge(stage, inputs, plan=plan, given=given)
        return self._answers[key]


def _print(tensors: Mapping[str, Tensor]) -> tuple[object, ...]:
    """What tells one set of tensors from another: names, shapes, and all of their bytes."""
    bits = {n: t.contiguous().view(torch.uint8) if t.dim() else t for n, t in tensors.items()}
    return tuple(
        (n, tuple(t.shape), hash(bytes(b.numpy().tobytes())))
        for (n, t), b in zip(tensors.items(), bits.values(), strict=True)
    )


class Catch(Keeper):
    """Keeps the last row that was made, tensors and all."""

    def __init__(self) -> None:
        self.row: Row | None = None

    def offer(self, row: Row) -> None:
        self.row = row


@dataclass
class Stand:
    """A scenario: its bench, its clean rows by stage."""

    bench: Bench
    clean: dict[str, Comparison] = field(default_factory=dict)
    _known: dict[object, Any] = field(default_factory=dict)

    def rows(self, layers: set[int | None]) -> Sequence[Step]:
        """The steps of some layers in execution order, each with its clean row made."""
        steps = [s for s in self.bench.plan.steps if s.layer in layers]
        for step in steps:
            if step.stage not in self.clean and (made := _row(self.bench, step)):
                self.clean[step.stage] = made
        return steps

    def first(self, faulted: Mapping[str, Comparison], layers: set[int | None]) -> Comparison | None:
        """The first local FAIL of a run in which some rows are those of a fault."""
        for step in self.rows(layers):
            row = faulted.get(step.stage) or self.clean.get(step.stage)
            if row is not None and row.verdict == Verdict.FAIL:
                return row
        return None

    def planted(self, fault: Fault) -> tuple[dict[str, Comparison], dict[str, Row]]:
        """Rows of the stages that a fault changes, with their tensors."""
        steps = [s for s in self.bench.plan.steps if select.matches(fault.stage, s.stage) and s.produced]
        if not steps:
            raise UsageError(f"fault {fault.id}: stage {fault.stage!r} does not exist in {fault.shown_in}")
        made, tensors = {}, {}
        for step in steps:
            way = Way(self.bench.production[step.stage], function=fault.function, target=fault.id)
            catch = Catch()
            bench = replace(
                self.bench,
                diagnose="all",
                ways={**self.bench.ways, step.stage: way},
                keeper=catch,
                wires=self.stressed(step, fault.stress),
            )
            if row := _row(bench, step):
                made[step.stage] = row
            if catch.row is not None:
                tensors[step.stage] = catch.row
        return made, tensors

    def stressed(self, step: Step, stress: Stress | None) -> Wires:
        """The reference's wires where a scenario feeds the stage other values, and its outputs on these."""
        if not stress:
            return self.bench.wires
        stage = self.bench.reference[step.stage]
        changed = {stage.inputs[n]: f(self.bench.wires[stage.inputs[n]]) for n, f in stress.items()}
        wires = {**self.bench.wires, **changed}
        return wires | run_trusted(stage, wires, None, direct=False)

    def unchanged(self, fault: Fault) -> Row:
        """The row of the unchanged stage on what the fault's scenario feeds it, with its tensors."""
        step = next(s for s in self.bench.plan.steps if select.matches(fault.stage, s.stage))
        catch = Catch()
        _row(replace(self.bench, wires=self.stressed(step, fault.stress), keeper=catch), step)
        assert catch.row is not None
        return catch.row

    def known(self, key: object, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, made once."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def top1(self, step: str, produced: Mapping[str, object], reference: Wires) -> float | None:
        """Share of positions whose first token is the reference's, if production goes on from what a stage produced."""
        stages = list(self.bench.production.values())
        stage = self.bench.production[step]
        wires = {w: widen(t, self.bench.dtype_for_production(w)) for w, t in reference.items()}
        wires |= {o.wire: t for o in stage.outputs if isinstance(t := produced.get(o.name), Tensor)}
        if not _follow(stages, stage, wires, lambda s: run_production(Way(s), wires, None).outputs):
            return None
        theirs = dict(reference)
        if any(reference[w] is not t for w, t in self.bench.wires.items() if w in reference):
            _follow(
                list(self.bench.reference.values()),
                self.bench.reference[step],
                theirs,
                lambda s: {o.name: t for o in s.outputs for t in [run_trusted(s, theirs, None, False)[o.wire]]},
            )
        mine, own = wires["lm_head.logits"], theirs["lm_head.logits"]
        return float((mine.argmax(-1) == own.argmax(-1)).double().mean())


def _follow(stages: Sequence[Any], start: Any, wires: Wires, run: Any) -> bool:
    """Run what depends on a stage, in order; False where a stage returns nothing."""
    dirty = {o.wire for o in start.outputs}
    for stage in stages[[s.name for s in stages].index(start.name) + 1 :]:
        if dirty & set(stage.inputs.values()):
            outputs = run(stage)
            if not outputs:
                return False
            wires.update({o.wire: outputs[o.name] for o in stage.outputs})
            dirty |= {o.wire for o in stage.outputs}
    return True


def _row(bench: Bench, step: Step) -> Comparison | None:
    return next((r for r in local.row(bench, step) if isinstance(r, Comparison)), None)


@cache
def _pair(reference: str, production: str, checkpoint: Any, dtype: Any) -> tuple[Reference, Side]:
    return sides.reference(reference, checkpoint, dtype), sides.production(production, checkpoint, dtype)


def prepare(scenario: Scenario) -> Stand:
    """Load, compose, certify: as the engine does it for a run of all layers in local mode."""
    case = cases.load(scenario.case).override(length=scenario.length or None, dtype=scenario.dtype)
    phase = scenario.phase or case.phase
    request, ids = Request(modes=("local",), phase=phase), cases.sequence(case)
    reference, production = _pair(case.reference, case.production, case.checkpoint, case.dtype)
    sizes = parse(phase).calls(len(ids)) if phase else []
    if sizes:
        reference = cast(StepReference, history.stepped(reference, "reference"))
        production = history.stepped(production, "production")
    plan = make_plan(reference.stages, production.stages, request)
    oracle = reference.oracle()
    inputs, start = cases.inputs(case, ids), None
    if sizes:
        start = history.begin(cast(Steps, reference), plan.compose, inputs["input_ids"], sizes, ())
        inputs = start.inputs
    wires = compose(reference.stages, plan.compose, inputs)
    checks = [*reference.certify(inputs, wires)]
    if start is not None:
        checks += history.certified(cast(StepReference, reference), start)
    for check in checks:
        if not check.ok:
            raise InvalidRun(f"the reference is not the unmodified model: {check.name}: {check.detail}")
    return Stand(
        Bench(
            plan,
            {s.name: s for s in reference.stages},
            cast(Oracle, Remembering(oracle)),
            {s.name: s for s in oracle.stages},
            {s.name: s for s in production.stages},
            engine.ways(plan, reference, production, {}),
            wires,
            f"harness diff {scenario.words}",
        )
    )
