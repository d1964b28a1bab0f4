"""One run, from a case to records: load, audit, compose, certify, then local and free rows in one pass.

``run`` is a generator. Every record is yielded as soon as it is made, the summary last, so whoever consumes it can
write, show and stop at any time.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from harness import __version__, replace, sides
from harness import case as cases
from harness.audit import audit
from harness.bench import Bench
from harness.case import Case
from harness.dump import Keeper
from harness.execute import Way, compose
from harness.free import FreeRun
from harness.local import row as local_row
from harness.plan import Plan, Request, make_plan
from harness.records import Certification, Config, Record, Summary
from harness.tally import Tally
from harness.types import InvalidRun, Reference, Side, Stage

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
        for record in _records(case, request, clock, keeper):
            tally.add(record)
            yield record
    except InvalidRun as error:
        yield tally.summary(clock.total(), error=str(error))
    else:
        yield tally.summary(clock.total())


def _records(case: Case, request: Request, clock: Clock, keeper: Keeper | None) -> Iterator[Record]:
    ids = cases.sequence(case)
    functions = {t: replace.load(t) for t in {r.partition("=")[2].strip() for r in request.replace} if t}
    with clock.phase("load"):
        reference = sides.reference(case.reference, case.checkpoint, case.dtype)
        production = sides.production(case.production, case.checkpoint, case.dtype)
        plan = make_plan(reference.stages, production.stages, request)
        oracle = reference.oracle()
    yield _config(case, request, plan, ids, reference, production)

    mine = {s.name: s for s in production.stages}
    truth = {s.name: s for s in oracle.stages}
    theirs = {s.name: s for s in reference.stages}
    with clock.phase("audit"):
        for step in plan.steps:
            if step.compared and step.produced and all(c in truth for c in step.covers):
                yield from audit(mine[step.stage], {c: truth[c] for c in step.covers})

    inputs = cases.inputs(case, ids)
    with clock.phase("reference"):
        wires = compose(reference.stages, plan.compose, inputs)
    with clock.phase("certify"):
        failed = []
        for check in reference.certify(inputs, wires):
            yield Certification(check.name, check.ok, check.detail)
            failed += [] if check.ok else [check]
    if failed:
        raise InvalidRun(f"the reference is not the unmodified model: {failed[0].name}: {failed[0].detail}")
    if plan.direct:
        with clock.phase("reference"):
            wires = compose(reference.stages, plan.compose, inputs, plan.direct)

    ways = {step.stage: _way(step.stage, plan, mine, theirs, functions) for step in plan.steps if step.produced}
    bench = Bench(plan, theirs, oracle, truth, mine, ways, wires, _command(case, request), case.declared, keeper)
    free_run = FreeRun(bench) if "free" in plan.modes else None
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


def _way(
    name: str, plan: Plan, mine: dict[str, Stage], theirs: dict[str, Stage], functions: dict[str, replace.Function]
) -> Way:
    """Who computes a production stage."""
    step = next(s for s in plan.steps if s.stage == name)
    if step.bypass == "reference":
        dtypes = {o.wire: o.dtype for s in theirs.values() for o in s.outputs}
        return Way(mine[name], reference=[theirs[c] for c in step.covers if c in theirs], reference_dtypes=dtypes)
    if step.replace is not None:
        return Way(mine[name], function=functions[step.replace], target=step.replace)
    return Way(mine[name], direct=step.bypass == "direct")


def _config(case: Case, request: Request, plan: Plan, ids: list[int], reference: Reference, production: Side) -> Config:
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
    for text in request.replace:
        words += ["--replace", text]
    if request.direct_residual:
        words.append("--direct-residual")
    return shlex.join(words)


def summary_of(records: list[Record]) -> Summary:
    """The summary of a finished run."""
    last = records[-1]
    assert isinstance(last, Summary)
    return last
