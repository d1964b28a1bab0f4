"""Clean productions of every stage against their own bound."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from reference.bounds import spread
from tests.bounds.emulate import Arithmetic, run
from tests.bounds.margin import Row, row
from tests.bounds.plans import output_dtype, plan
from tests.bounds.scenes import scene

ORDERS = ("native", "permuted", "split", "tensor")


def rows(stage: str, name: str, length: int, seed: int, which: str, order: str) -> Iterator[tuple[str, Row]]:
    """(output, row) for one scene, plan and summation order."""
    s = scene(stage, name, length, seed, "fp32" if which == "fp32" else "bf16")
    points = plan(s.kind, which)
    oracle = run(s.kind, Arithmetic(), s.config, s.params, s.inputs)
    got = run(s.kind, Arithmetic(points, torch.float32, order, seed), s.config, s.params, s.inputs)
    given = {"picks": s.config["picks"]} if s.kind == "router" else None
    found = spread(s, s.inputs, oracle, points, given)
    for output, value in oracle.items():
        if value.is_floating_point():
            yield output, row(value, *found[output], output_dtype(s.kind, output, points), got[output])
