"""One bundled model, laid out once; each test puts its own wrong function in one production stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from torch import Tensor

from harness import case as cases
from harness import sides
from harness.bench import Bench
from harness.engine import ways
from harness.execute import Way, compose
from harness.local import row
from harness.plan import Request, make_plan
from harness.records import Comparison

Wrong = Callable[..., Mapping[str, Tensor]]
CASE = Path(__file__).parents[2] / "cases" / "tiny.toml"


class Lab:
    """Local rows of single stages on the first tokens of the default case."""

    def __init__(self) -> None:
        self.case = case = cases.load(str(CASE)).override(length=170)  # beyond the window, and no multiple of 4
        self.sides = reference, production = (
            sides.reference(case.reference, case.checkpoint, case.dtype),
            sides.production(case.production, case.checkpoint, case.dtype),
        )
        plan = make_plan(reference.stages, production.stages, Request(modes=("local",)))
        oracle = reference.oracle()
        wires = compose(reference.stages, plan.compose, cases.inputs(case, cases.sequence(case)))
        by_name = [{s.name: s for s in side.stages} for side in (reference, oracle, production)]
        theirs, truth, mine = by_name
        made = ways(plan, reference, production, {})
        self.bench = Bench(plan, theirs, oracle, truth, mine, dict(made), wires, "", diagnose="all")
        self.steps = {step.stage: step for step in plan.steps}

    def row(self, stage: str, wrong: Wrong | None = None) -> Comparison:
        before = self.bench.ways[stage]
        assert isinstance(self.bench.ways, dict)
        if wrong:
            self.bench.ways[stage] = Way(self.bench.production[stage], function=wrong, target="test")
        try:
            found = next(iter(row(self.bench, self.steps[stage])))
        finally:
            self.bench.ways[stage] = before
        assert isinstance(found, Comparison)
        return found


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()
