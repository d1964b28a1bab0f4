"""What a comparison cannot do without: the imports, and one forward of each witness on the tokens of the case.

Prints its CPU seconds by phase as JSON. Loading the checkpoint three times is a phase of its own.
"""

from __future__ import annotations

import json
import time


def main() -> None:
    seconds: dict[str, float] = {}
    last = time.process_time()

    def lap(name: str) -> None:
        nonlocal last
        now = time.process_time()
        seconds[name], last = now - last, now

    import torch
    from transformers.models.deepseek_v4 import modeling_deepseek_v4  # noqa: F401

    lap("import")

    from harness import case as cases
    from production.build import model as production
    from reference.build import model as reference
    from reference.capture import forward
    from reference.lift import float64
    from reference.net import build

    case = cases.load("tiny")
    inputs = cases.inputs(case, cases.sequence(case))
    theirs, mine = reference(case.checkpoint, dtype="native"), production(case.checkpoint, dtype="native")
    truth = build(theirs.net.checkpoint, "fp64", theirs.net.depth, theirs.net.device)
    lap("load")
    with torch.no_grad():
        forward(theirs.net, inputs["input_ids"], inputs["positions"])
        lap("reference")
        with float64():
            forward(truth, inputs["input_ids"], inputs["positions"])
        lap("oracle")
        mine.forward(inputs["input_ids"], inputs["positions"], inputs["lengths"])
        lap("production")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
