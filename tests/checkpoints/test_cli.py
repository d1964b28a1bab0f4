"""The command: exit codes, JSON, and that parsing alone imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cases.checkpoints.layout import LAYOUTS
from harness.cli import main
from tests.checkpoints.conftest import Made, patch

ROOT = Path(__file__).parents[2]


def test_make_inspect_verify_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    words = ["--config", "tiny", "--layers", "0,2", "--experts", "2", "--seed", "5", "--shard-mb", "1", "--mtp"]
    words += ["--fp8-scales", "f32"]
    assert main(["checkpoint", "make", one, "--layout", "deepseek", *words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["layers"], made["experts"], made["layout"]) == (2, 2, "deepseek")
    assert main(["checkpoint", "inspect", one, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"] == "deepseek"
    assert found["layers"] == [
        "sliding_attention, hash router",
        "compressed_sparse_attention, scored router",
    ]
    assert (
        sum(family["bytes"] if "bytes" in family else family["nbytes"] for family in found["families"]) == made["bytes"]
    )
    assert found["problems"] == []
    assert main(["checkpoint", "verify", one]) == 0
    assert "no findings" in capsys.readouterr().out
    assert main(["checkpoint", "convert", one, two, "--layout", "compressed-tensors"]) == 0
    text = capsys.readouterr().out
    assert "mtp.* dropped" in text
    assert "routed experts: mxfp4 -> nvfp4-ct: exact (12 tensors)" in text
    assert main(["checkpoint", "verify", two, "--json"]) == 1  # input scales are 1.0: the source had none
    report = json.loads(capsys.readouterr().out)
    assert {finding["kind"] for finding in report["findings"]} == {"input scale 1.0"}
    assert (tmp_path / "two" / "tokenizer.json").is_file()
    for command in (["inspect", two], ["verify", two, "--headers"]):
        assert main(["checkpoint", *command]) == 0
    assert "compressed-tensors" in capsys.readouterr().out


def test_findings_are_lines_with_effects(copy: Made, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy("deepseek")
    patch(folder, "layers.1.attn.attn_sink", lambda t: t * 0)
    assert main(["checkpoint", "verify", str(folder)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("all zero: layers.1.attn.attn_sink: expected trained values, came 4 zeros. Effect: without")
    assert last.endswith("1 finding")


def test_the_bundled_checkpoint_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(ROOT / "cases" / "tiny")]) == 0, capsys.readouterr().out


def test_help_shows_choices_without_torch() -> None:
    script = (
        "import sys; from harness.cli import main; code = main(['checkpoint', 'make', '--help']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "{tiny,flash,pro}" in done.stdout
    assert "{" + ",".join(LAYOUTS) + "}" in done.stdout
