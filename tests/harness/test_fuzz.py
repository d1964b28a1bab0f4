"""Arguments, case files and record files of any content: no traceback, and an exit code that means something.

The engine is replaced by records of a run that was made once: what is tried here is everything around it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import case as cases
from harness import engine, jsonl
from harness.cli import main
from harness.plan import Request
from harness.records import Record
from tests.harness import toy

CODES = (0, 1, 2, 3)
quick = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The record lines of one toy run with a failing stage."""
    folder = tmp_path_factory.mktemp("run")
    toy.FAULTS["layers.1.proj"] = lambda outputs, inputs: {"y": outputs["y"] * 2}
    case = cases.Case(
        "toy",
        folder,
        reference=f"{toy.__name__}:reference",
        production=f"{toy.__name__}:production",
        tokens=tuple(range(12)),
    )
    records = list(engine.run(case, Request(layers="1")))
    toy.FAULTS.clear()
    return [jsonl.encode(record) for record in records]


@pytest.fixture
def quiet(tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, toy_case: str) -> str:
    """An empty working folder, and an engine that answers at once. Returns the toy's case file."""
    path = tmp_path / "recorded.jsonl"
    path.write_text("\n".join(lines) + "\n")
    recorded = jsonl.read(path)

    def run(case: cases.Case, request: Request, *_: Any) -> Iterator[Record]:
        cases.inputs(case, cases.sequence(case))
        yield from recorded

    monkeypatch.setattr(engine, "run", run)
    monkeypatch.chdir(tmp_path)
    return toy_case


OPTIONS = ["--layer", "--stage", "--bypass", "--replace", "--tokens", "--prompt", "--length", "--batch", "--dtype"]
OPTIONS += ["--mode", "--json", "--html", "--junit", "--dump", "--step-summary", "--direct-residual", "--help"]
WORDS = ["diff", "list", "report", "doctor", "stages", "cases", "components", "all", "0", "1", "-1", "2-1", "0,1"]
WORDS += ["*", "=", "proj=reference", "proj=direct", "x.py:f", "nan", "1e9", "99999999999", "local", "fp32", "", "\0"]
WORDS += ["recorded.jsonl", "none/x", ".", "..", "x.json", "\udcff", "--", "-"]
#: no separators: nothing may be written outside the working folder
text = st.text(st.characters(exclude_characters="/\\", codec="utf-8"), max_size=8)
words = st.lists(st.sampled_from(OPTIONS + WORDS) | text, max_size=8)


@quick
@given(st.sampled_from(["diff", "diff", "report", "list"]), words)
def test_arguments(quiet: str, name: str, rest: list[str]) -> None:
    case = ["--case", quiet] if name == "diff" else []
    assert main([name, *case, *rest]) in CODES


@quick
@given(words)
def test_words(quiet: str, argv: list[str]) -> None:
    if argv[:1] != ["doctor"]:
        assert main(argv) in CODES


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([0, -1, 10**10, 2**63, 2**64, "all", "native", ".", "\0", "model", "a:b", "x" * 300])
    | st.text(max_size=8)
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def toml(value: Any) -> str:
    """A value in TOML; what TOML has no word for is left to be a syntax error."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return repr(value)


declared = st.lists(
    st.dictionaries(st.sampled_from(["stage", "output", "reason", "floor", "x"]), scalars, max_size=4), max_size=2
)


@quick
@given(st.dictionaries(st.sampled_from([*cases.KEYS, "promt"]), anything, max_size=4), declared)
def test_case_files(quiet: str, entries: dict[str, Any], tables: list[dict[str, Any]]) -> None:
    sides = {"reference": f"{toy.__name__}:reference", "production": f"{toy.__name__}:production", "checkpoint": "."}
    body = {**sides, **entries, **({"declared": tables} if tables else {})}
    path = Path("fuzz.toml")
    path.write_text("\n".join(f"{key} = {toml(value)}" for key, value in body.items()), encoding="utf-8")
    assert main(["diff", "--case", str(path)]) in CODES


@quick
@given(
    st.binary(max_size=60) | st.sampled_from([b"a = " + b"[" * 5000, b"a." * 5000 + b"b = 1", b"\xef\xbb\xbfseed=1"])
)
def test_case_bytes(quiet: str, content: bytes) -> None:
    Path("fuzz.toml").write_bytes(content)
    assert main(["diff", "--case", "fuzz.toml"]) == 2


@settings(quick, max_examples=40)
@given(st.data())
def test_record_files(quiet: str, lines: list[str], data: st.DataObject) -> None:
    """Lines lost, doubled, cut and with any value in any place."""
    chosen = list(lines)
    for _ in range(data.draw(st.integers(0, 3))):
        if not chosen:
            break
        at = data.draw(st.integers(0, len(chosen) - 1))
        kind = data.draw(st.sampled_from(["drop", "double", "value", "value", "value", "junk"]))
        if kind == "drop":
            del chosen[at]
        elif kind == "double":
            chosen.insert(at, chosen[at])
        elif kind == "junk":
            chosen[at] = data.draw(st.text(max_size=20) | anything.map(json.dumps))
        else:
            record = json.loads(chosen[at])
            record[data.draw(st.sampled_from(sorted(record)))] = data.draw(anything)
            chosen[at] = json.dumps(record)
    content = ("\n".join(chosen) + "\n").encode("utf-8", "surrogatepass")
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    path = Path("fuzz.jsonl")
    path.write_bytes(content)
    views = data.draw(st.sampled_from([[], ["--html", "x.html"], ["--junit", "x.xml"], ["--step-summary", "x.md"]]))
    assert main(["report", str(path), *views]) in CODES
    assert main(["report", "recorded.jsonl", str(path)]) in CODES


def test_names_that_are_no_text(quiet: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A file name may hold bytes that no encoding knows; they arrive as lone surrogates."""
    name = os.fsdecode(b"\xff.toml")
    Path(name).write_text(Path(quiet).read_text())
    views = ["--json", "x.jsonl", "--html", "x.html", "--junit", "x.xml", "--step-summary", "x.md"]
    assert main(["diff", "--case", name, *views]) in CODES
    assert main(["diff", "--prompt", "\udcff", "--case", name]) == 2
