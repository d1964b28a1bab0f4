"""The bundled checkpoint is read and certified at both precisions."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from reference import build
from tests.reference.conftest import compose

TINY = Path(__file__).parents[2] / "cases" / "tiny"


@pytest.mark.parametrize("dtype", ["native", "fp32"])
def test_certified(dtype: Literal["native", "fp32"]) -> None:
    side = build.model(TINY, dtype=dtype)
    length = 132  # one heavily compressed key, and an edge of the window
    case = {
        "input_ids": torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(3)),
        "positions": torch.arange(length)[None],
        "lengths": torch.tensor([length]),
    }
    wires = compose(side, case)
    assert [check for check in side.certify(case, wires) if not check.ok] == []
    picks = {"picks": wires["layers.2.router.picks"]}
    node = next(s for s in side.oracle().stages if s.name == "layers.2.router")
    truth = node.run(replay=picks, **{name: wires[wire] for name, wire in node.inputs.items()})
    error = (wires["layers.2.router.weights"].double() - truth["weights"]).abs().max()
    assert float(error) < (2e-2 if dtype == "native" else 1e-6)
