"""Two runs side by side, and the step summary."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from harness.records import Comparison, Config, Record
from harness.report.compare import COST_GROWTH, FLOOR, MARGIN_GROWTH, compare, console
from harness.report.summary import ROWS, plain, step_summary
from tests.report.conftest import Variant
from tests.report.sample import HOSTILE, lines, records


def changed(path: Path, **values: float | str) -> Path:
    """A clean run in which one local comparison has other figures."""
    parts: list[Record] = []
    for r in records("clean", layers=2):
        if isinstance(r, Comparison) and (r.stage, r.mode) == ("layers.1.o_a", "local"):
            r = dataclasses.replace(r, margin=0.4, cost=0.4)
            r = dataclasses.replace(r, **values)  # type: ignore[arg-type]
        parts.append(r)
    path.write_text("\n".join(lines(parts)) + "\n")
    return path


def test_a_run_is_no_worse_than_itself(run_file: Variant) -> None:
    said, worse = console(run_file("faulty"), run_file("faulty"))
    assert worse == []
    assert said.splitlines()[-1] == "NO REGRESSION in 285 shared comparisons"


def test_a_fault_is_named_first_and_its_heirs_after_it(run_file: Variant) -> None:
    said, worse = console(run_file("clean"), run_file("faulty"))
    assert (worse[0].stage, worse[0].mode, worse[0].before, worse[0].after) == (
        "layers.2.attn_core",
        "local",
        "PASS",
        "FAIL",
    )
    assert {r.mode for r in worse[1:]} == {"free"}
    assert said.splitlines()[-1].endswith("first layers.2.attn_core")
    mended, better = console(run_file("faulty"), run_file("clean"))
    assert better == []
    assert "better  layers.2.attn_core (local)  verdict FAIL -> PASS" in mended


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"margin": 0.4 * MARGIN_GROWTH + 0.01}, ["margin"]),
        ({"margin": 0.4 * MARGIN_GROWTH - 0.01}, []),
        ({"cost": 0.4 * COST_GROWTH + 0.01}, ["cost"]),
        ({"cost": 0.4 * COST_GROWTH - 0.01}, []),
        ({"bypass": "reference"}, ["ran as"]),
    ],
)
def test_growth_beyond_the_stated_factor_counts(
    tmp_path: Path, values: dict[str, float | str], found: list[str]
) -> None:
    worse = compare(changed(tmp_path / "a.jsonl"), changed(tmp_path / "b.jsonl", **values))
    assert [r.what for r in worse] == found


def test_growth_that_cannot_matter_yet_does_not(tmp_path: Path) -> None:
    a, b = changed(tmp_path / "a.jsonl", cost=0.001), changed(tmp_path / "b.jsonl", cost=FLOOR)
    assert compare(a, b) == []


@pytest.mark.parametrize(
    ("variant", "first"),
    [("killed", "finished -> interrupted"), ("invalid", "verdict PASS -> INVALID"), ("weights", "16 x too large")],
)
def test_what_concerns_the_run_comes_first(run_file: Variant, variant: str, first: str) -> None:
    worse = compare(run_file("clean"), run_file(variant))
    assert first in worse[0].line()


def test_lost_coverage_is_a_regression_and_another_selection_is_not(tmp_path: Path, run_file: Variant) -> None:
    fewer = [r for r in records("clean") if not (isinstance(r, Comparison) and r.layer == 4)]
    path = tmp_path / "b.jsonl"
    path.write_text("\n".join(lines(fewer)) + "\n")
    assert {r.after for r in compare(run_file("clean"), path)} == {"no record"}
    selected = [dataclasses.replace(r, layers=(0, 1, 2, 3, 5)) if isinstance(r, Config) else r for r in fewer]
    path.write_text("\n".join(lines(selected)) + "\n")
    said, worse = console(run_file("clean"), path)
    assert worse == []
    assert "note: layers differs" in said


def test_the_summary_names_fault_and_command(run_file: Variant) -> None:
    said = step_summary(run_file("faulty"))
    assert said.startswith("## ❌ FAIL: First fault: <code>layers&#46;2&#46;attn&#95;core</code>")
    assert said.count("| FAIL |") == ROWS
    assert "more in the report" in said
    assert "&#45;&#45;dump" in said


@pytest.mark.parametrize("variant", ["clean", "stopped", "killed", "invalid", "bypass", "weights", "hostile"])
def test_the_summary_is_only_our_own_markup(run_file: Variant, variant: str) -> None:
    said = step_summary(run_file(variant))
    assert set(re.findall(r"</?[a-zA-Z][^>]*>", said)) <= {"<code>", "</code>", "<pre>", "</pre>"}
    assert "\u202e" not in said
    assert "PASS:" not in said.splitlines()[0] or variant in {"clean", "bypass"}
    rows = [line for line in said.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} <= {6, 7}


def test_plain_leaves_markdown_nothing() -> None:
    assert not re.search(
        r"[`*_{}\[\]()<>#+\-.!|~@:\"'/\\]", re.sub(r"&#\d+;", "", plain(HOSTILE + "@a [x](http://b) `c`\n# d"))
    )
