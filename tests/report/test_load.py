"""Reading runs back: what is damaged is said, what is no run is refused, nothing else raises."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.report.load import read
from harness.types import UsageError
from tests.report.conftest import Variant
from tests.report.sample import lines, records


def test_every_record_comes_back(run_file: Variant) -> None:
    run, expected = read(run_file("faulty")), records("faulty")
    found = [run.config, *run.certifications, *run.weights, *run.comparisons, *run.skips, *run.routing, run.logits]
    assert len([*found, run.summary]) == len(expected)
    assert run.problems == []
    assert run.complete


def test_a_cut_last_line_is_truncation_and_no_end(run_file: Variant) -> None:
    run = read(run_file("killed"))
    assert run.truncated
    assert not run.complete
    assert run.comparisons


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ('{"kind": "skip", "stage": "a", "layer": NaN, "mode": "local", "reason": "r"}', "NaN is not JSON"),
        ('{"kind": "skip", "stage": "a", "layer": "2", "mode": "local", "reason": "r"}', "layer: expected int"),
        ('{"kind": "skip", "stage": "a", "layer": 2, "mode": "local"}', "reason is missing"),
        ('{"kind": "logits", "kl": 1e999}', "entropy_production is missing"),
        ('{"layer": 2}', "expected an object with a kind"),
        ("{", "Expecting"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_bad_line_is_listed_and_the_rest_is_read(tmp_path: Path, damage: str, said: str) -> None:
    parts = lines(records("clean")[:8])
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([*parts[:4], damage, *parts[4:]]) + "\n")
    run = read(path)
    assert len(run.problems) == 1
    assert run.problems[0].startswith("line 5: ")
    assert said in run.problems[0]
    assert len(run.certifications) + len(run.weights) == 7


def test_an_infinite_number_is_refused(tmp_path: Path) -> None:
    data = json.loads(next(line for line in lines(records("clean")) if '"kind":"comparison"' in line))
    text = json.dumps(data).replace(json.dumps(data["tensors"][0]["tokens"]), "[0.5, 1e999]")
    path = tmp_path / "run.jsonl"
    path.write_text(lines(records("clean")[:1])[0] + "\n" + text + "\n")
    assert "finite" in read(path).problems[0]


@pytest.mark.parametrize("content", ["", "\n\n", "hello\n", "{}\n", '{"kind": 3}\n', "\x00\xff"])
def test_what_holds_no_record_is_bad_input(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match="not a record file"):
        read(path)


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read(tmp_path / "none.jsonl")


BASE = lines(records("clean")[:12])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_raises_anything_else(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    text = bytearray("\n".join(BASE), "utf-8")
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=20))
    path = tmp_path_factory.getbasetemp() / "damaged.jsonl"
    path.write_bytes(text)
    with contextlib.suppress(UsageError):
        read(path)
