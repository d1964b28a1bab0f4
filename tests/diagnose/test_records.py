"""Causes in records and views: the last line, old records, and text that could break a page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from harness import jsonl, junit
from harness.records import Cause, Comparison, Verdict
from harness.report.load import KINDS, build
from harness.report.summary import step_summary
from harness.tally import Tally
from tests.diagnose import wrong
from tests.diagnose.conftest import Lab


def test_the_last_line_carries_the_cause(lab: Lab) -> None:
    tally = Tally()
    tally.add(lab.row("layers.2.attn_core", wrong.value_sum))
    line = tally.summary({}).line
    assert line.startswith("FIRST FAULT: layers.2.attn_core (local, ")
    assert " × margin): sink enters the value sum (confirmed, explains " in line


def test_causes_are_read_back_and_old_records_have_none(lab: Lab) -> None:
    record = lab.row("layers.2.q_b_norm", wrong.skipped)
    data = json.loads(jsonl.encode(record))
    assert build(KINDS["comparison"], data).causes == record.causes
    del data["causes"]
    assert build(KINDS["comparison"], data).causes == ()


def test_views_show_causes_escaped(lab: Lab, tmp_path: Path) -> None:
    record = lab.row("layers.2.q_b_norm", wrong.skipped)
    record = dataclasses.replace(record, causes=(Cause("a-cause", "suspected", 0.75, "<b>norm</b> & more"),))
    assert isinstance(record, Comparison)
    assert record.verdict == Verdict.FAIL
    tally = Tally()
    tally.add(record)
    path = tmp_path / "run.jsonl"
    path.write_text(jsonl.encode(record) + "\n" + jsonl.encode(tally.summary({})) + "\n", encoding="utf-8")
    junit.write([record], tmp_path / "run.xml")
    xml, text = (tmp_path / "run.xml").read_text(encoding="utf-8"), step_summary(path)
    assert "&lt;b&gt;norm" in xml
    assert "explains 75.0 %" in xml
    assert "norm" in text
    assert "<b>" not in text
