"""One run, from a case to records: load, audit, compose, certify, then local and free rows in one pass.

``run`` is a generator. Every record is yielded as soon as it is made, the summary last, so whoever consumes it can
write, show and stop at any time.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch

from harness import __version__, history, replace, sides
from harness import case as cases
from harness.audit import audit
from harness.bench import Bench
from harness.case import Case
from harness.dump import Keeper
from harness.execute import Way, compose
from harness.free import FreeRun
from harness.isolate import Isolation
from harness.local import row as local_row
from harness.phase import parse
from harness.plan import Plan, Request, make_plan
from harness.records import Certification, Config, Record, Summary
from harness.tally import Tally
from harness.types import InvalidRun, Reference, Side, StepReference, Steps, UsageError

MOST_TOKENS = 1024


@dataclass
class Clock:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def total(self) -> dict[str, float]:
        """All phases and the total so far."""
        return {**self.seconds, "total": time.perf_counter() - self.start}


def run(case: Case, request: Request, clock: Clock | None = None, keeper: Keeper | None = None) -> Iterator[Record]:
    """All records of a run. Bad input raises UsageError; a reference that means nothing ends the run as INVALID.

    ``keeper`` is shown the tensors of every row.
    """
    clock, tally = clock or Clock(), Tally()
    try:
        with ExitStack() as open_until_the_end:
            for record in _records(case, request, clock, keeper, open_until_the_end):
                tally.add(record)
                yield record
    except InvalidRun as error:
        yield tally.summary(clock.total(), error=str(error))
    else:
        yield tally.summary(clock.total())


def _records(case: Case, request: Request, clock: Clock, keeper: Keeper | None, context: ExitStack) -> Iterator[Record]:
    ids = cases.sequence(case)
    replacements = functions(request)
    with clock.phase("load"):
        reference = sides.reference(case.reference, case.checkpoint, case.dtype)
        production = sides.backed(sides.production(case.production, case.checkpoint, case.dtype), request.backend)
        sizes = _sizes(case, request, ids)
        if sizes and request.isolate:
            raise UsageError(
                f"--isolate with --phase {request.phase}: a process serves one call without caches; drop one"
            )
        if sizes:
            reference = cast(StepReference, history.stepped(reference, "reference"))
            production = history.stepped(production, "production")
        plan = make_plan(reference.stages, production.stages, request)
        oracle = reference.oracle()
    yield config(case, request, plan, ids, reference, production)

    mine = {s.name: s for s in production.stages}
    truth = {s.name: s for s in oracle.stages}
    theirs = {s.name: s for s in reference.stages}
    with clock.phase("audit"):
        for step in plan.steps:
            if step.compared and step.produced and all(c in truth for c in step.covers):
                yield from audit(mine[step.stage], {c: truth[c] for c in step.covers})

    inputs, start = cases.inputs(case, ids), None
    with clock.phase("reference"):
        if sizes:
            start = history.begin(cast(Steps, reference), plan.compose, inputs["input_ids"], sizes, ())
            inputs = start.inputs
        wires = compose(reference.stages, plan.compose, inputs)
    with clock.phase("certify"):
        failed = []
        checks = list(reference.certify(inputs, wires))
        if start is not None:
            checks += history.certified(cast(StepReference, reference), start)
        for check in checks:
            yield Certification(check.name, check.ok, check.detail)
            failed += [] if check.ok else [check]
    if failed:
        raise InvalidRun(f"the reference is not the unmodified model: {failed[0].name}: {failed[0].detail}")
    if plan.direct:
        with clock.phase("reference"):
            if start is not None:
                start = history.begin(
                    cast(Steps, reference),
                    plan.compose,
                    torch.cat([*start.calls, inputs["input_ids"]], 1),
                    sizes,
                    plan.direct,
                )
                inputs = start.inputs
            wires = compose(reference.stages, plan.compose, inputs, plan.direct)

    computed = ways(plan, reference, production, replacements)
    if request.isolate:
        isolation = context.enter_context(Isolation(case, request.backend))
        computed = {name: dataclasses.replace(way, elsewhere=isolation.run) for name, way in computed.items()}
    command = _command(case, request)
    bench = Bench(
        plan, theirs, oracle, truth, mine, computed, wires, command, case.declared, keeper, diagnose=request.diagnose
    )
    free_run = None
    if "free" in plan.modes:
        if start is not None:
            with clock.phase("history"):
                others = {n: Way(mine[n], direct=True) for n in plan.direct if n in mine and n not in computed}
                history.follow(
                    start, cast(Steps, oracle), cast(Steps, production), history.plain(computed | others), plan.direct
                )
        free_run = FreeRun(bench) if start is None else FreeRun(bench, start.mine, start.truth, start.failure)
    for index, step in enumerate(plan.steps):
        if "local" in step.compared:
            with clock.phase("local"):
                made: list[Record] = list(local_row(bench, step))
            yield from made
        if free_run is not None:
            with clock.phase("free"):
                made = list(free_run.row(index))
            yield from made
    if free_run is not None:
        clock.seconds["oracle"] = free_run.seconds_oracle


def _sizes(case: Case, request: Request, ids: list[int]) -> list[int]:
    """Tokens of each call where the request names a phase, else nothing: one whole prompt without caches."""
    if not request.phase:
        return []
    if case.positions:
        raise UsageError(f"--phase {request.phase}: the case starts at position {case.positions}; expected 0")
    return parse(request.phase).calls(len(ids))


def functions(request: Request) -> dict[str, replace.Function]:
    """The functions that ``--replace`` names, by how they were named."""
    return {t: replace.load(t) for t in {r.partition("=")[2].strip() for r in request.replace} if t}


def ways(plan: Plan, reference: Side, production: Side, replacements: Mapping[str, replace.Function]) -> dict[str, Way]:
    """Who computes each production stage of a plan, by stage."""
    mine, theirs = ({s.name: s for s in side.stages} for side in (production, reference))
    dtypes = {o.wire: o.dtype for s in reference.stages for o in s.outputs}
    if isinstance(reference, Steps):  # caches enter on wires that no output names
        dtypes |= {into: dtypes[out] for into, out in reference.state.items()}
    made = {}
    for step in plan.steps:
        if not step.produced:
            continue
        stage = mine[step.stage]
        if step.bypass == "reference":
            covered = [theirs[c] for c in step.covers if c in theirs]
            made[step.stage] = Way(stage, reference=covered, reference_dtypes=dtypes)
        elif step.replace is not None:
            made[step.stage] = Way(stage, function=replacements[step.replace], target=step.replace)
        else:
            made[step.stage] = Way(stage, direct=step.bypass == "direct")
    return made


def config(case: Case, request: Request, plan: Plan, ids: list[int], reference: Reference, production: Side) -> Config:
    provenance = {"harness": __version__, "logical dtype": reference.logical_dtype()}
    for name, side in (("reference", reference), ("production", production)):
        provenance.update({f"{name} {key}": str(value) for key, value in side.provenance.items()})
    return Config(
        command=_command(case, request) + f" --layer {request.layers}",
        case=case.name,
        checkpoint=str(case.checkpoint),
        layers=plan.layers,
        modes=tuple(plan.modes),
        dtype=case.dtype,
        batch=case.batch,
        length=len(ids),
        tokens=tuple(cases.words(case, ids[:MOST_TOKENS])),
        bypass={s.stage: s.bypass for s in plan.steps if s.bypass != "production"},
        replace={s.stage: s.replace for s in plan.steps if s.replace},
        direct_residual=request.direct_residual,
        phase=request.phase,
        stages_reference=tuple(s.name for s in reference.stages),
        stages_production=tuple(s.name for s in production.stages),
        provenance=provenance,
        planned=plan.rows,
    )


def _command(case: Case, request: Request) -> str:
    """The command line of this run, without layer, stage and mode."""
    words = ["harness", "diff", *case.argument]
    for bypass in request.bypass:
        words += ["--bypass", bypass]
    for text in request.backend:
        words += ["--backend", text]
    for text in request.replace:
        words += ["--replace", text]
    if request.direct_residual:
        words.append("--direct-residual")
    if request.isolate:
        words.append("--isolate")
    if request.phase != case.phase:
        words += ["--phase", request.phase]
    return shlex.join(words)


def summary_of(records: list[Record]) -> Summary:
    """The summary of a finished run."""
    last = records[-1]
    assert isinstance(last, Summary)
    return last
