"""``harness generate`` on the bundled checkpoint: the right answer on both sides, faults followed to their stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import jsonl
from harness.cli import main
from harness.early import Stopped
from harness.generate.columns import Columns
from harness.records import Certification, Comparison, Config, Record, Step, Summary, Verdict

PROMPT = "the lamp is in the kitchen . the key is in the garden . where is the lamp ?"
MINE = """
def transposed(stage, streams, post, comb, out):
    return stage.run(streams=streams, post=post, comb=comb.transpose(-1, -2).contiguous(), out=out)


def same(stage, **inputs):
    return stage.run(**inputs)


def raising(stage, **inputs):
    raise RuntimeError("boom")
"""
Generate = Callable[..., tuple[int, list[Record], str]]


@pytest.fixture
def generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Generate:
    def run(*words: str, prompt: str | None = PROMPT) -> tuple[int, list[Record], str]:
        path = tmp_path / "run.jsonl"
        path.unlink(missing_ok=True)
        given = ["--prompt", prompt] if prompt is not None else []
        code = main(["generate", *given, *words, "--json", str(path)])
        return code, jsonl.read(path) if path.exists() else [], capsys.readouterr().out

    return run


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def steps(records: list[Record]) -> list[Step]:
    return [r for r in records if isinstance(r, Step)]


def test_the_right_answer_on_both_sides(generate: Generate) -> None:
    code, records, out = generate()
    assert code == 0
    found = steps(records)
    assert [(s.production, s.reference) for s in found] == [(" kitchen", " kitchen"), (" <eos>", " <eos>")]
    assert {s.verdict for s in found} == {Verdict.PASS}
    for step in found:
        assert step.agree
        assert step.kl is not None
        assert step.kl < 1e-4
        assert step.error is not None
        assert step.allowed is not None
        assert step.error <= step.allowed
        assert len(step.attention_production) == len(step.attention_reference) == len(step.divergence) == 6
        assert all(d is not None and d < 0.05 for d in step.divergence)
    assert [c.name for c in records if isinstance(c, Certification)][-1] == "history"
    assert "kitchen <eos>" in out
    assert out.splitlines()[-1] == "PASS 2 steps"
    config = records[0]
    assert isinstance(config, Config)
    assert config.command.startswith("harness generate --case tiny --prompt")


def test_a_transposed_comb_is_named_with_its_step(generate: Generate, mine: str) -> None:
    code, records, out = generate("--replace", f"layers.*.attn_mix={mine}:transposed")
    assert code == 1
    assert out.splitlines()[-1].startswith("FIRST FAULT: step 0: layers.1.attn_mix (local, ")
    assert steps(records)[0].verdict is Verdict.FAIL
    assert any(isinstance(r, Comparison) and r.stage == "layers.1.attn_mix" for r in records)


def test_a_transposed_comb_is_visible_in_the_text(generate: Generate, mine: str) -> None:
    """In the default case's long story: the short question is one that the model answers by heart."""
    words = ("--side", "production", "--max-new-tokens", "12")
    right = generate(*words, prompt=None)[2].splitlines()[0]
    wrong = generate(*words, "--replace", f"layers.*.attn_mix={mine}:transposed", prompt=None)[2].splitlines()[0]
    assert right.startswith(" the cup is in the valley .")
    assert wrong != right


def test_a_replacement_that_computes_the_same_passes(generate: Generate, mine: str) -> None:
    globs = ["layers.*.compressor", "layers.2.indexer", "layers.*.attn_core", "layers.0.kv_cache", "layers.3.router"]
    code, records, _ = generate(*(w for g in globs for w in ("--replace", f"{g}={mine}:same")))
    assert code == 0
    assert [s.production for s in steps(records)] == [" kitchen", " <eos>"]


def test_a_replacement_that_raises_is_the_users_own(
    generate: Generate, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, records, _ = generate("--replace", f"layers.2.router={mine}:raising")
    assert code == 2
    assert isinstance(records[-1], Summary)
    assert "boom" in str(records[-1].reason)


def test_direct_residual_runs_both_sides_alike(generate: Generate) -> None:
    code, records, _ = generate("--direct-residual", "--max-new-tokens", "4")
    assert code == 0
    found = steps(records)
    assert all(s.agree for s in found)
    assert all(s.error is not None and s.allowed is not None and s.error <= s.allowed for s in found)


def test_bypassed_layers(generate: Generate) -> None:
    code, records, _ = generate("--bypass", "layers.*=reference")
    assert code == 0
    assert [s.production for s in steps(records)] == [" kitchen", " <eos>"]


def test_own_tokens_and_samples_shared_by_noise(generate: Generate) -> None:
    words = ("--follow", "own", "--temperature", "1.5", "--max-new-tokens", "6", "--seed", "3")
    code, records, _ = generate(*words)
    again = generate(*words)[1]
    assert code == 0
    assert [s.production for s in steps(records)] == [s.reference for s in steps(records)]
    assert [s.token for s in steps(records)] == [s.token for s in steps(again)]
    assert not any(isinstance(r, Comparison) for r in records)


@pytest.mark.parametrize("side", ["production", "reference"])
def test_one_side(generate: Generate, side: str) -> None:
    code, records, out = generate("--side", side)
    assert code == 0
    assert out.startswith(" kitchen <eos>\n")
    assert {s.verdict for s in steps(records)} == {Verdict.SKIPPED}
    assert {getattr(s, side) for s in steps(records)} == {" kitchen", " <eos>"}


def test_production_that_raises_is_a_finding(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    from production.cache.components import CachedHcaCompressor

    def broken(*_: Any, **__: Any) -> None:
        raise IndexError("page 7 of 4")

    monkeypatch.setattr(CachedHcaCompressor, "step", broken)
    code, records, out = generate()
    assert code == 1
    assert steps(records)[-1].reason == "production raised IndexError: page 7 of 4"
    assert out.splitlines()[-1].startswith("FIRST FAULT: step 0: layers.3.compressor (local, ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens: expected a whole number from 1"),
        (["--temperature", "hot"], "--temperature: expected a number from 0 to 100"),
        (["--seed", "-1"], "--seed: expected a whole number from 0"),
        (["--prompt", "the zebra"], "does not know the word 'zebra'"),
        (["--replace", "layers.2.attn_core"], "expected STAGE=path.py:function"),
        (["--no-thinking"], "unrecognized arguments: --no-thinking"),
    ],
)
def test_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *words]) == 2
    assert said in capsys.readouterr().err


def test_ctrl_c_keeps_the_record(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    show = Columns.__call__

    def impatient(self: Columns, seen: Any) -> None:
        show(self, seen)
        if seen.step == 2:
            raise Stopped

    monkeypatch.setattr(Columns, "__call__", impatient)
    code, records, out = generate("--max-new-tokens", "50", prompt="the lamp is in the kitchen .")
    assert code == 3
    assert out.splitlines()[-1] == "INVALID: interrupted"
    assert isinstance(records[-1], Summary)
    assert records[-1].interrupted
    assert [(s.step, s.verdict) for s in steps(records)] == [(i, Verdict.SKIPPED) for i in range(3)]
    assert {s.reason for s in steps(records)} == {"interrupted before the oracle judged it"}
