"""A call that continues from caches is diagnosed as a whole prefill is."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import engine, sides
from harness.plan import Request
from harness.records import Comparison
from tests.diagnose.conftest import Lab

WRONG = Path(__file__).with_name("wrong.py")


@pytest.mark.parametrize(
    ("phase", "id", "function"),
    [("decode:1", "sink-in-value-sum", "value_sum"), ("chunk:80", "window-off-by-one", "narrow")],
)
def test_a_call_on_caches(lab: Lab, monkeypatch: pytest.MonkeyPatch, phase: str, id: str, function: str) -> None:
    monkeypatch.setattr(sides, "reference", lambda *_: lab.sides[0])
    monkeypatch.setattr(sides, "production", lambda *_: lab.sides[1])
    stage = "layers.2.attn_core"
    request = Request(layers="2", modes=("local",), phase=phase, replace=(f"{stage}={WRONG}:{function}",))
    found = [r for r in engine.run(lab.case, request) if isinstance(r, Comparison) and r.stage == stage]
    assert [(c.id, c.status) for c in found[0].causes][:1] == [(id, "confirmed")], found[0].causes
