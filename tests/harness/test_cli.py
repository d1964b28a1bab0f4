"""The command line, through ``main`` and once through the real command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import jsonl
from harness.cli import main
from harness.records import Summary, Verdict
from tests.harness import toy

ROOT = Path(__file__).parents[2]


class TestDiff:
    def test_pass(self, toy_case: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["diff", "--case", toy_case]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "toy: 1 x 24 tokens, layers 0,1, native"
        assert re.match(r"layers\.0\.proj +PASS +0\.\d+ +0\.\d+ +PASS +0\.\d+ +y$", lines[5])
        assert lines[-1] == "PASS 15 stages (30 rows compared)"

    def test_a_fault_and_all_views(self, toy_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        toy.FAULTS["layers.1.attn"] = lambda outputs, inputs: {**outputs, "out": outputs["out"] * 1.5}
        files = {name: tmp_path / f"run.{name}" for name in ("json", "html", "junit")}
        options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
        assert main(["diff", "--case", toy_case, "--layer", "1", *options]) == 1
        out = capsys.readouterr().out
        line = r"^FIRST FAULT: layers\.1\.attn \(local, [\d.]+ × margin\): one factor of 1\.5 \(suspected, explains 9"
        assert re.search(line, out.splitlines()[-1])
        assert "FAIL layers.1.attn (local): out: " in out
        records = jsonl.read(files["json"])
        assert isinstance(records[-1], Summary)
        assert records[-1].line == out.splitlines()[-1]
        assert "layers.1.attn" in files["html"].read_text()
        suite = ElementTree.parse(files["junit"]).getroot()[0]
        failed = [c.get("name") for c in suite if c.find("failure") is not None]
        assert failed[0] == "layers.1.attn-local"
        assert int(suite.get("failures", "0")) == len(failed)

    @pytest.mark.parametrize(("wanted", "diagnosed"), [("first", 1), ("all", 2), ("none", 0)])
    def test_what_is_diagnosed(
        self, toy_case: str, tmp_path: Path, wanted: str, diagnosed: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for stage in ("layers.0.proj", "layers.1.attn"):
            toy.FAULTS[stage] = lambda outputs, inputs: {n: 1.5 * t for n, t in outputs.items()}
        path = tmp_path / "run.jsonl"
        assert main(["diff", "--case", toy_case, "--mode", "local", "--diagnose", wanted, "--json", str(path)]) == 1
        lines = path.read_text(encoding="utf-8").splitlines()
        assert sum('"causes":[{' in line.replace(" ", "") for line in lines) == diagnosed
        assert ("suspected" in capsys.readouterr().out.splitlines()[-1]) == bool(diagnosed)

    def test_report_shows_the_same_again(
        self, toy_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "run.jsonl"
        main(["diff", "--case", toy_case, "--json", str(path)])
        before = capsys.readouterr().out
        assert main(["report", str(path), "--junit", str(tmp_path / "x.xml"), "--html", str(tmp_path / "x.html")]) == 0
        after = capsys.readouterr().out
        assert [x for x in after.splitlines() if not x.startswith("page: ")][:-2] == before.splitlines()[:-2]
        assert after.splitlines()[-1] == before.splitlines()[-1]

    def test_marks(self, toy_case: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["diff", "--case", toy_case, "--layer", "0", "--bypass", "layers.0.attn=reference"]) == 0
        assert "[bypass reference]" in capsys.readouterr().out
        assert main(["diff", "--case", toy_case, "--direct-residual"]) == 0
        out = capsys.readouterr().out
        assert "[bypass direct]" in out
        assert out.startswith("toy: 1 x 24 tokens, layers 0,1, native, direct residual")

    def test_mode_stage_and_overrides(self, toy_case: str, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        options = ["--mode", "local", "--stage", "proj", "--tokens", "1,2,3", "--length", "40", "--batch", "2"]
        assert main(["diff", "--case", toy_case, *options, "--json", str(path)]) == 0
        config = json.loads(path.read_text().splitlines()[0])
        assert (config["length"], config["batch"], config["planned"]) == (40, 2, 2)
        rows = [r for r in map(json.loads, path.read_text().splitlines()) if r["kind"] == "comparison"]
        assert rows[0]["reproduce"].startswith(f"harness diff --case {toy_case} --tokens 1,2,3 --length 40 --batch 2 ")

    def test_not_certified(self, toy_case: str, capsys: pytest.CaptureFixture[str]) -> None:
        toy.TWEAKS["certify"] = False
        assert main(["diff", "--case", toy_case]) == 3
        assert capsys.readouterr().out.splitlines()[-1].startswith("INVALID: the reference is not the unmodified model")

    def test_bad_input_in_the_middle_keeps_the_records(
        self, toy_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "f.py").write_text("def fn(stage, x):\n    raise ValueError('no')\n")
        path = tmp_path / "run.jsonl"
        options = ["--replace", f"layers.1.proj={tmp_path / 'f.py'}:fn", "--json", str(path)]
        assert main(["diff", "--case", toy_case, *options]) == 2
        assert "the function raised ValueError: no" in capsys.readouterr().err
        last = jsonl.read(path)[-1]
        assert isinstance(last, Summary)
        assert (last.exit_code, last.verdict) == (2, Verdict.INVALID)


WRONG = {
    "no command": ([], "arguments are required"),
    "unknown command": (["dif"], "invalid choice"),
    "unknown option": (["diff", "--lay", "2"], "unrecognized arguments"),
    "layer out of range": (["diff", "--layer", "7"], "there is no layer 7; layers are 0-1"),
    "layer no number": (["diff", "--layer", "two"], "expected N, A-B, a,b or all, got 'two'"),
    "unknown stage": (["diff", "--stage", "layers.1.porj"], "did you mean 'layers.1.proj'?"),
    "bypass nothing": (["diff", "--bypass", "nope=reference"], "matches no stage"),
    "bypass what": (["diff", "--bypass", "proj=oracle"], "expected production, reference or direct"),
    "replace nothing": (["diff", "--replace", "nope=x.py:f"], "no file 'x.py'"),
    "length 0": (["diff", "--length", "0"], "--length: expected a whole number of at least 1, got '0'"),
    "batch no number": (["diff", "--batch", "x"], "--batch: expected a whole number"),
    "tokens no number": (["diff", "--tokens", "1,x"], "--tokens: expected ids of 0 and up"),
    "tokens empty": (["diff", "--tokens", " "], "--tokens is empty"),
    "prompt and tokens": (["diff", "--tokens", "1", "--prompt", "a"], "not allowed with"),
    "prompt without tokenizer": (["diff", "--prompt", "lamp"], "has no tokenizer.json"),
    "prompt empty": (["diff", "--prompt", ""], "the prompt is empty"),
    "folder missing": (["diff", "--json", "/nowhere/x.jsonl"], "the folder '/nowhere' does not exist"),
    "html is a folder": (["diff", "--html", "/tmp"], "is a folder"),
    "junit folder missing": (["diff", "--junit", "/nowhere/x.xml"], "does not exist"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_line_and_exit_2(name: str, toy_case: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv, words = WRONG[name]
    argv = [*argv, "--case", toy_case] if argv[:1] == ["diff"] else argv
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert err.count("\n") == 1
    assert err.startswith("harness: ")
    assert not out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["diff", "--case", "nope"], "the bundled cases are"),
        (["diff", "--checkpoint", "/nowhere"], "expected a folder with config.json"),
        (["report", "/nowhere.jsonl"], "cannot read"),
        (["list", "stages", "--case", "/"], "no such file"),
    ],
)
def test_bad_files(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert words in capsys.readouterr().err


class TestList:
    def test_stages(self, toy_case: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["list", "stages", "--case", toy_case, "--layer", "1"]) == 0
        out = capsys.readouterr().out
        assert "layers.1.router" in out
        assert "layers.0" not in out.replace("layers.0.post.streams", "")
        assert re.search(r"out  picks +\[B,S,k\] int64  picks", out)
        assert main(["list", "stages", "--case", toy_case, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert len(found) == 15
        assert found[3]["params"] == {"weight": {"shape": [32, 32], "dtype": "bfloat16"}}

    def test_cases_and_components(self, toy_case: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["list", "cases"]) == 0
        assert re.search(r"^tiny +331 tokens", capsys.readouterr().out, re.M)
        assert main(["list", "components", "--case", toy_case]) == 0
        assert "tests.harness.toy:ToyStage" in capsys.readouterr().out

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--help"]) == 0
        assert main(["diff", "--help"]) == 0
        assert "exit codes" in capsys.readouterr().out
        assert main(["--version"]) == 0


PIECES = [
    "diff",
    "list",
    "report",
    "stages",
    "cases",
    "--layer",
    "--stage",
    "--bypass",
    "--replace",
    "--tokens",
    "0",
    "1",
]
PIECES += [
    "all",
    "proj",
    "proj=reference",
    "proj=direct",
    "pre=direct",
    "proj=x.py:f",
    "--json",
    "/nowhere/x",
    "--mode",
]
PIECES += [
    "local",
    "free",
    "--length",
    "3",
    "-1",
    "",
    "--batch",
    "--dtype",
    "fp32",
    "--direct-residual",
    "1,2",
    "*",
    "=",
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(PIECES), max_size=7))
def test_no_arguments_end_in_a_traceback(toy_case: str, argv: list[str]) -> None:
    assert main([*argv[:1], "--case", toy_case, *argv[1:]]) in (0, 1, 2, 3)


def command(*argv: str, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "harness", *argv], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def test_the_real_command(toy_case: str) -> None:
    out, err = command("diff", "--case", toy_case, "--layer", "9").communicate(timeout=120)
    assert (out, err) == ("", "harness: --layer '9': there is no layer 9; layers are 0-1\n")


def test_usage_errors_do_not_import_torch(toy_case: str) -> None:
    code = "import sys; from harness.cli import main; main(['diff', '--length', '0']); main(['list', 'cases'])"
    code += "; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_keeps_the_records(toy_case: str, tmp_path: Path, number: int) -> None:
    path = tmp_path / "run.jsonl"
    process = command("diff", "--case", toy_case, "--length", "700", "--batch", "4", "--json", str(path))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not path.exists() or path.read_text().count('"comparison"') < 3):
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (3, "")
    assert out.splitlines()[-1] == "INVALID: interrupted"
    last = jsonl.read(path)[-1]
    assert isinstance(last, Summary)
    assert last.interrupted
