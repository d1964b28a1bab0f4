"""``Model.forward`` with taps off against the same loop with no word about taps in it. Prints ratios as JSON.

Noise is what the plain loop differs from itself by, measured in the same turns.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
from torch import Tensor

from harness import case as cases
from production.build import LOGITS, Model, model
from production.stage import require_plain_fp32

TURNS = 31


def untapped(model: Model, ids: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
    """``Model.forward`` as if taps had never been thought of."""
    require_plain_fp32("forward")
    wires = model._case(ids, positions, lengths)
    for step in model._steps:
        stage = step.stage
        outputs = stage.execute({arg: wires[wire] for arg, wire in stage.inputs.items()}, detail=False)
        for name, wire in step.keep:
            wires[wire] = outputs[name]
        del outputs
        for wire in step.drop:
            del wires[wire]
    return wires[LOGITS]


def main() -> None:
    case = cases.load("tiny")
    inputs = cases.inputs(case, cases.sequence(case))
    mine = model(case.checkpoint)
    ways = {
        "off": lambda: mine.forward(inputs["input_ids"], inputs["positions"], inputs["lengths"]),
        "plain": lambda: untapped(mine, inputs["input_ids"], inputs["positions"], inputs["lengths"]),
    }
    turns: dict[str, list[float]] = {"off": [], "plain": [], "again": []}
    assert torch.equal(ways["off"](), ways["plain"]())
    for _ in range(TURNS):
        for name in turns:
            forward = ways["off" if name == "off" else "plain"]
            start = time.process_time()
            forward()
            turns[name].append(time.process_time() - start)
    low = {name: statistics.median(seconds) for name, seconds in turns.items()}
    ratios = sorted(b / a for a, b in zip(turns["plain"], turns["again"], strict=True))
    noise = (ratios[len(ratios) * 3 // 4] - ratios[len(ratios) // 4]) / 2
    taps = statistics.median(o / p for o, p in zip(turns["off"], turns["plain"], strict=True))
    print(json.dumps({"seconds": low, "taps off over plain": taps, "noise (half the interquartile range)": noise}))


if __name__ == "__main__":
    main()
