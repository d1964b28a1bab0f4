"""Decode with caches: production's session against Hugging Face's own cache, on the bundled checkpoint, one process.

Prints ratios and writes them as JSON; nothing is asserted, because a time is only worth something beside another one of
the same run. Both sides alternate step by step, so that a busy machine slows both.

    python -m benchmarks.decode [--checkpoint DIR] [--json reports/bench_decode.json] [--threads 1] [--steps 60]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from production.build import Model, model
from production.session import Session

LENGTHS = (256, 1024, 4096)


def seconds(run: Callable[[], object]) -> float:
    """CPU time of one call: other processes do not count."""
    start = time.process_time()
    run()
    return time.process_time() - start


def tokens(count: int, vocabulary: int) -> torch.Tensor:
    """Ids of a text that never repeats a window."""
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(7))


def against_hugging_face(m: Model, checkpoint: Path, prompt: int, steps: int, experts: str) -> dict[str, float]:
    """Median CPU time of one decode step on both sides, after a prompt of this length."""
    import reference.build
    from reference import hf

    net = reference.build.model(checkpoint).net
    net.model.config._experts_implementation = experts
    ids = tokens(prompt + steps + 3, m.config.vocab_size)
    session, cache = Session(m, tokens=len(ids)), hf.dynamic_cache(net.model.config)

    def theirs(first: int, last: int) -> None:
        with torch.no_grad():
            positions = torch.arange(first, last).unsqueeze(0)
            use = hf.cache_argument(net.model, cache)
            net.model(input_ids=ids[first:last].unsqueeze(0), position_ids=positions, logits_to_keep=1, **use)

    def mine(first: int, last: int) -> None:
        session.feed([ids[first:last]], last=True)

    for each in (mine, theirs):
        each(0, prompt)
    times: dict[str, list[float]] = {"production": [], "hugging face": []}
    for step in range(prompt, prompt + steps + 3):
        for name, run in (("production", mine), ("hugging face", theirs)):
            took = seconds(lambda run=run, step=step: run(step, step + 1))
            if step >= prompt + 3:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def by_length(m: Model, steps: int) -> list[dict[str, float]]:
    """Step time, cache bytes and the formula at several lengths of one sequence."""
    ids = tokens(max(LENGTHS) + steps, m.config.vocab_size)
    session, found = Session(m, tokens=len(ids)), []
    for length in LENGTHS:
        while session.lengths[0] < length:
            at = session.lengths[0]
            session.feed([ids[at : min(length, at + 256)]], last=True)
        kept, formula = session.sequences[0].bytes, session.layout.bytes(length)
        took = []
        for step in range(length, length + steps):
            took.append(seconds(lambda step=step: session.feed([ids[step : step + 1]], last=True)))
        found.append(
            {"tokens": length, "step": statistics.median(took), "cache bytes": kept, "formula bytes": formula}
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--checkpoint", type=Path, default=Path("cases/tiny"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)
    m = model(args.checkpoint)
    found: dict[str, Any] = {
        "machine": f"{platform.machine()}, {args.threads} thread(s), torch {torch.__version__}",
        "step at 300 tokens": {
            experts: against_hugging_face(m, args.checkpoint, 300, args.steps, experts)
            for experts in ("eager", "grouped_mm")
        },
        "by length": by_length(m, args.steps),
    }
    print(f"decode, batch 1, {args.checkpoint}, {found['machine']}: CPU time of a step, median of {args.steps}")
    for experts, pair in found["step at 300 tokens"].items():
        ratio = pair["hugging face"] / pair["production"]
        print(f"  production decodes {ratio:.2f} x the tokens per second of Hugging Face ({experts} experts)")
    first = found["by length"][0]["step"]
    for row in found["by length"]:
        print(
            f"  {row['tokens']:>5} tokens: cache {row['cache bytes'] / row['formula bytes']:.3f} x the formula "
            f"({row['cache bytes'] / 2**20:.2f} MiB), step {row['step'] / first:.2f} x that at {LENGTHS[0]}"
        )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
