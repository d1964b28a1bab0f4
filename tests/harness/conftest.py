"""Runs of the toy model, with everything that a test planted undone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from harness import engine
from harness.case import Case
from harness.cli import main
from harness.plan import Request
from harness.records import Comparison, Record, Summary
from tests.harness import toy

Outputs = dict[str, Tensor]
Run = Callable[..., list[Record]]


@pytest.fixture(autouse=True)
def clean_toy() -> Iterator[None]:
    yield
    toy.FAULTS.clear()
    toy.TWEAKS.clear()


@pytest.fixture
def toy_case(tmp_path: Path) -> str:
    """A case file of the toy model."""
    path = tmp_path / "toy.toml"
    path.write_text(
        f'checkpoint = "."\nreference = "{toy.__name__}:reference"\nproduction = "{toy.__name__}:production"\n'
        f"tokens = {[(3 * i + i * i // 7) % toy.V for i in range(24)]}\n"
    )
    return str(path)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(
        "toy",
        tmp_path,
        argument=("--case", "toy.toml"),
        reference="tests.harness.toy:reference",
        production="tests.harness.toy:production",
        tokens=tuple((3 * i + i * i // 7) % toy.V for i in range(24)),
    )


@pytest.fixture
def run(case: Case) -> Run:
    """``run(layers="0", bypass=(...), batch=2)``: request fields and case fields alike."""

    def go(**wishes: Any) -> list[Record]:
        request = {k: v for k, v in wishes.items() if k in Request.__dataclass_fields__}
        changes = {k: v for k, v in wishes.items() if k not in request}
        return list(engine.run(case.override(**changes), Request(**request)))

    return go


def rows(records: list[Record], mode: str | None = None) -> dict[str, Comparison]:
    """Comparisons by stage."""
    return {r.stage: r for r in records if isinstance(r, Comparison) and mode in (None, r.mode)}


def summary(records: list[Record]) -> Summary:
    assert isinstance(records[-1], Summary)
    return records[-1]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must be refused before anything is shown; returns its one line."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert err.startswith("harness: ")
    assert len(err) < 600
    assert not out
    return err


def changed(output: str, change: Callable[[Tensor], Any]) -> Callable[[Outputs, Outputs], Any]:
    return lambda outputs, inputs: {**outputs, output: change(outputs[output])}


def bump(at: tuple[int, ...], factor: float) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[at] *= factor
        return x

    return change
