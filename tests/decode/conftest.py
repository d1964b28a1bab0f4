"""A small real pair of sides (random NVFP4 checkpoint, both rates, window 16), and engine runs over its phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import engine, sides
from harness.case import Case
from harness.plan import Request
from harness.records import Comparison, Record, Skip, Summary, Verdict
from tests.production import synthetic

TOKENS = tuple((7 * i * i + 3 * i) % 50 for i in range(75))
Run = Callable[..., list[Record]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.checkpoint(tmp_path_factory.mktemp("decode"), max_position_embeddings=1024)


@pytest.fixture(scope="session")
def case(folder: Path) -> Case:
    return Case("synthetic", folder, argument=("--case", "synthetic.toml"), tokens=TOKENS)


@cache
def _sides(folder: Path, dtype: Any) -> tuple[sides.Reference, sides.Side]:
    return (
        sides.reference("reference.build:model", folder, dtype),
        sides.production("production.build:model", folder, dtype),
    )


@pytest.fixture
def run(case: Case, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run(phase, **request)``: all records, on sides that are built once."""

    def build(phase: str, *, dtype: str = "native", batch: int = 1, **request: Any) -> list[Record]:
        pair = _sides(case.checkpoint, dtype)
        monkeypatch.setattr(sides, "reference", lambda *_: pair[0])
        monkeypatch.setattr(sides, "production", lambda *_: pair[1])
        return list(engine.run(case.override(dtype=dtype, batch=batch), Request(phase=phase, **request)))

    return build


def summary(records: list[Record]) -> Summary:
    last = records[-1]
    assert isinstance(last, Summary)
    return last


def failures(records: list[Record], mode: str) -> list[str]:
    """Stages that fail in a mode, in order."""
    return [r.stage for r in records if isinstance(r, Comparison) and r.mode == mode and r.verdict is Verdict.FAIL]


def rows(records: list[Record], mode: str) -> dict[str, Comparison | Skip]:
    return {r.stage: r for r in records if isinstance(r, Comparison | Skip) and r.mode == mode}
