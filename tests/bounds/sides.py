"""Every stage of the real sides on one prompt, judged by the margin."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from production.build import model as production_model
from reference.build import model as reference_model
from tests.bounds.margin import TORCH, Row, row

CHECKPOINT = Path(__file__).resolve().parents[2] / "cases" / "tiny"


@lru_cache(maxsize=4)
def sides(dtype: str) -> tuple[Any, Any, Any]:
    """reference, oracle, production stages by name."""
    reference: Any = reference_model(CHECKPOINT, dtype=dtype)  # type: ignore[arg-type]
    production = production_model(CHECKPOINT, dtype=dtype)
    return reference, reference.oracle(), {stage.name: stage for stage in production.stages}


def prompt(length: int, seed: int) -> Tensor:
    """Random words; every third prompt repeats eight of them, every seventh is one word again and again."""
    ids = torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(1000 * seed + length))
    if seed % 7 == 6:
        return torch.full_like(ids, int(ids[0, 0]))
    if seed % 3 == 2:
        return ids[:, :8].repeat(1, length // 8 + 1)[:, :length]
    return ids


def compare(dtype: str, length: int, seed: int, *, whose: str = "production") -> Iterator[tuple[str, str, Row]]:
    """(stage, output, row) of local comparisons: production, or the reference against its own plan."""
    reference, oracle, production = sides(dtype)
    wires = {
        "case.input_ids": prompt(length, seed),
        "case.positions": torch.arange(length)[None],
        "case.lengths": torch.tensor([length]),
    }
    for stage in reference.stages:
        inputs = {name: wires[wire] for name, wire in stage.inputs.items()}
        outputs = stage.run(**inputs)
        wires |= {port.wire: outputs[port.name] for port in stage.outputs}
        picks = {"picks": outputs["picks"]} if "picks" in outputs else None
        if whose == "reference":
            side, got = stage, outputs
        else:
            side = production[stage.name]
            taken = {name: wires[wire] for name, wire in side.inputs.items()}
            got = side.run(replay=picks, **{name: _cast(side, name, t) for name, t in taken.items()})
        plan = dict(side.plan)
        if whose == "reference" and stage.kind in ("compressor", "indexer"):
            plan.setdefault("angle", "fp32")
        judged = oracle.judge(stage.name, inputs, plan=plan, given=picks)
        for port in side.outputs:
            if port.role in ("value", "stat"):
                value, rss, total = judged[port.name]
                yield stage.name, port.name, row(value, rss, total, port.dtype, got[port.name])


def _cast(side: Any, name: str, tensor: Tensor) -> Tensor:
    """The reference's wire in the dtype that production takes it in."""
    accepted = [side.op.resolve(d) for d in side.op.takes[name].dtypes]
    if not tensor.is_floating_point() or tensor.dtype in [TORCH[d] for d in accepted]:
        return tensor
    return tensor.to(TORCH[accepted[0]])
