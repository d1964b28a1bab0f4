"""``harness bisect``: smallest sets on their own, then faults and their interactions in the toy model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harness.bisect import forward, minimal, search
from harness.cli import main
from tests.harness import toy
from tests.harness.conftest import changed, refused

Outputs = dict[str, Tensor]
Sets = list[tuple[str, ...]]
NAMES = tuple("abcdefghijkl")


def breaking(sets: Iterable[Iterable[str]]) -> Callable[[Iterable[str]], bool]:
    """A test that fails where one of ``sets`` is inside."""
    known = [set(s) for s in sets]
    return lambda names: any(s <= set(names) for s in known)


class TestMinimal:
    @given(
        st.lists(st.sets(st.sampled_from(NAMES), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(1, 12)
    )
    def test_what_is_found_breaks_and_no_part_of_it_does(self, sets: list[set[str]], size: int) -> None:
        breaks = breaking(sets)
        groups = [NAMES[i : i + size] for i in range(0, len(NAMES), size)]
        found = minimal.minimal(breaks, groups)
        assert breaks(found)
        assert not any(breaks(part) for n in range(len(found)) for part in combinations(found, n))
        assert list(found) == sorted(found)

    def test_a_single_fault_costs_a_logarithm(self) -> None:
        asked: list[frozenset[str]] = []

        def breaks(names: Iterable[str]) -> bool:
            asked.append(frozenset(names))
            return "s77" in asked[-1]

        assert minimal.minimal(breaks, [[f"s{i}" for i in range(j, j + 16)] for j in range(0, 128, 16)]) == ("s77",)
        assert len(asked) <= 8 + 2 * 4
        assert len(asked) == len(set(asked))

    def test_a_test_that_is_not_monotone_ends_in_a_minimal_set(self) -> None:
        """a breaks unless b is there, and c always: a and b hide each other."""

        def breaks(names: Iterable[str]) -> bool:
            return "c" in names or ("a" in names) != ("b" in names)

        assert minimal.minimal(breaks, [("a", "b"), ("c", "d")]) == ("c",)
        assert minimal.minimal(breaks, [("a", "c"), ("b", "d")]) in (("a",), ("c",))

    @given(st.lists(st.sets(st.sampled_from(NAMES), min_size=1, max_size=4), min_size=0, max_size=5))
    def test_a_hitting_set_is_a_smallest_one(self, sets: list[set[str]]) -> None:
        found = minimal.hitting([tuple(sorted(s)) for s in sets])
        assert all(s & set(found) for s in sets)
        assert not any(all(s & set(part) for s in sets) for n in range(len(found)) for part in combinations(NAMES, n))

    def test_smaller(self) -> None:
        assert minimal.smaller(lambda s: "b" in s, ("a", "b", "c")) == ("b",)
        assert minimal.smaller(lambda s: False, ("a", "b", "c")) is None
        asked: list[tuple[str, ...]] = []
        assert minimal.smaller(lambda s: bool(asked.append(tuple(s))), NAMES) is None
        assert {len(s) for s in asked} == {len(NAMES) - 1}


Bisect = Callable[..., dict[str, Any]]


@pytest.fixture
def bisect(toy_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bisect:
    """``bisect(option, ...)`` -> the result line of the JSON file, with the console's lines and all forwards."""

    def go(*options: str) -> dict[str, Any]:
        path = tmp_path / "bisect.jsonl"
        code = main(["bisect", "--case", toy_case, "--json", str(path), *options])
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        lines = capsys.readouterr().out.splitlines()
        assert (rows[0]["kind"], rows[-1]["kind"], rows[-1]["exit_code"]) == ("config", "bisect", code)
        assert lines[-1] == rows[-1]["line"]
        forwards = [r for r in rows if r["kind"] == "forward"]
        assert len({tuple(r["production"]) for r in forwards}) == len(forwards) == rows[-1].get("forwards", 0)
        return {**rows[-1], "lines": lines, "rows": forwards}

    return go


def scaled(output: str, factor: float) -> Callable[[Outputs, Outputs], Any]:
    return changed(output, lambda x: x * factor)


def marks(outputs: Outputs, inputs: Outputs) -> Outputs:
    """Harmless: the last bit of one token."""
    y = outputs["y"].clone()
    y[0, 3] = (y[0, 3].view(torch.int16) | 1).view(torch.bfloat16)
    return {**outputs, "y": y}


def believes_marks(outputs: Outputs, inputs: Outputs) -> Outputs:
    """Wrong only on what ``marks`` leaves."""
    marked = bool((inputs["y"][0, 3].view(torch.int16) & 1).all())
    return {**outputs, "out": outputs["out"] * (2 if marked else 1)}


class TestFaults:
    def test_a_clean_production(self, bisect: Bisect) -> None:
        found = bisect()
        assert (found["exit_code"], found["forwards"], found["swapped"]) == (0, 2, [])
        assert found["line"].startswith("BISECT: nothing to bisect, the logits are right (0.")
        assert found["lines"][0] == "toy: 1 x 24 tokens, layers 0,1, native: 15 stages"

    @pytest.mark.parametrize("stage", [s.name for s in toy.build("production")])
    def test_one_fault_in_any_stage(self, bisect: Bisect, stage: str) -> None:
        def wrong(outputs: Outputs, inputs: Outputs) -> Outputs:
            return {n: t.flip(1) if n in ("picks", "weights") else t * 2 if n != "visible" else t
                    for n, t in outputs.items()}  # fmt: skip

        toy.FAULTS[stage] = wrong
        found = bisect()
        assert (found["exit_code"], found["swapped"], found["sets"]) == (1, [stage], [[stage]])
        assert found["line"] == f"BISECT: {stage} (breaks the logits alone)"
        assert found["restored"]["verdict"] == "PASS"
        assert found["alone"][stage]["verdict"] == "FAIL"

    def test_two_independent_faults(self, bisect: Bisect) -> None:
        toy.FAULTS["layers.0.attn"] = scaled("out", 1.5)
        toy.FAULTS["layers.1.experts"] = scaled("out", 1.5)
        found = bisect()
        both = ["layers.0.attn", "layers.1.experts"]
        assert (found["exit_code"], found["swapped"], found["sets"]) == (1, both, [[s] for s in both])
        assert found["line"] == "BISECT: layers.0.attn + layers.1.experts (each breaks the logits alone)"
        verdicts = {tuple(r["production"]): r["verdict"] for r in found["rows"]}
        names = [s.name for s in toy.build("production")]
        assert {s: verdicts[tuple(n for n in names if n != s)] for s in both} == dict.fromkeys(both, "FAIL")
        assert verdicts[tuple(n for n in names if n not in both)] == "PASS"

    def test_two_changes_that_break_only_together(self, bisect: Bisect) -> None:
        toy.FAULTS["layers.0.proj"] = marks
        toy.FAULTS["layers.0.attn"] = believes_marks
        found = bisect()
        assert (found["exit_code"], found["sets"]) == (1, [["layers.0.proj", "layers.0.attn"]])
        assert found["swapped"] == ["layers.0.proj"]
        assert {o["verdict"] for o in found["alone"].values()} == {"PASS"}
        assert found["line"].startswith("BISECT: layers.0.proj + layers.0.attn (only together; swapping layers.0.proj ")

    def test_an_interaction_beside_a_fault(self, bisect: Bisect) -> None:
        toy.FAULTS["layers.0.proj"] = marks
        toy.FAULTS["layers.0.attn"] = believes_marks
        toy.FAULTS["head"] = scaled("logits", 1.3)
        found = bisect()
        assert sorted(found["sets"]) == [["head"], ["layers.0.proj", "layers.0.attn"]]
        assert found["swapped"] == ["layers.0.proj", "head"]

    def test_two_changes_that_cancel(self, bisect: Bisect, tmp_path: Path) -> None:
        path = tmp_path / "f.py"
        path.write_text(
            "def twice(stage, **i):\n    return {n: t * 2 for n, t in stage.run(**i).items()}\n"
            "def half(stage, **i):\n    return stage.run(**{n: t / 2 if n == 'out' else t for n, t in i.items()})\n"
            "def halved(stage, **i):\n    o = stage.run(**i)\n    return {**o, 'out': o['out'] * 2}\n"
        )
        options = ["--replace", f"layers.0.attn={path}:halved", "--replace", f"layers.0.post={path}:half"]
        found = bisect(*options)
        assert (found["exit_code"], found["cancels"]) == (1, True)
        assert found["swapped"] == ["layers.0.attn", "layers.0.post"]
        assert found["line"].endswith("(the first alone breaks the logits, together they cancel)")

    def test_many_faults_stop_the_search(self, bisect: Bisect) -> None:
        for stage in toy.build("production"):
            toy.FAULTS[stage.name] = lambda outputs, inputs: {n: torch.zeros_like(t) for n, t in outputs.items()}
        found = bisect()
        assert len(found["sets"]) == search.MOST_SETS
        assert found["restored"] is None
        assert found["line"].endswith("and more (stopped after 8 breaking sets)")

    def test_layers_outside_the_range_are_the_references(self, bisect: Bisect) -> None:
        toy.FAULTS["layers.1.attn"] = scaled("out", 2)
        assert bisect("--layer", "0")["exit_code"] == 0
        toy.FAULTS["layers.0.attn"] = scaled("out", 2)
        found = bisect("--layer", "0")
        assert found["swapped"] == ["layers.0.attn"]
        assert {n for r in found["rows"] for n in r["production"]} == {
            "embed", "table", *(s.name for s in toy.build("production") if s.layer == 0)
        }  # fmt: skip

    def test_what_production_never_returns_or_raises(self, bisect: Bisect) -> None:
        def raises(outputs: Outputs, inputs: Outputs) -> Any:
            raise RuntimeError("illegal memory access")

        toy.FAULTS["layers.0.proj"] = raises
        toy.FAULTS["layers.1.post"] = changed("streams", lambda x: x * float("nan"))
        toy.TWEAKS["production"] = lambda stages: [s for s in stages if s.name != "layers.1.attn"]
        found = bisect()
        assert found["swapped"] == ["layers.0.proj", "layers.1.attn", "layers.1.post"]
        reasons = {n: o["reason"] for n, o in found["alone"].items()}
        assert reasons["layers.0.proj"] == "layers.0.proj raised RuntimeError: illegal memory access"
        assert "never produced" in reasons["layers.1.attn"]
        assert "NaN" in reasons["layers.1.post"]

    def test_a_fused_stage_is_swapped_as_one(self, bisect: Bisect) -> None:
        parts = ("layers.0.router", "layers.0.experts", "layers.0.post")
        toy.TWEAKS["production"] = lambda stages: toy.fuse(stages, *parts)
        toy.FAULTS["+".join(parts)] = lambda outputs, inputs: {n: t * 2 for n, t in outputs.items()}
        assert bisect()["swapped"] == ["+".join(parts)]

    def test_sides_that_disagree_about_a_stage(self, bisect: Bisect) -> None:
        def other_dims(stages: list[toy.ToyStage]) -> list[toy.ToyStage]:
            out = replace(stages[3].outputs[0], dims=("S", "B", "d"))
            return [*stages[:3], replace(stages[3], outputs=(out,)), *stages[4:]]

        toy.TWEAKS["production"] = other_dims
        assert bisect()["swapped"] == ["layers.0.proj"]


def test_what_is_kept_changes_nothing(bisect: Bisect, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.FAULTS["layers.0.attn"] = scaled("out", 1.5)
    toy.FAULTS["layers.1.experts"] = scaled("out", 1.5)
    kept = bisect()
    monkeypatch.setattr(forward, "KEPT_BYTES", 0)
    fresh = bisect()
    assert fresh["rows"] == kept["rows"]

    def stages(found: dict[str, Any]) -> int:
        return int(found["lines"][-2].split(" forwards, ")[1].split()[0])

    assert stages(kept) < 0.7 * stages(fresh)


class TestNothingToConclude:
    def test_an_uncertified_reference(self, bisect: Bisect) -> None:
        toy.TWEAKS["certify"] = False
        found = bisect()
        assert (found["exit_code"], found["rows"]) == (3, [])
        assert found["line"].startswith("INVALID: the reference is not the unmodified model")

    def test_logits_that_no_swap_restores(self, bisect: Bisect, monkeypatch: pytest.MonkeyPatch) -> None:
        swap = forward.swap

        def wrong(unit: forward.Unit, *args: Any) -> Outputs:
            return {w: t * 2 if unit.name == "head" else t for w, t in swap(unit, *args).items()}

        monkeypatch.setattr(forward, "swap", wrong)
        found = bisect()
        assert found["exit_code"] == 3
        assert found["line"].startswith("INVALID: with every stage swapped for the reference the logits are not right")

    def test_logits_that_cannot_be_judged(self, bisect: Bisect) -> None:
        found = bisect("--length", "1")
        assert (found["exit_code"], found["line"].partition(":")[0]) == (3, "INVALID")
        assert "below 32 an RMS says nothing" in found["line"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layer", "7"], "there is no layer 7; layers are 0-1"),
        (["--layer", "x"], "expected N, A-B, a,b or all"),
        (["--replace", "layers.0.porj={f}:fn"], "did you mean 'layers.0.proj'?"),
        (["--layer", "1", "--replace", "layers.0.proj={f}:fn"], "matches only stages that this run leaves out"),
        (["--replace", "proj={f}:gn"], "no function 'gn' in it"),
        (["--json", "/nowhere/x"], "the folder '/nowhere' does not exist"),
        (["--bypass", "proj=reference"], "unrecognized arguments"),
        (["--tokens", "99"], "token id 99 is out of range"),
    ],
)
def test_bad_input(
    toy_case: str, tmp_path: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f.py").write_text("def fn(stage, **i):\n    return stage.run(**i)\n")
    (tmp_path / "config.json").write_text('{"vocab_size": 16}')
    options = [o.format(f=tmp_path / "f.py") for o in options]
    assert words in refused(capsys, "bisect", "--case", toy_case, *options)


def test_a_case_with_a_phase_and_sides_without_logits(toy_case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected a case of one whole prompt" in refused(capsys, "bisect", "--case", "decode")
    toy.TWEAKS["reference"] = toy.TWEAKS["production"] = lambda stages: [s for s in stages if s.name != "head"]
    assert "no stage of the reference outside the layers returns any" in refused(capsys, "bisect", "--case", toy_case)


def test_a_function_that_raises_is_bad_input(toy_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f.py").write_text("def fn(stage, **i):\n    raise ValueError('no')\n")
    assert main(["bisect", "--case", toy_case, "--replace", f"layers.1.proj={tmp_path / 'f.py'}:fn"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
