"""``make bench``: measure, print a table, write reports/bench/cpu.json and the README's table.

The exit code is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from importlib.metadata import version
from typing import Any

from benchmarks import table
from benchmarks.measure import ROOT, Sample, alternate, median, ratio

OUT = table.STORED


def figure(value: float, limit: float, meaning: str) -> dict[str, Any]:
    return {"value": round(value, 4), "limit": limit, "ok": value <= limit, "meaning": meaning}


def said(samples: list[Sample], name: str) -> float:
    """Median of what the processes printed under a name."""
    return float(statistics.median(sample.said[name] for sample in samples if sample.said))


def share(samples: list[Sample]) -> float:
    """Records and page over all CPU seconds of the run."""
    return (said(samples, "records") + said(samples, "page")) / said(samples, "total")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command")
    rounds = parser.parse_args().rounds
    found = alternate({"diff": ["harness", "diff", "--layer", "2"], "baseline": ["benchmarks.baseline"]}, rounds)
    found |= alternate({"all": ["harness", "diff", "--layer", "all"]}, max(1, rounds // 2), warm=False)
    found |= alternate({"views": ["benchmarks.views", "2"], "views_all": ["benchmarks.views", "all"]}, 1, warm=False)
    found |= alternate({"taps": ["benchmarks.taps"]}, 1, warm=False)
    found |= alternate({"decode": ["benchmarks.decode"]}, 1, warm=False)
    diff, base = found["diff"], found["baseline"]
    bare = [s.cpu - s.said["load"] for s in base if s.said]
    taps = found["taps"][0].said or {}
    off, noise = taps["taps off over plain"], taps["noise (half the interquartile range)"]
    figures = {
        "layer 2, CPU": figure(
            ratio(diff, base, "cpu"), 1.5, "harness diff --layer 2 over imports, loading, 3 forwards"
        ),
        "layer 2, wall": figure(ratio(diff, base, "wall"), 1.5, "the same in wall time"),
        "layer 2, CPU, strict": figure(
            statistics.median(s.cpu / b for s, b in zip(diff, bare, strict=True)), 1.5, "the same without loading below"
        ),
        "all layers, seconds": figure(median(found["all"], "wall"), 30, "wall seconds of harness diff --layer all"),
        "all layers, CPU over 2 cores": figure(median(found["all"], "cpu") / 2, 30, "its CPU seconds over two cores"),
        "peak memory, GB": figure(median(found["all"], "peak") / 1e9, 1.5, "peak resident memory of --layer all"),
        "taps off": figure(off, 1 + max(noise, 0.02), "forward with taps off over one without tap calls; limit: noise"),
        "records and page": figure(share(found["views"]), 0.1, "their share of the CPU seconds of --layer 2"),
        "records and page, all": figure(
            share(found["views_all"]), 0.1, "their share of the CPU seconds of --layer all"
        ),
        "decode over Hugging Face": figure(
            said(found["decode"], "step over hugging face"), 1.0, "CPU time of a decode step, batch 1, over HF's own"
        ),
        "cache bytes over formula": figure(
            said(found["decode"], "bytes over formula"), 1.05, "what a sequence of 256 to 4096 tokens keeps"
        ),
        "decode, no copy": figure(
            said(found["decode"], "rest, longest over shortest"),
            1.15,
            "a step at 4096 over 256, readers of caches aside",
        ),
    }
    print(f"{'figure':30} {'value':>8} {'limit':>8}")
    for name, f in figures.items():
        print(f"{name:30} {f['value']:8.3f} {f['limit']:8.3f}  {'' if f['ok'] else 'EXCEEDED  '}{f['meaning']}")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
    }
    samples = {name: [s.plain() for s in each] for name, each in found.items()}
    OUT.write_text(json.dumps({"figures": figures, "machine": machine, "samples": samples}, indent=1) + "\n")
    table.main()
    print(f"written to {OUT.relative_to(ROOT)} and README.md", file=sys.stderr)
    return 0 if all(f["ok"] for f in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
