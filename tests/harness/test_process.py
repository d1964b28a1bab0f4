"""The command in a process of its own: signals, closed pipes, full disks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness import jsonl
from harness.records import Summary
from tests.harness import toy

ROOT = Path(__file__).parents[2]


def command(*argv: str, **options: Any) -> subprocess.Popen[str]:
    """The real command, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([sys.executable, "-m", "harness", *argv], cwd=ROOT, env=environment, text=True, **pipes)


class TestProcess:
    @pytest.mark.parametrize(
        "argv",
        [
            ["diff", "--layer", "x"],
            ["diff", "--case", "nope"],
            ["report", "/nowhere"],
            ["diff", "--checkpoint", "cases/training"],
        ],
    )
    def test_one_line(self, argv: list[str]) -> None:
        process = command(*argv)
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("harness: ")

    def test_a_reader_that_leaves(self, toy_case: str, tmp_path: Path) -> None:
        """``| head -1`` ends a run that nobody reads, without a word; files that were asked for are still written."""
        for files, code in (([], 3), (["--json", str(tmp_path / "run.jsonl")], 0)):
            process = command("diff", "--case", toy_case, "--length", "300", *files)
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline().startswith("toy: ")
            process.stdout.close()
            assert process.stderr.read() == ""
            assert process.wait(timeout=300) == code
        last = jsonl.read(tmp_path / "run.jsonl")[-1]
        assert isinstance(last, Summary)
        assert last.verdict == "PASS"

    def test_a_reader_that_leaves_a_list(self) -> None:
        process = command("list", "cases")
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 0

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
    def test_a_full_disk_behind_the_output(self, toy_case: str) -> None:
        with open("/dev/full", "w") as full:
            process = command("diff", "--case", toy_case, stdout=full)
            _, err = process.communicate(timeout=300)
        assert process.returncode == 2
        assert err == "harness: cannot write the output: No space left on device; send it elsewhere\n"

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_before_the_first_record(self, number: signal.Signals, toy_case: str) -> None:
        slow = Path(toy_case).with_name("slow_side.py")
        slow.write_text("import time, sys\nprint('here', flush=True)\ntime.sleep(60)\n")
        text = Path(toy_case).read_text().replace(f"{toy.__name__}:reference", "slow_side:model")
        Path(toy_case).write_text(text)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{slow.parent}", "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        argv = [sys.executable, "-m", "harness", "diff", "--case", toy_case]
        process = subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (3, "")
        assert err == "harness: interrupted before anything was compared\n"

    def test_an_impatient_user(self, toy_case: str, tmp_path: Path) -> None:
        """A second Ctrl-C does not cut the summary."""
        path = tmp_path / "run.jsonl"
        process = command("diff", "--case", toy_case, "--length", "700", "--batch", "4", "--json", str(path))
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and (not path.exists() or path.read_text().count('"comparison"') < 3):
            time.sleep(0.02)
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (3, "")
        assert out.splitlines()[-1] == "INVALID: interrupted"
        assert isinstance(jsonl.read(path)[-1], Summary)
