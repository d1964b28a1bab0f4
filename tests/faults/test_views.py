"""Gates, table, page, command line, and the figures that the README shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cases.faults.declared  # noqa: F401
from cases.faults import gates, page, table
from cases.faults.catalogue import CATALOGUE
from harness.cli import main

ROOT = Path(__file__).parents[2]
STORED = ROOT / "reports" / "faults" / "cpu.jsonl"


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in STORED.read_text().splitlines()]


def test_stored_rows_are_those_of_the_catalogue() -> None:
    stored = {r["id"]: r for r in rows()}
    assert stored.keys() == CATALOGUE.keys()
    for name, entry in CATALOGUE.items():
        row = stored[name]
        assert (row["stage_expected"], row["cause_expected"]) == (list(entry.expected), entry.cause_id)
        assert (row["caught"] is None) == bool(entry.waits_for)
        if row["caught"] is not None:
            assert row["scenario"] == entry.shown_in
            assert row["gates"].keys() == row["gates_clean"].keys() == set(gates.NAMES)


def test_readme_shows_the_stored_figures() -> None:
    sums = table.totals(rows())
    assert table.markdown(sums) in (ROOT / "README.md").read_text()
    assert sums.caught >= 0.98 * sums.runnable
    assert sums.placed >= 0.95 * sums.runnable


def test_a_missed_fault_shows_everywhere() -> None:
    stored = rows()
    row = {**stored[0], "caught": False, "stage_found": None, "scenario": "<b>"}
    sums = table.totals([row, *stored[1:]])
    assert not sums.good
    assert "NO" in table.cells(row)
    made = page.page([row])
    assert 'class="missed"' in made
    assert "<b>&lt;b&gt;" not in made
    assert "&lt;b&gt;" in made


def test_gates_are_as_they_are_usually_written() -> None:
    x = torch.linspace(-2, 3, 64)
    words = gates.judge({"x": 3 * x}, {"x": x}, 0.96)
    assert {g: w.passed for g, w in words.items()} == {
        "allclose": False,
        "cosine": True,  # blind to scale
        "pearson": True,
        "diff": False,
        "top1": True,
    }
    assert words["diff"].value == pytest.approx(0.4, abs=1e-6)
    moved = gates.judge({"x": x + 5}, {"x": x}, 0.94)
    assert not moved["cosine"].passed
    assert moved["pearson"].passed  # blind to an offset too
    assert not moved["top1"].passed


@pytest.mark.parametrize("produced", [{}, {"x": torch.ones(3)}, {"x": torch.full((4,), torch.nan)}])
def test_a_gate_without_a_figure_does_not_pass(produced: dict[str, torch.Tensor]) -> None:
    words = gates.judge(produced, {"x": torch.arange(4.0)}, None)
    assert not any(w.passed for w in words.values())
    assert all(w.value is None for w in words.values())


@pytest.mark.parametrize("arguments", [["no-such-*"], ["--json", "/no/such/folder/x"], ["--html", "."], ["--nope"]])
def test_bad_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_command_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, html = tmp_path / "f.jsonl", tmp_path / "f.html"
    assert main(["faults", "[sf][ic]*-*18x", "--json", str(out)]) == 2
    assert main(["faults", "sink-rounded*", "--json", str(out), "--html", str(html)]) == 0
    (row,) = (json.loads(line) for line in out.read_text().splitlines())
    assert (row["id"], row["caught"], row["stage_found"]) == ("sink-rounded-to-bf16", True, "layers.2.attn_core")
    assert "caught 1 of 1" in capsys.readouterr().out
    assert "sink-rounded-to-bf16" in html.read_text()
