"""``--isolate``: every production stage in a process of its own, so that one that dies takes nothing else with it.

A kernel that writes out of bounds, or compiles before a context exists, leaves the CUDA context unusable for whatever
runs after it in the same process. Here a process serves one stage once; the next is started while it works, so most of
its start is hidden. Inputs and results travel as files.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

import torch
from torch import Tensor

from harness.case import Case
from harness.execute import Outcome, Way
from harness.types import UsageError

AHEAD = 1  # processes that load production while another one works
#: what a process is asked and what it answers, as files of its folder
ASKED, ANSWERED = "asked.pt", "answered.pt"


class Worker(NamedTuple):
    """A process that has loaded production, or is about to."""

    process: subprocess.Popen[str]
    words: IO[str]  # what it says on standard error


class Isolation:
    """Runs production stages, each in a fresh process. Use it as a context: waiting processes end with it."""

    def __init__(self, case: Case, backend: Sequence[str]) -> None:
        side = {"production": case.production, "checkpoint": str(case.checkpoint), "dtype": case.dtype}
        self._side = json.dumps({**side, "backend": list(backend)})
        self._waiting: deque[Worker] = deque()

    def __enter__(self) -> Isolation:
        self._fill()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._waiting:
            process, words = self._waiting.popleft()
            process.kill()
            process.communicate()
            words.close()

    def run(self, way: Way, wires: Mapping[str, Tensor], replay: Mapping[str, Tensor] | None) -> Outcome:
        """What the stage of ``way`` returns on ``wires``; the end of its process is an outcome with an error."""
        self._fill()
        process, words = self._waiting.popleft()
        self._fill()
        inputs = {wire: wires[wire] for wire in way.stage.inputs.values() if wire in wires}
        asked = {"stage": way.stage.name, "direct": way.direct, "target": way.target if way.function else ""}
        with words, tempfile.TemporaryDirectory(prefix="harness-stage-") as folder:
            torch.save({**asked, "wires": inputs, "replay": dict(replay or {})}, Path(folder, ASKED))
            process.communicate(folder)
            answer = Path(folder, ANSWERED)
            if process.returncode or not answer.is_file():
                return Outcome(error=_death(process.returncode, words))
            found = torch.load(answer, weights_only=True)
        if found["usage"]:
            raise UsageError(found["usage"])
        return Outcome(found["outputs"], found["error"])

    def _fill(self) -> None:
        while len(self._waiting) < AHEAD:
            words = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (kept by the worker)
            command = [sys.executable, "-m", "harness.isolated", self._side]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=words, text=True
            )
            self._waiting.append(Worker(process, words))


def _death(code: int, words: IO[str]) -> str:
    """How a process ended, and its last words."""
    words.seek(0)
    lines = [line.strip() for line in words.read().splitlines() if line.strip()]
    how = f"exit code {code}"
    if code < 0:
        how = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"took its process down ({how})" + (f": {lines[-1][:300]}" if lines else "")
