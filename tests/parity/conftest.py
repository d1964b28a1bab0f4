"""Parity: every stage x layer x mode of every bundled case, one test a row, through the engine that users run.

Tests are planned from the sides' metadata while collecting; a case runs once, when the first of its rows is asked for.
`-m parity` takes every case. A run without that expression takes the two short ones, as a check of the check.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from harness import case as cases
from harness import engine, history, sides
from harness.case import Case
from harness.plan import Plan, Request, make_plan
from harness.records import Comparison, Record, Skip

SHORT = ("single", "short")


@cache
def load(name: str) -> Case:
    return cases.load(name)


@cache
def plan(name: str) -> Plan:
    """What the case will compare, from metadata."""
    case = load(name)
    pair: tuple[sides.Side, sides.Side] = built(case)
    if case.phase:
        pair = history.stepped(pair[0], "reference"), history.stepped(pair[1], "production")
    return make_plan(pair[0].stages, pair[1].stages, request(case))


def request(case: Case) -> Request:
    """What the case asks for."""
    return Request(layers=case.layers, phase=case.phase)


@cache
def _built(reference: str, production: str, checkpoint: str, dtype: str) -> tuple[sides.Reference, sides.Side]:
    case = next(c for c in map(load, cases.bundled()) if str(c.checkpoint) == checkpoint and c.dtype == dtype)
    return (
        sides.reference(reference, case.checkpoint, case.dtype),
        sides.production(production, case.checkpoint, case.dtype),
    )


def built(case: Case) -> tuple[sides.Reference, sides.Side]:
    """Both sides of a case, shared by all cases of the same checkpoint and dtype."""
    return _built(case.reference, case.production, str(case.checkpoint), case.dtype)


@cache
def results(name: str) -> tuple[Record, ...]:
    """All records of a case: the engine's own run, on the sides that are already built."""
    case = load(name)
    reference, production = built(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sides, "reference", lambda *_: reference)
        patch.setattr(sides, "production", lambda *_: production)
        return tuple(engine.run(case, request(case)))


def row(name: str, stage: str, mode: str) -> Comparison | Skip | None:
    """One row of a case; None where the engine yielded none."""
    for record in results(name):
        if isinstance(record, Comparison | Skip) and (record.stage, record.mode) == (stage, mode):
            return record
    return None


def chosen(config: pytest.Config) -> list[str]:
    """Cases of this session."""
    expression = config.option.markexpr or ""
    everything = "parity" in expression and "not parity" not in expression
    return [name for name in cases.bundled() if everything or name in SHORT]


def rows(names: list[str]) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """(id, (case, stage, mode)) of every planned row."""
    for name in names:
        for step in plan(name).steps:
            scope = "model" if step.layer is None else f"L{step.layer}"
            for mode in step.compared:
                yield f"{name}-{scope}-{step.stage.rpartition('.')[2]}-{mode}", (name, step.stage, mode)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = chosen(metafunc.config)
    if "planned" in metafunc.fixturenames:
        found = list(rows(names))
        metafunc.parametrize("planned", [values for _, values in found], ids=[name for name, _ in found])
    elif "case_name" in metafunc.fixturenames:
        metafunc.parametrize("case_name", names)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    import torch

    names = chosen(config)
    where = f"GPU: {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "no GPU: the portable path runs"
    device = {built(load(name))[1].provenance.get("device", "cpu") for name in names}
    return [f"parity: {', '.join(names)}; {where}; production on {', '.join(sorted(device))}"]
