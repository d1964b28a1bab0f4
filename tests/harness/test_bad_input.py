"""Bad input through the real command line: one clear line, exit 2, no traceback, nothing lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness import case as cases
from harness import jsonl
from harness.cli import main
from harness.records import Comparison, Summary
from tests.harness import toy
from tests.harness.conftest import refused

ROOT = Path(__file__).parents[2]
TINY = ROOT / "cases" / "tiny"


class TestGlobs:
    @pytest.mark.parametrize("option", ["--stage", "--bypass", "--replace"])
    @pytest.mark.parametrize(
        ("glob", "words"),
        [
            ("layers.1.porj", "did you mean 'layers.1.proj'?"),
            ("nothing*", "matches no stage; see harness list stages"),
            ("layers.0.*", "matches only stages that this run leaves out"),
        ],
    )
    def test_matches_nothing(
        self, option: str, glob: str, words: str, toy_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "f.py").write_text("def f(stage, **inputs): return stage.run(**inputs)\n")
        value = {"--stage": "", "--bypass": "=reference", "--replace": f"={tmp_path / 'f.py'}:f"}[option]
        line = refused(capsys, "diff", "--case", toy_case, "--layer", "1", option, glob + value)
        assert f"{option} {glob!r}" in line
        assert words in line


class TestReplacement:
    @pytest.mark.parametrize(
        ("source", "target", "words"),
        [
            (None, "f.py:f", "there is no file"),
            ("", "f.py:f", "no function 'f' in it; it has none"),
            ("def g(): pass", "f.py:f", "it has g"),
            ("import nonsense_here", "f.py:f", "loading raised ModuleNotFoundError"),
            ("def f(:", "f.py:f", "loading raised SyntaxError"),
            ("raise SystemExit(0)", "f.py:f", "loading raised SystemExit"),
            ("f = 3", "f.py:f", "no function 'f'"),
            ("x", "f.txt:f", "is not a Python file"),
            ("x", "f.py", "expected path.py:function"),
            ("x", "f.py:", "expected path.py:function"),
        ],
    )
    def test_cannot_be_loaded(
        self,
        source: str | None,
        target: str,
        words: str,
        toy_case: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        if source is not None:
            (tmp_path / target.partition(":")[0]).write_text(source)
        assert words in refused(capsys, "diff", "--case", toy_case, "--replace", f"layers.1.proj={tmp_path / target}")

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ("raise ValueError('two\\nlines')", "the function raised ValueError: two lines"),
            ("raise SystemExit(3)", "the function raised SystemExit: 3"),
            ("return None", "expected a dict by output name, got NoneType"),
            ("return {}", "expected the outputs y; missing or unknown: y"),
            ("return {'z': stage.run(x=x)['y']}", "expected the outputs y; missing or unknown: y"),
            ("return {'y': 1.5}", "output 'y' is float, expected a tensor"),
        ],
    )
    def test_goes_wrong_in_the_run(
        self, body: str, words: str, toy_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The records so far stay, and every view is written from them."""
        (tmp_path / "f.py").write_text(f"def f(stage, x):\n    {body}\n")
        files = {name: tmp_path / f"run.{name}" for name in ("json", "html", "junit")}
        options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
        target = f"layers.1.proj={tmp_path / 'f.py'}:f"
        assert main(["diff", "--case", toy_case, "--replace", target, *options]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert words in err
        records = jsonl.read(files["json"])
        assert isinstance(records[-1], Summary)
        assert words in (records[-1].reason or "")
        assert sum(isinstance(r, Comparison) for r in records) > 10
        assert "INVALID" in files["html"].read_text()
        assert "<error" in files["junit"].read_text()

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ("return {'y': stage.run(x=x)['y'][:, :2]}", "shape [1, 2, 32], expected [1, 24, 32]"),
            ("return {'y': stage.run(x=x)['y'].double()}", "dtype fp64, its own declaration says bf16"),
        ],
    )
    def test_a_wrong_tensor_is_a_finding(
        self, body: str, words: str, toy_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "f.py").write_text(f"def f(stage, x):\n    {body}\n")
        assert main(["diff", "--case", toy_case, "--replace", f"layers.1.proj={tmp_path / 'f.py'}:f"]) == 1
        assert words in capsys.readouterr().out


class TestInputs:
    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            (["--tokens", "3,64"], "token id 64 is out of range; the vocabulary has ids 0 to 63"),
            (["--tokens", "3,-1"], "expected ids of 0 and up"),
            (["--tokens", "99999999999999999999"], "expected ids of 0 and up"),
            (["--prompt", ""], "the prompt is empty; expected at least one word"),
            (["--prompt", " \t\n"], "the prompt is empty"),
            (["--prompt", "lamp zeppelin"], "does not know the word 'zeppelin'"),
            (["--length", "0"], "--length: expected a whole number of at least 1, got '0'"),
            (["--length", "-4"], "--length"),
            (["--length", "1.5"], "--length"),
            (["--batch", "0"], "--batch"),
            (["--layer", "x"], "expected N, A-B, a,b or all, got 'x'"),
            (["--layer", "99"], "there is no layer 99; layers are 0-5"),
            (["--layer", "2-1"], "2 comes after 1; write 1-2"),
            (["--layer", ""], "expected N, A-B, a,b or all, got ''"),
            (["--layer", "1-"], "expected N, A-B, a,b or all"),
            (["--mode", "both", "--dtype", "fp8"], "invalid choice"),
        ],
    )
    def test_refused(self, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert words in refused(capsys, "diff", *argv)


class TestFiles:
    @pytest.mark.parametrize("option", ["--json", "--html", "--junit", "--step-summary", "--dump"])
    def test_folder_that_does_not_exist(
        self, option: str, toy_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        line = refused(capsys, "diff", "--case", toy_case, option, str(tmp_path / "none" / "x"))
        assert f"{option} {tmp_path / 'none' / 'x'}: the folder '{tmp_path / 'none'}' does not exist" in line

    @pytest.mark.parametrize("option", ["--json", "--html", "--junit", "--step-summary", "--dump"])
    def test_not_writable(
        self,
        option: str,
        toy_case: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # a superuser may write anywhere
        assert "permission denied" in refused(capsys, "diff", "--case", toy_case, option, str(tmp_path / "x"))

    @pytest.mark.parametrize("option", ["--json", "--html", "--junit", "--step-summary"])
    def test_a_folder_for_a_file(
        self, option: str, toy_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "is a folder; name a file in it" in refused(capsys, "diff", "--case", toy_case, option, str(tmp_path))

    def test_a_file_for_a_folder(self, toy_case: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert "is a file; name a folder" in refused(capsys, "diff", "--case", toy_case, "--dump", toy_case)

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
    @pytest.mark.parametrize("option", ["--json", "--html", "--junit", "--step-summary"])
    def test_no_space(self, option: str, toy_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """What can be written is."""
        other = "--junit" if option != "--junit" else "--json"
        target = tmp_path / "other"
        assert main(["diff", "--case", toy_case, option, "/dev/full", other, str(target)]) == 2
        err = capsys.readouterr().err
        assert "cannot write /dev/full: No space left on device" in err
        assert err.count("\n") == 1
        assert target.stat().st_size > 0

    def test_no_space_for_a_dump(
        self, toy_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(self: Path, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        argv = ["diff", "--case", toy_case, "--stage", "proj", "--dump", str(tmp_path / "d")]
        assert main([*argv, "--json", str(tmp_path / "run.jsonl")]) == 2
        out, err = capsys.readouterr()
        assert "--dump: cannot write to" in err
        assert out.splitlines()[-1].startswith("PASS")
        assert isinstance(jsonl.read(tmp_path / "run.jsonl")[-1], Summary)

    def test_a_full_disk_in_the_middle_keeps_the_records(
        self, toy_case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, real, count = tmp_path / "run.jsonl", jsonl.encode, 0

        def encode(record: Any) -> str:
            nonlocal count
            count += 1
            if count > 30:
                raise OSError(28, "No space left on device")
            return real(record)

        monkeypatch.setattr(jsonl, "encode", encode)
        assert main(["diff", "--case", toy_case, "--json", str(path)]) == 2
        assert "No space left on device; free some space" in capsys.readouterr().err
        monkeypatch.undo()
        assert main(["report", str(path), "--html", str(tmp_path / "x.html")]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "INVALID: interrupted"


class TestCaseFiles:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("promt = 'x'", ["unknown key 'promt'", "valid keys are name, description, reference", "x.toml"]),
            ("[[declared]]\nstge = 'x'", ["unknown key 'stge'", "valid keys are stage, output, reason, floor"]),
            ("length = '3'", ["length should be int, got '3'"]),
            ("length = 0", ["expected a length of at least 1"]),
            ("batch = true", ["batch should be int"]),
            ("prompt = 'a'\ntokens = [1]", ["expected one of prompt, tokens, text"]),
            ("name = ", ["expected a TOML case file"]),
            ("reference = 'nowhere.build:model'", ["cannot be imported"]),
            ("reference = 'model'", ["expected package.module:builder"]),
            ("text = 'missing.txt'", ["cannot be read"]),
            ("tokens = []", ["expected at least one token"]),
            ("layers = 'none'", ["expected N, A-B, a,b or all"]),
        ],
    )
    def test_refused(self, text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "x.toml"
        sides = f'production = "{toy.__name__}:production"\n'
        if not text.startswith("reference"):
            sides += f'reference = "{toy.__name__}:reference"\n'
        path.write_text(f'checkpoint = "."\n{sides}{text}\n')
        line = refused(capsys, "diff", "--case", str(path))
        for word in words:
            assert word in line

    def test_no_checkpoint(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "x.toml").write_text("seed = 1\n")
        assert "the key 'checkpoint' is missing" in refused(capsys, "diff", "--case", str(tmp_path / "x.toml"))


class TestRecords:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "is not a record file"),
            ("hello\n", "is not a record"),
            ("{}\n", "expected a kind among"),
            ("[]\n", "expected a kind among"),
            ('{"kind": "summary"}\n', "is not a summary record"),
            ('{"kind": "config", "command": NaN}\n', "NaN is not strict JSON"),
            ("[" * 100_000 + "\n", "is not a record"),
        ],
    )
    @pytest.mark.parametrize("count", [1, 2])
    def test_refused(
        self, text: str, words: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "x.jsonl"
        path.write_text(text)
        line = refused(capsys, "report", *[str(path)] * count)
        assert count == 2 or words in line

    def test_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "cannot read" in refused(capsys, "report", str(tmp_path / "none.jsonl"))
        assert "cannot read" in refused(capsys, "report", "a\0b")
        assert "cannot read" in refused(capsys, "report", str(tmp_path))
        assert "expected one run to show or two to compare, got 3" in refused(capsys, "report", "a", "b", "c")
        assert "show one run" in refused(capsys, "report", "a", "b", "--html", str(tmp_path / "x"))


def test_the_vocabulary_of_the_bundled_case() -> None:
    """The out-of-range test above says 63: the checkpoint's last id."""
    assert json.loads((cases.load("tiny").checkpoint / "config.json").read_text())["vocab_size"] == 64
