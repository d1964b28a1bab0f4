"""Running the catalogue: faults grouped by scenario, one result each, as they are found."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from cases.faults import declared, gates  # noqa: F401  (declared fills the catalogue)
from cases.faults.catalogue import CATALOGUE, Fault
from cases.faults.gates import Gate
from cases.faults.stand import Stand, prepare
from harness.dump import Row
from harness.records import Verdict
from harness.types import UsageError


@dataclass(frozen=True)
class Found:
    """What became of one fault; a row of ``--json``."""

    id: str
    caught: bool | None  # None: it cannot run here, and waits_for says what is missing
    stage_expected: tuple[str, ...]
    stage_found: str | None
    cause_expected: str
    causes: tuple[str, ...]  # ids, best first
    scenario: str
    origin: str
    cause: str
    margin: float | None = None
    cost: float | None = None
    tensor: str | None = None
    gates: dict[str, Gate] = field(default_factory=dict)
    gates_clean: dict[str, bool] = field(default_factory=dict)  # whether each passes the unchanged stage
    waits_for: str | None = None
    seconds: float = 0.0

    @property
    def placed(self) -> bool:
        """Whether the first fault of the run is the faulted stage."""
        return bool(self.caught) and self.stage_found in self.stage_expected

    def row(self) -> dict[str, Any]:
        """As JSON; times are left out, so that a stored file changes only with what was found."""
        made = asdict(self)
        del made["seconds"]
        return made


def choose(glob: str) -> list[Fault]:
    """Entries whose id a glob matches; none is bad input."""
    found = [f for f in CATALOGUE.values() if fnmatchcase(f.id, glob)]
    if not found:
        known = ", ".join(sorted({i.split("-")[0] for i in CATALOGUE}))
        raise UsageError(f"faults {glob!r} matches no fault; ids begin with {known}")
    return found


def run(faults: Sequence[Fault], *, with_gates: bool = True) -> Iterator[Found]:
    """Results of faults, scenario by scenario in the order in which scenarios come up; what waits comes last."""
    able = [f for f in faults if f.function is not None]
    for scenario in dict.fromkeys(f.scenario for f in able):
        stand = prepare(scenario)
        for fault in able:
            if fault.scenario == scenario:
                yield result(stand, fault, with_gates=with_gates)
    for fault in faults:
        if fault.function is None:
            yield Found(
                fault.id, None, fault.expected, None, fault.cause_id, (), "", fault.origin, fault.cause,
                waits_for=fault.waits_for,
            )  # fmt: skip


def result(stand: Stand, fault: Fault, *, with_gates: bool = True) -> Found:
    """Plant one fault and see what the harness says."""
    start = time.perf_counter()
    made, tensors = stand.planted(fault)
    first = stand.first(made, {r.layer for r in made.values()})
    caught = any(r.verdict == Verdict.FAIL for r in made.values())
    said, clean = {}, {}
    if with_gates and tensors:
        name, row = next(iter(tensors.items()))
        said = _gates(stand, fault, name, row)
        clean = stand.known((name, fault.stressed), lambda: _gates(stand, fault, name, stand.unchanged(fault)))
    return Found(
        fault.id,
        caught,
        fault.expected,
        first.stage if first else None,
        fault.cause_id,
        tuple(cause.id for cause in getattr(first, "causes", ())),
        fault.shown_in,
        fault.origin,
        fault.cause,
        margin=first.margin if first else None,
        cost=first.cost if first else None,
        tensor=first.tensor if first else None,
        gates=said,
        gates_clean={g: c.passed for g, c in clean.items()},
        seconds=time.perf_counter() - start,
    )


def _gates(stand: Stand, fault: Fault, name: str, row: Row) -> dict[str, Gate]:
    """The gates' word on a row's value outputs, and on the logits of a run that goes on from them."""
    step = next(s for s in stand.bench.plan.steps if s.stage == name)
    values = [o for o in row.stage.outputs if o.role == "value" and o.wire in row.reference]
    top1 = stand.top1(name, row.produced, stand.stressed(step, fault.stress))
    return gates.judge(row.produced, {o.name: row.reference[o.wire] for o in values}, top1)
