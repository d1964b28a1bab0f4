"""Decoding with caches, batch 1: production's session against Hugging Face's own cache, step by step in turns.

Prints the ratios for a reader (stderr) and as JSON (the last line): the median CPU time of a step on both sides, what a
sequence keeps in bytes against the formula, and how a step grows with the length, attention and the rest apart.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import reference.build
from production.build import Model, model
from production.session import Session
from reference import hf

CHECKPOINT = Path(__file__).parents[1] / "cases" / "tiny"
LENGTHS = (256, 1024, 4096)
PROMPT, STEPS, WARM = 300, 60, 3
#: what reads caches, and so may grow with them
READERS = ("kv_cache", "compressor", "indexer", "attn_core")


def seconds(run: Callable[[], object]) -> float:
    """CPU time of one call: other processes do not count."""
    start = time.process_time()
    run()
    return time.process_time() - start


def tokens(count: int, vocabulary: int) -> torch.Tensor:
    """Ids of a text that never repeats a window."""
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(7))


def against_hugging_face(m: Model, experts: str) -> dict[str, float]:
    """Median CPU time of a step on both sides after a prompt, with one of HF's implementations of the experts."""
    net = reference.build.model(CHECKPOINT).net
    net.model.config._experts_implementation = experts
    ids = tokens(PROMPT + WARM + STEPS, m.config.vocab_size)
    session, cache = Session(m, tokens=len(ids)), hf.dynamic_cache(net.model.config)

    def theirs(first: int, last: int) -> None:
        with torch.no_grad():
            positions, use = torch.arange(first, last).unsqueeze(0), hf.cache_argument(net.model, cache)
            net.model(input_ids=ids[first:last].unsqueeze(0), position_ids=positions, logits_to_keep=1, **use)

    def mine(first: int, last: int) -> None:
        session.feed([ids[first:last]], last=True)

    for each in (mine, theirs):
        each(0, PROMPT)
    times: dict[str, list[float]] = {"production": [], "hugging face": []}
    for step in range(PROMPT, len(ids)):
        for name, run in (("production", mine), ("hugging face", theirs)):
            took = seconds(lambda run=run, step=step: run(step, step + 1))  # type: ignore[misc]
            if step >= PROMPT + WARM:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


class Timed(Session):
    """A session that adds up the CPU time of the stages that read caches."""

    spent = 0.0

    def _quick(self, step: Any, *rest: Any) -> Any:
        if step.stage.name.rpartition(".")[2] not in READERS:
            return super()._quick(step, *rest)
        start = time.process_time()
        found = super()._quick(step, *rest)
        self.spent += time.process_time() - start
        return found


def by_length(m: Model) -> list[dict[str, float]]:
    """Step time and bytes of one sequence at several lengths."""
    ids = tokens(max(LENGTHS) + STEPS, m.config.vocab_size)
    session, found = Timed(m, tokens=len(ids)), []
    for length in LENGTHS:
        while (at := session.lengths[0]) < length:
            session.feed([ids[at : min(length, at + 256)]], last=True)
        kept, formula = session.sequences[0].bytes, session.layout.bytes(length)
        whole, readers = [], []
        for step in range(length, length + STEPS):
            session.spent = 0.0
            whole.append(seconds(lambda step=step: session.feed([ids[step : step + 1]], last=True)))  # type: ignore[misc]
            readers.append(session.spent)
        rest = statistics.median(a - b for a, b in zip(whole, readers, strict=True))
        found.append(
            {
                "tokens": length,
                "step": statistics.median(whole),
                "readers": statistics.median(readers),
                "rest": rest,
                "bytes": kept,
                "formula": formula,
            }
        )
    return found


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    m = model(CHECKPOINT)
    found: dict[str, Any] = {"steps": {e: against_hugging_face(m, e) for e in ("eager", "grouped_mm")}}
    for experts, pair in found["steps"].items():
        ratio = pair["hugging face"] / pair["production"]
        print(f"  {ratio:.2f} x the tokens per second of Hugging Face ({experts} experts)", file=sys.stderr)
    rows = found["lengths"] = by_length(m)
    for row in rows:
        print(
            f"  {row['tokens']:>5} tokens: {row['bytes'] / row['formula']:.3f} x the formula "
            f"({row['bytes'] / 2**20:.2f} MiB); step {row['step'] / rows[0]['step']:.2f} x that at {LENGTHS[0]}: "
            f"readers of caches {row['readers'] / rows[0]['readers']:.2f} x, "
            f"the rest {row['rest'] / rows[0]['rest']:.2f} x",
            file=sys.stderr,
        )
    found["step over hugging face"] = max(p["production"] / p["hugging face"] for p in found["steps"].values())
    found["bytes over formula"] = max(r["bytes"] / r["formula"] for r in rows)
    found["rest, longest over shortest"] = rows[-1]["rest"] / rows[0]["rest"]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
