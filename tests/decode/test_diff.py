"""``diff --phase``: calls that continue from caches pass on correct sides, in every way that a call can be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.case import Case
from harness.cli import main
from harness.records import Certification, Comparison, Config, Verdict
from tests.decode.conftest import Run, failures, rows, summary

PHASES = ["prefill", "decode:12", "chunk:17", "chunk:1,3,5,33"]


@pytest.mark.parametrize("phase", PHASES)
def test_correct_sides_pass(run: Run, phase: str) -> None:
    records = run(phase)
    assert summary(records).exit_code == 0, summary(records).line
    config = records[0]
    assert isinstance(config, Config)
    assert config.phase == phase
    assert f"--phase {phase}" in config.command


def test_the_history_is_certified(run: Run) -> None:
    names = [r.name for r in run("decode:2", layers="1") if isinstance(r, Certification) and r.ok]
    assert "history" in names
    assert "wires: layers.1" in names


def test_cache_contents_are_compared_as_tensors(run: Run) -> None:
    local = rows(run("decode:5"), "local")
    compressor, ring, indexer = (local[f"layers.1.{n}"] for n in ("compressor", "kv_cache", "indexer"))
    for record, names in (
        (ring, {"keys", "window"}),
        (compressor, {"keys", "open_kv", "open_gate", "overlap_kv", "overlap_gate"}),
        (indexer, {"keys", "open_kv", "overlap_gate"}),
    ):
        assert isinstance(record, Comparison)
        assert names <= {t.tensor for t in record.tensors}
    assert isinstance(ring, Comparison)
    assert [t.shape for t in ring.tensors] == [(1, 16, 32), (1, 15, 32)]
    assert {t.margin for t in ring.tensors} == {0.0}  # copies are the same numbers


def test_several_rows(run: Run) -> None:
    assert summary(run("decode:3", batch=3)).exit_code == 0


def test_fp32(run: Run) -> None:
    assert summary(run("chunk:30", dtype="fp32")).exit_code == 0


def test_one_layer(run: Run) -> None:
    records = run("decode:2", layers="2")
    assert summary(records).exit_code == 0
    assert "layers.2.kv_cache" in rows(records, "free")
    assert not any(stage.startswith("layers.1.") for stage in rows(records, "local"))


def test_direct_residual_on_both_sides(run: Run) -> None:
    records = run("decode:4", direct_residual=True)
    assert summary(records).exit_code == 0, summary(records).line
    found = rows(records, "free")["layers.1.attn_mix"]
    assert isinstance(found, Comparison)
    assert found.bypass == "direct"


@pytest.mark.parametrize("glob", ["layers.*", "layers.1.compressor", "layers.*.kv_cache"])
def test_bypassed_stages_keep_their_caches_too(run: Run, glob: str) -> None:
    records = run("decode:4", bypass=(f"{glob}=reference",))
    assert summary(records).exit_code == 0, summary(records).line


def test_a_replacement_is_followed_through_the_history(run: Run, tmp_path: Path) -> None:
    """The function keeps old entries in an emitting call only: the compared call is clean, its caches are not."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def same(stage, **inputs):\n    return stage.run(**inputs)\n\n\n"
        "def stuck(stage, entries, **inputs):\n"
        "    out = stage.run(entries=entries, **inputs)\n"
        "    emitted = out['pooled'].shape[1]\n"
        "    if emitted and entries.shape[1]:\n"
        "        out['keys'] = out['keys'].clone()\n"
        "        out['keys'][:, -emitted:] = entries[:, -1:]\n"
        "    return out\n"
    )
    assert summary(run("decode:9", replace=(f"layers.1.compressor={path}:same",))).exit_code == 0
    records = run("decode:9", replace=(f"layers.1.compressor={path}:stuck",))  # token 75 closes no window
    assert failures(records, "local") == []
    assert failures(records, "free")[0] == "layers.1.compressor"
    assert summary(records).exit_code == 1


def test_production_that_cannot_follow_fails_in_free_rows_only(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from production.session import Session

    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no page left")

    monkeypatch.setattr(Session, "feed", broken)
    records = run("decode:2")
    assert failures(records, "local") == []
    first = next(r for r in records if isinstance(r, Comparison) and r.mode == "free")
    assert first.verdict is Verdict.FAIL
    assert "the calls before this one raised MemoryError: no page left" in str(first.reason)
    assert len(failures(records, "free")) == 1  # the others have no input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--phase", "decode"], "expected prefill, chunk:SIZES or decode:K"),
        (["--phase", "decode:400"], "expected at least one more than the 400"),
    ],
)
def test_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--layer", "0", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_side_of_whole_prompts_only(case: Case, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    toml = tmp_path / "toy.toml"
    toml.write_text(
        'reference = "tests.harness.toy:reference"\nproduction = "tests.harness.toy:production"\n'
        'checkpoint = "."\ntokens = [1, 2, 3, 4, 5, 6]\n'
    )
    assert main(["diff", "--case", str(toml), "--phase", "decode:1"]) == 2
    assert "expected a side with steps()" in capsys.readouterr().err
