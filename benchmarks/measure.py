"""One command in a process of its own: wall time, CPU time and peak memory; several of them in turn."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Sample:
    """What the kernel says of one finished process, and what it printed as JSON on its last line, if anything."""

    wall: float  # seconds
    cpu: float  # user + system: hardly depends on what else the machine does
    peak: int  # bytes
    code: int
    said: Mapping[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def run(words: Sequence[str]) -> Sample:
    """Run ``python -m <words>`` from the repository root and wait for it."""
    read, write = os.pipe()
    start = time.perf_counter()
    argv = [sys.executable, "-m", *words]
    actions = [(os.POSIX_SPAWN_DUP2, write, 1), (os.POSIX_SPAWN_CLOSE, read), (os.POSIX_SPAWN_CLOSE, write)]
    process = os.posix_spawn(sys.executable, argv, {**os.environ, "PYTHONPATH": str(ROOT)}, file_actions=actions)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status, used = os.wait4(process, 0)
    wall = time.perf_counter() - start
    last = text.strip().splitlines()[-1] if text.strip() else ""
    said = json.loads(last) if last.startswith("{") else None
    return Sample(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, os.waitstatus_to_exitcode(status), said)


def alternate(commands: Mapping[str, Sequence[str]], rounds: int, warm: bool = True) -> dict[str, list[Sample]]:
    """A B A B ...: what slows the machine down meets all alike. ``warm``: one round before does not count."""
    found: dict[str, list[Sample]] = {name: [] for name in commands}
    for turn in range(0 if warm else 1, rounds + 1):
        for name, words in commands.items():
            sample = run(words)
            if sample.code != 0:
                raise SystemExit(f"benchmark {name}: {' '.join(words)} ended with exit code {sample.code}")
            if turn:
                found[name].append(sample)
            print(f"  {name} {turn or 'warm-up'}: {sample.wall:.1f} s, {sample.cpu:.1f} s CPU", file=sys.stderr)
    return found


def median(samples: Sequence[Sample], name: str) -> float:
    """The median of one figure."""
    return float(statistics.median(getattr(sample, name) for sample in samples))


def ratio(a: Sequence[Sample], b: Sequence[Sample], name: str) -> float:
    """Median of the ratios of neighbours: each pair met the same machine."""
    return float(statistics.median(getattr(x, name) / getattr(y, name) for x, y in zip(a, b, strict=True)))
