"""From a case to forwards: both sides, what can be swapped, the reference's wires, the oracle's logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from harness import case as cases
from harness import engine, sides
from harness.agree import Graph
from harness.bisect.forward import Forward, Unit, truth
from harness.case import Case
from harness.execute import Way, Wires, compose
from harness.plan import Plan, Request, Step, make_plan
from harness.records import Certification, Config
from harness.types import InvalidRun, Output, Reference, Side, Stage, UsageError


@dataclass
class Bisection:
    """Sides and candidates of one bisection; ``forward`` is there once ``certified`` has run to its end."""

    case: Case
    request: Request
    reference: Reference
    production: Side
    units: list[Unit]
    candidates: list[Unit]
    logits: Output
    config: Config
    inputs: Wires
    wires: Wires = field(default_factory=dict)

    @property
    def layers(self) -> list[tuple[str, int | None]]:
        """Candidates with their layers, in execution order."""
        return [(u.name, u.layer) for u in self.candidates]

    @property
    def replaced(self) -> list[str]:
        """Candidates that ``--replace`` changes."""
        return [u.name for u in self.candidates if u.way is not None and u.way.function is not None]

    @torch.no_grad()
    def certified(self) -> Iterator[Certification]:
        """Run the reference and hold it to the unmodified model; InvalidRun if it is another."""
        names = [s.name for s in self.reference.stages]
        last = self.logits.wire.rpartition(".")[0]
        self.wires = compose(self.reference.stages, names[: names.index(last) + 1], self.inputs)
        failed = None
        for check in self.reference.certify(self.inputs, self.wires):
            yield Certification(check.name, check.ok, check.detail)
            failed = failed or (None if check.ok else check)
        if failed:
            raise InvalidRun(f"the reference is not the unmodified model: {failed.name}: {failed.detail}")

    @torch.no_grad()
    def forward(self) -> Forward:
        """What judges sets of candidates."""
        oracle = {s.name: s for s in self.reference.oracle().stages}
        right = truth(self.units, oracle, self.wires, self.logits.wire)
        dtypes = {o.wire: o.dtype for s in self.reference.stages for o in s.outputs}
        return Forward(self.units, self.logits, self.wires, right, dtypes, self.case.declared)


def prepare(case: Case, request: Request) -> Bisection:
    """Load both sides. Stages outside ``request.layers`` are the reference's in every forward."""
    if case.phase or case.positions:
        raise UsageError("bisect: expected a case of one whole prompt from position 0, without a phase")
    ids = cases.sequence(case)
    functions = engine.functions(request)
    reference = sides.reference(case.reference, case.checkpoint, case.dtype)
    production = sides.backed(sides.production(case.production, case.checkpoint, case.dtype), request.backend)
    chosen = make_plan(reference.stages, production.stages, request)
    everything = make_plan(reference.stages, production.stages, Request(modes=("free",)))
    logits = _logits(reference.stages)
    ways = engine.ways(everything, reference, production, {}) | engine.ways(chosen, reference, production, functions)
    mine = {s.name: s for s in production.stages}
    graph = Graph.of(reference.stages)
    inside = {step.stage for step in chosen.steps}
    steps = [s for s in _followed(everything, chosen, inside) if any(c in graph.stages for c in s.covers)]
    made = [_unit(step, graph, ways, mine) for step in steps]
    units = _needed(made, logits.wire)
    candidates = [u for u in units if u.name in inside]
    if not candidates:
        raise UsageError(f"--layer {request.layers!r}: no stage in it leads to {logits.wire}")
    own = next((o for u in units if u.way for o in u.way.stage.outputs if o.wire == logits.wire), logits)
    return Bisection(
        case,
        request,
        reference,
        production,
        units,
        candidates,
        own,
        engine.config(case, request, chosen, ids, reference, production),
        cases.inputs(case, ids),
    )


def _logits(stages: Sequence[Stage]) -> Output:
    """The model's output: what a model-scope stage returns as ``logits``."""
    found = [o for s in stages if s.layer is None for o in s.outputs if o.name == "logits" and o.role == "value"]
    if not found:
        raise UsageError("bisect judges the logits, but no stage of the reference outside the layers returns any")
    return found[-1]


def _followed(everything: Plan, chosen: Plan, inside: set[str]) -> Iterator[Step]:
    """Candidates and all steps from the first layer of the choice on; what lies before is given by the reference."""
    begun = False
    for step in everything.steps:
        begun = begun or (step.layer is not None and step.layer in chosen.layers)
        if begun or step.stage in inside:
            yield step


def _unit(step: Step, graph: Graph, ways: Mapping[str, Way], mine: Mapping[str, Stage]) -> Unit:
    covers = tuple(graph.stages[c] for c in step.covers if c in graph.stages)
    inner = {o.wire for stage in covers for o in stage.outputs}
    stage = mine.get(step.stage)
    promised = {o.wire: o.dtype for o in (stage.outputs if stage else ()) if o.wire in graph.outputs}
    boundary = graph.boundary([s.name for s in covers])
    reads = [w for s in covers for w in s.inputs.values() if w not in inner]
    return Unit(
        step.stage,
        step.layer,
        None if step.fault else ways[step.stage],
        covers,
        tuple(dict.fromkeys([*reads, *(stage.inputs.values() if stage and not step.fault else ())])),
        {w: promised.get(w, graph.outputs[w].dtype) for w in dict.fromkeys([*boundary, *promised])},
        step.fault or "",
    )


def _needed(units: Iterable[Unit], wire: str) -> list[Unit]:
    """Units upstream of a wire, in order."""
    wanted, found = {wire}, []
    for unit in reversed(list(units)):
        if wanted & set(unit.wires):
            wanted |= set(unit.reads)
            found.append(unit)
    return found[::-1]
