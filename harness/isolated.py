"""The process behind ``--isolate``: loads production, runs one stage that its standard input names, and ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from harness import replace, sides
from harness.execute import Way, run_production
from harness.isolate import ANSWERED, ASKED
from harness.types import UsageError, one_line


def main(side: str) -> int:
    """``side`` is JSON: production's import string, checkpoint, dtype and backends."""
    wish = json.loads(side)
    made = sides.production(wish["production"], Path(wish["checkpoint"]), wish["dtype"])
    stages = {s.name: s for s in sides.backed(made, wish["backend"]).stages}
    if not (text := sys.stdin.read().strip()):
        return 0  # not needed any more
    folder = Path(text)
    asked = torch.load(folder / ASKED, weights_only=True)
    torch.save(_answer(stages[asked["stage"]], asked), folder / ANSWERED)
    return 0


def _answer(stage: Any, asked: dict[str, Any]) -> dict[str, Any]:
    before = {wire: tensor.clone() for wire, tensor in asked["wires"].items()}
    try:
        function = replace.load(asked["target"]) if asked["target"] else None
        way = Way(stage, direct=asked["direct"], function=function, target=asked["target"])
        outcome = run_production(way, asked["wires"], asked["replay"] or None)
    except UsageError as error:
        return {"outputs": {}, "error": None, "usage": str(error)}
    except Exception as error:  # what ends a run in one process is the finding of this stage alone here
        return {"outputs": {}, "error": one_line(error), "usage": None}
    outputs, problem = outcome.outputs, outcome.error
    now = asked["wires"]
    if changed := [w for w, t in before.items() if not torch.equal(torch.nan_to_num(t), torch.nan_to_num(now[w]))]:
        problem = problem or f"changed its input {changed[0]} in place"
    tensors = {name: value.cpu() for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    if odd := [name for name in outputs if name not in tensors]:
        problem = problem or f"returned {type(outputs[odd[0]]).__name__} as {odd[0]}, expected a tensor"
    return {"outputs": {} if problem else tensors, "error": problem, "usage": None}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
