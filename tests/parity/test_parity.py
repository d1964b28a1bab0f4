"""The gate: a row passes, fails with its reason, or is skipped with its reason; and not everything may be skipped."""

from __future__ import annotations

import pytest

from harness.records import Certification, Comparison, Config, Skip, Summary, Verdict, Weights
from tests.parity import conftest

pytestmark = pytest.mark.parity

#: share of rows that a case may leave out: with one token there is no compressed entry in any layer
MAY_SKIP = 0.10
#: below this many tokens two RMS errors differ by luck, and free rows may say so (rule 6)
ENOUGH = 32


def test_row(planned: tuple[str, str, str]) -> None:
    found = conftest.row(*planned)
    assert found is not None, "the engine yielded no such row: it is planned, but was not compared"
    if isinstance(found, Skip):
        pytest.skip(found.reason)
    if found.verdict is Verdict.SKIPPED or (found.verdict is Verdict.INCONCLUSIVE and found.mode == "free"):
        pytest.skip(f"{found.verdict}: {found.reason}")
    if found.verdict is not Verdict.PASS:
        pytest.fail(f"{found.verdict} {found.tensor}: {found.reason}\n{found.reproduce}", pytrace=False)


def test_reference_is_certified(case_name: str) -> None:
    checks = [r for r in conftest.results(case_name) if isinstance(r, Certification)]
    assert checks
    assert [f"{c.name}: {c.detail}" for c in checks if not c.ok] == []


def test_weights_are_equal(case_name: str) -> None:
    audited = [r for r in conftest.results(case_name) if isinstance(r, Weights)]
    assert audited
    assert [f"{w.stage}.{w.parameter}: {w.reason}" for w in audited if w.verdict is not Verdict.PASS] == []


def test_not_everything_is_skipped(case_name: str) -> None:
    """The guard: planned rows were judged, in both modes and every layer, and the run says so itself."""
    plan, records = conftest.plan(case_name), conftest.results(case_name)
    config = records[0]
    assert isinstance(config, Config)
    for mode in ("local", "free") if config.batch * config.length >= ENOUGH else ("local",):
        judged = [r for r in records if isinstance(r, Comparison) and r.mode == mode and r.verdict is Verdict.PASS]
        assert len(judged) >= (1 - MAY_SKIP) * len(plan.steps)
        assert {r.layer for r in judged} == {*plan.layers, None}
    last = records[-1]
    assert isinstance(last, Summary)
    assert last.exit_code == 0, last.line
