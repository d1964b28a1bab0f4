"""Records survive the file, and a file that is no record file says so."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import jsonl
from harness.records import Certification, Record, Skip, Step, Verdict
from harness.types import UsageError
from tests.harness import toy
from tests.harness.conftest import Run


def save(records: list[Record], path: Path) -> Path:
    writer = jsonl.Writer(path)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def rounded(record: Record) -> object:
    """A record as its file holds it: floats at six digits."""
    return json.loads(jsonl.encode(record))


def test_every_kind_comes_back(run: Run, tmp_path: Path) -> None:
    toy.FAULTS["head"] = lambda outputs, inputs: {"logits": outputs["logits"] * 2}
    records = run(bypass=("layers.0.proj=reference",))
    path = save(records, tmp_path / "run.jsonl")
    back = jsonl.read(path)
    assert [type(r) for r in back] == [type(r) for r in records]
    assert [rounded(r) for r in back] == [rounded(r) for r in records]
    assert {r.kind for r in back} == set(jsonl.KINDS) - {"step"}, "steps belong to a generation"


def test_a_step_comes_back(run: Run, tmp_path: Path) -> None:
    step = Step(3, 334, " river", " river", " tent", False, Verdict.FAIL, "beyond", kl=0.25, divergence=(None, 0.5))
    back = jsonl.read(save([run()[0], step, run()[-1]], tmp_path / "run.jsonl"))
    assert back[1] == step


def test_lines_are_strict_json_and_flushed_one_by_one(tmp_path: Path) -> None:
    writer = jsonl.Writer(tmp_path / "run.jsonl")
    for i in range(3):
        writer.write(Certification("x", True, "\u2028 <script> \n"))
        assert len((tmp_path / "run.jsonl").read_text().split("\n")) == i + 2
    writer.close()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_six_digits(value: float) -> None:
    found = json.loads(jsonl.encode(Skip("s", None, "local", "r")))
    assert found["reason"] == "r"
    plain = jsonl._plain(value)
    assert plain == pytest.approx(value, rel=1e-5, abs=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(bad: float, run: Run) -> None:
    last = run(layers="0", stages=("proj",))[-1]
    with pytest.raises(ValueError, match="not JSON compliant"):
        jsonl.encode(replace(last, seconds={"total": bad}))  # type: ignore[type-var]


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> Path:
    return save(run(layers="0", stages=("proj",)), tmp_path / "run.jsonl")


def test_a_truncated_file(saved: Path) -> None:
    text = saved.read_text()
    lines = text.splitlines(keepends=True)
    for cut, words in ((text[: len(text) // 2], "is not a record"), ("".join(lines[:-1]), "truncated")):
        saved.write_text(cut)
        with pytest.raises(UsageError, match=words):
            jsonl.read(saved)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "expected a config record first"),
        (b"[1]", "expected a kind among"),
        (b'{"kind":"nonsense"}', "expected a kind among"),
        (b'{"kind":["skip"]}', "expected a kind among"),
        (b'{"kind":"skip"}', "is not a skip record"),
        (b'{"kind":"skip","stage":"a","layer":"2","mode":"local","reason":"r"}', "is not a skip record"),
        (b'{"kind":"skip","stage":"a","layer":NaN,"mode":"local","reason":"r"}', "not strict JSON"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"[" * 100_000, "is not a record"),
    ],
)
def test_a_foreign_file(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(text)
    with pytest.raises(UsageError, match=r"run\.jsonl") as caught:
        jsonl.read(path)
    assert words in str(caught.value)


def test_another_schema(saved: Path) -> None:
    saved.write_text(saved.read_text().replace('"schema":1', '"schema":99', 1))
    with pytest.raises(UsageError, match="schema 99"):
        jsonl.read(saved)


def test_no_file_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        jsonl.read(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="cannot write"):
        jsonl.Writer(tmp_path / "none" / "x.jsonl").write(Skip("s", None, "local", "r"))
    with pytest.raises(UsageError, match="No space left"):
        jsonl.Writer(Path("/dev/full")).write(Skip("s", None, "local", "r"))
