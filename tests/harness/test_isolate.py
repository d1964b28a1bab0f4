"""A stage that takes its process or the GPU down is named, and no other stage is blamed for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.records import Verdict
from harness.tally import INVALID
from harness.types import UsageError
from tests.harness.conftest import Run, rows, summary

WRONG = """
import ctypes, sys

def dies(stage, **inputs):
    print("the last words", file=sys.stderr, flush=True)
    ctypes.string_at(0)

def scribbles(stage, **inputs):
    outputs = stage.run(**inputs)
    inputs["y"].zero_()
    return outputs

def raises(stage, **inputs):
    raise KeyError("of my own")
"""


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    (tmp_path / "wrong.py").write_text(WRONG)
    return str(tmp_path / "wrong.py")


def test_a_stage_that_dies_is_named_and_the_others_are_still_judged(run: Run, wrong: str) -> None:
    replace = (f"layers.0.proj={wrong}:dies", f"layers.0.attn={wrong}:scribbles")
    records = run(layers="0", modes=("local",), stages=("*.proj", "*.attn", "*.router"), replace=replace, isolate=True)
    found = rows(records)
    assert (found["layers.0.proj"].verdict, found["layers.0.attn"].verdict) == (Verdict.FAIL, Verdict.FAIL)
    assert found["layers.0.proj"].reason == "took its process down (SIGSEGV): the last words"
    assert "changed its input layers.0.proj.y in place" in str(found["layers.0.attn"].reason)
    assert found["layers.0.router"].verdict == Verdict.PASS
    first = summary(records).first_fault
    assert first is not None
    assert first.stage == "layers.0.proj"
    assert "--isolate" in found["layers.0.proj"].reproduce


def test_a_function_that_raises_is_the_users_own(run: Run, wrong: str) -> None:
    with pytest.raises(UsageError, match="of my own"):
        run(layers="0", modes=("local",), stages=("*.proj",), replace=(f"layers.0.proj={wrong}:raises",), isolate=True)


def test_a_lost_gpu_ends_the_run_at_its_stage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --isolate: the stage after which the GPU no longer answers, never a later one."""
    left = [2]  # stages until the GPU is lost

    def answer() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", answer)
    records = run(layers="0", modes=("local",))
    assert list(rows(records)) == ["embed", "table"]
    assert summary(records).exit_code == INVALID
    line = summary(records).line
    assert "layers.0.pre left the GPU unusable" in line
    assert "illegal memory access" in line


def test_phases_are_refused(run: Run) -> None:
    with pytest.raises(UsageError, match=r"--isolate with --phase decode:1"):
        run(layers="0", phase="decode:1", isolate=True)
