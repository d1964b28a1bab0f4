"""The step graph: caches as wires in logical order give what a session keeps in pages, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from production.build import Model
from production.errors import ProductionError
from production.session import Session
from production.steps import StepSide
from tests.production import synthetic
from tests.production.check import assert_close, run


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, synthetic.CONFIG["vocab_size"], (2, 90), generator=torch.Generator().manual_seed(3))


def call(side: StepSide, state: dict[str, Tensor], ids: Tensor, past: int) -> dict[str, Tensor]:
    """Every wire of one call, stage by stage."""
    positions = torch.arange(past, past + ids.shape[1]).expand(ids.shape[0], -1)
    lengths = torch.full((ids.shape[0],), past + ids.shape[1])
    wires = {"case.input_ids": ids, "case.positions": positions, "case.lengths": lengths, **state}
    for stage in side.stages:
        outputs = run(stage, **{name: wires[wire] for name, wire in stage.inputs.items()})
        wires |= {out.wire: outputs[out.name] for out in stage.outputs}
    return wires


def after(side: StepSide, wires: dict[str, Tensor]) -> dict[str, Tensor]:
    return {into: wires[out] for into, out in side.state.items()}


@pytest.mark.parametrize("sizes", [(90,), (33, 1, 1, 1, 20, 34), (1, 3, 12, 16, 17, 41)])
def test_wires_are_sessions(fp32: Model, ids: Tensor, sizes: tuple[int, ...]) -> None:
    side = fp32.steps()
    state, session, past = side.empty(2), Session(fp32, tokens=90, rows=2), 0
    for size in sizes:
        part = ids[:, past : past + size]
        wires = call(side, state, part, past)
        state = after(side, wires)
        past += size
        for row, logits in enumerate(session.feed(list(part))):
            assert logits is not None
            assert_close(wires["lm_head.logits"][row], logits)
            kept = session.state(row)
            assert kept.keys() == state.keys()
            for name, tensor in kept.items():
                assert_close(state[name][row : row + 1], tensor)


def test_one_row_is_bit_for_bit(native: Model, ids: Tensor) -> None:
    side = native.steps()
    state, session, past = side.empty(1), Session(native, tokens=90, prepared=False), 0
    for size in (31, 1, 1, 6, 17):
        part = ids[:1, past : past + size]
        wires = call(side, state, part, past)
        state = after(side, wires)
        logits = session.feed([part[0]])[0]
        past += size
        assert logits is not None
        assert torch.equal(wires["lm_head.logits"][0], logits)
        for name, tensor in session.state().items():
            assert torch.equal(tensor, state[name]), name


def test_every_cache_content_is_written_again(native: Model) -> None:
    side = native.steps()
    written = {out.wire for stage in side.stages for out in stage.outputs}
    read = {wire for stage in side.stages for wire in stage.inputs.values() if ".cache." in wire}
    assert read == set(side.empty(1)) == set(side.state)
    assert set(side.state.values()) <= written


def test_a_state_of_another_length_is_refused(native: Model, ids: Tensor) -> None:
    side = native.steps()
    stage = next(s for s in side.stages if s.name == "layers.1.compressor")
    empty = side.empty(1)
    inputs = {name: empty[wire] for name, wire in stage.inputs.items() if ".cache." in wire}
    x = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ProductionError, match=r"entries: expected \[2, 32\] for 8 tokens, came \[0, 32\]"):
        stage.run(x=x, positions=torch.tensor([[8, 9]]), **inputs)
    with pytest.raises(ProductionError, match="consecutive positions"):
        stage.run(x=x, positions=torch.tensor([[0, 3]]), **inputs)
