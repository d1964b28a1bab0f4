"""``--dump``: what is written, and that its script finds the same worst element far away from the repository."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness import repro
from harness.cli import main
from tests.harness import toy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "dump"


def diff(toy_case: str, folder: Path, *options: str) -> int:
    return main(["diff", "--case", toy_case, "--dump", str(folder), *options])


def spoil(stage: str, output: str) -> None:
    """One element of a bf16 or fp32 output is off by more than rounding explains."""

    def fault(outputs: toy.Tensors, inputs: toy.Tensors) -> toy.Tensors:
        wrong = outputs[output].clone()
        wrong[0, 7, ..., 1] += wrong.abs().max()
        return {**outputs, output: wrong}

    toy.FAULTS[stage] = fault


class TestFault:
    def test_the_script_repeats_the_console(
        self, toy_case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        spoil("layers.1.attn", "out")
        assert diff(toy_case, folder, "--json", str(tmp_path / "run.jsonl")) == 1
        out = capsys.readouterr().out
        assert f"dump: layers.1.attn (local); recompute with python {folder / 'repro.py'}" in out
        ratio, at = re.search(
            r"FAIL layers\.1\.attn \(local\): out: ([\d.e+]+) x the margin at (\[.*?\])", out
        ).groups()
        done = subprocess.run(
            [sys.executable, "-I", str(folder / "repro.py")], cwd="/", capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert f"out: FAIL: {ratio} x the margin, at {at}, " in done.stdout
        row = next(
            r
            for r in map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
            if r["kind"] == "comparison" and r["verdict"] == "FAIL"
        )
        assert str(row["worst"]["index"]) == at

    def test_every_witness_is_there(self, toy_case: str, folder: Path) -> None:
        spoil("layers.1.attn", "out")
        assert diff(toy_case, folder) == 1
        files = {path.stem: load_file(path) for path in folder.glob("*.safetensors")}
        assert set(files) == {"inputs", "production", "reference", "oracle", "bound"}
        assert set(files["inputs"]) == {"y", "table"}
        assert files["production"]["out"].dtype == files["reference"]["out"].dtype == torch.bfloat16
        assert files["oracle"]["out"].dtype == files["bound"]["out"].dtype == torch.float64
        assert set(files["bound"]) == {"out", "entropy"}
        assert json.loads((folder / "dump.json").read_text())["stage"] == "layers.1.attn"

    def test_parameters_come_along(self, toy_case: str, folder: Path) -> None:
        spoil("layers.0.proj", "y")
        assert diff(toy_case, folder) == 1
        assert load_file(folder / "params.safetensors")["weight"].shape == (toy.D, toy.D)

    @pytest.mark.parametrize(
        ("stage", "fault", "words"),
        [
            (
                "layers.0.attn",
                lambda o, i: {**o, "visible": ~o["visible"]},
                "visible: FAIL: at [0, 0, 0], 576 elements",
            ),
            ("layers.0.router", lambda o, i: {**o, "picks": (o["picks"] + 1) % toy.E}, "picks: FAIL: "),
            ("layers.0.proj", lambda o, i: {"y": o["y"] * torch.nan}, "y: FAIL: "),
            ("layers.0.proj", lambda o, i: {"y": o["y"][:, :3]}, "y: FAIL: shape [1, 3, 32], expected [1, 24, 32]"),
            ("layers.0.proj", lambda o, i: {}, "y: FAIL: never written"),
            ("layers.0.proj", lambda o, i: 1 / 0, "FAIL: raised ZeroDivisionError"),
        ],
        ids=["exact", "picks", "nan", "shape", "nothing", "raises"],
    )
    def test_other_rules(
        self,
        stage: str,
        fault: object,
        words: str,
        toy_case: str,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        toy.FAULTS[stage] = fault  # type: ignore[assignment]
        assert diff(toy_case, folder) == 1
        capsys.readouterr()
        assert repro.main(folder) == 0
        assert words in capsys.readouterr().out

    def test_a_free_row(self, toy_case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        spoil("layers.1.attn", "out")
        assert diff(toy_case, folder, "--mode", "free") == 1
        assert "dump: layers.1.attn (free)" in capsys.readouterr().out
        assert repro.main(folder) == 0
        assert re.search(r"out: FAIL: at \[0, 7, \d+\], RMS error [\d.]+ x the allowed", capsys.readouterr().out)

    def test_a_changed_tensor_is_noticed(self, toy_case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        spoil("layers.1.attn", "out")
        assert diff(toy_case, folder) == 1
        tensors = load_file(folder / "production.safetensors")
        save_file({**tensors, "out": tensors["out"] * 2}, folder / "production.safetensors")
        assert repro.main(folder) == 1
        assert "recorded otherwise" in capsys.readouterr().out


class TestPass:
    def test_nothing_is_written(self, toy_case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diff(toy_case, folder) == 0
        assert "dump: nothing failed; name a stage with --stage" in capsys.readouterr().out
        assert not folder.exists()

    @pytest.mark.parametrize("stage", ["router", "experts", "head", "embed", "attn", "pre", "table"])
    @pytest.mark.parametrize("mode", ["local", "free"])
    def test_the_named_stage(
        self, stage: str, mode: str, toy_case: str, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert diff(toy_case, folder, "--stage", stage, "--mode", mode) == 0
        capsys.readouterr()
        assert repro.main(folder) == 0
        out = capsys.readouterr().out
        assert re.match(rf"(layers\.0\.)?{stage} \({mode}\)", out)
        assert out.splitlines()[-1] in ("PASS", "SKIPPED")

    def test_a_second_dump_leaves_nothing_of_the_first(self, toy_case: str, folder: Path) -> None:
        assert diff(toy_case, folder, "--stage", "proj") == 0
        assert (folder / "params.safetensors").exists()
        assert diff(toy_case, folder, "--stage", "attn") == 0
        assert not (folder / "params.safetensors").exists()


def test_the_weights_audit(toy_case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong weight that local rows do not show: the stage's row is dumped all the same."""

    def tweak(stages: list[toy.ToyStage]) -> list[toy.ToyStage]:
        class Lying(toy.ToyStage):
            def decoded(self) -> toy.Tensors:
                return {name: p * 2 for name, p in super().decoded().items()}

        return [Lying(**vars(s)) if s.name == "layers.1.proj" else s for s in stages]

    toy.TWEAKS["production"] = tweak
    assert diff(toy_case, folder) == 1
    assert "dump: layers.1.proj (local)" in capsys.readouterr().out
    assert repro.main(folder) == 0


@pytest.mark.slow
def test_the_real_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A transposed comb, as a reader would plant it."""
    (tmp_path / "mine.py").write_text(
        "def hc(stage, **inputs):\n    out = stage.run(**inputs)\n    return {**out, 'comb': out['comb'].mT.clone()}\n"
    )
    argv = ["diff", "--case", "short", "--layer", "2", "--mode", "local", "--dump", str(folder)]
    assert main([*argv, "--replace", f"layers.2.attn_hc={tmp_path / 'mine.py'}:hc"]) == 1
    out = capsys.readouterr().out
    ratio, at = re.search(
        r"FAIL layers\.2\.attn_hc \(local\): comb: ([\d.e+]+) x the margin at (\[.*?\])", out
    ).groups()
    assert repro.main(folder) == 0
    assert f"comb: FAIL: {ratio} x the margin, at {at}, " in capsys.readouterr().out
