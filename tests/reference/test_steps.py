"""Stages that continue from caches: certified against the untouched model's own cache, in every cut of a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.types import Check, UsageError
from reference import cache as caches
from reference import hf
from reference.build import HFReference
from reference.capture import forward
from reference.steps import HFSteps

Wires = dict[str, Tensor]


def inputs(state: Mapping[str, Tensor], ids: Tensor, past: int) -> Wires:
    """The case of one call by bare name."""
    positions = torch.arange(past, past + ids.shape[1]).expand_as(ids).contiguous()
    lengths = torch.full((ids.shape[0],), past + ids.shape[1])
    kept = {wire.removeprefix("case."): tensor for wire, tensor in state.items()}
    return {"input_ids": ids, "positions": positions, "lengths": lengths, **kept}


def call(side: Any, case: Wires) -> Wires:
    wires = {f"case.{name}": tensor for name, tensor in case.items()}
    for stage in side.stages:
        outputs = stage.run(**{name: wires[wire] for name, wire in stage.inputs.items()})
        for port in stage.outputs:
            assert outputs[port.name].dim() == len(port.dims), port
            wires[port.wire] = outputs[port.name]
    return wires


def walk(side: Any, ids: Tensor, sizes: tuple[int, ...]) -> Iterator[tuple[Wires, Wires, Wires]]:
    """(case, wires, what is kept afterwards) of each call."""
    state, past = side.empty(ids.shape[0]), 0
    for size in sizes:
        case = inputs(state, ids[:, past : past + size], past)
        wires = call(side, case)
        state = {into: wires[out] for into, out in side.state.items()}
        past += size
        yield case, wires, state


def bad(checks: Any) -> list[Check]:
    return [check for check in checks if not check.ok]


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 48, (2, 150), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sizes", [(60, 1, 1, 1, 1, 1), (1, 2, 3, 23, 24, 25, 60), (128, 1, 1), (150,)])
def test_every_call_is_the_untouched_models(native: HFReference, ids: Tensor, sizes: tuple[int, ...]) -> None:
    side = native.steps()
    calls = ids[:, : sum(sizes)].split(list(sizes), dim=1)
    for case, wires, _ in walk(side, ids, sizes):
        assert bad(side.certify(case, wires)) == []
    *_, (_, _, state) = walk(side, ids, sizes)
    assert bad(side.certify_history(calls, state)) == []


def test_a_wrong_cache_is_not_certified(native: HFReference, ids: Tensor) -> None:
    side = native.steps()
    *_, (case, wires, state) = walk(side, ids, (40, 1))
    for out in ("layers.0.kv_cache.window", "layers.1.compressor.keys", "layers.1.indexer.overlap_gate"):
        changed = {**wires, out: wires[out].roll(1, 1)}
        assert any(out in check.detail for check in bad(side.certify(case, changed))), out
    wrong = {**state, caches.wire(1, "entries"): state[caches.wire(1, "entries")] * 2}
    (check,) = side.certify_history([ids[:, :40], ids[:, 40:41]], wrong)
    assert not check.ok
    assert "layers.1.cache.entries" in check.detail


def test_a_patched_cache_is_not_certified(native: HFReference, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    side = native.steps()
    update = hf.modeling.DeepseekV4HCACache.update

    def stale(self: Any, keys: Tensor, values: Tensor, *rest: Any, **more: Any) -> Any:
        full = update(self, keys, values, *rest, **more)
        self.keys = self.values = self.keys.roll(1, 2)
        return full

    monkeypatch.setattr(hf.modeling.DeepseekV4HCACache, "update", stale)
    *_, (case, wires, _) = walk(side, ids, (40, 1))
    assert [check.name for check in bad(side.certify(case, wires))] == ["unmodified Hugging Face code"]


def test_the_oracle_does_not_care_about_the_cut(native: HFReference, ids: Tensor) -> None:
    oracle = native.steps().oracle()
    *_, (_, once, kept_once) = walk(oracle, ids, (70,))
    *_, (_, often, kept_often) = walk(oracle, ids, (33, 1, 1, 35))
    assert torch.allclose(once["lm_head.logits"][:, -35:], often["lm_head.logits"], rtol=0, atol=1e-9)
    for wire, tensor in kept_once.items():
        assert tensor.dtype is torch.float64
        assert torch.allclose(tensor, kept_often[wire], rtol=0, atol=1e-10), wire


def test_what_is_kept_has_the_promised_form(native: HFReference, ids: Tensor) -> None:
    side = native.steps()
    words = {"bf16": torch.bfloat16, "fp32": torch.float32}
    promised = {port.wire: port for stage in side.stages for port in stage.outputs}
    empty = side.empty(2)
    assert set(empty) == set(side.state)
    for past, (_, _, state) in zip((1, 4, 29, 137), walk(side, ids, (1, 3, 25, 108)), strict=True):
        for wire, tensor in state.items():
            layer, name = int(wire.split(".")[2]), wire.rpartition(".")[2]
            assert tensor.shape == (2, *caches.shape(side.net.geometry, layer, name, past)), (wire, past)
            assert tensor.dtype is words[promised[side.state[wire]].dtype] is empty[wire].dtype, wire


def test_rows_one_at_a_time_are_rows_together(native: HFReference, ids: Tensor) -> None:
    """Rows of one length do not see each other, to the rounding of another batch size."""
    side = native.steps()
    *_, (_, both, _) = walk(side, ids, (37, 1, 1))
    for row in range(2):
        *_, (_, alone, _) = walk(side, ids[row : row + 1], (37, 1, 1))
        error = (alone["lm_head.logits"] - both["lm_head.logits"][row : row + 1]).float()
        assert error.square().mean().sqrt() < 0.1 * both["lm_head.logits"].float().square().mean().sqrt()


def test_a_cut_model_keeps_what_its_layers_keep(native: HFReference, ids: Tensor) -> None:
    side = native.steps()
    *_, (case, wires, _) = walk(side, ids, (40, 1))
    reach = {w: t for w, t in wires.items() if not w.startswith(("layers.3", "hc_head", "final", "lm_head"))}
    kept = {n: t for n, t in case.items() if not n.startswith("layers.3")}
    assert bad(side.certify(kept, reach)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"positions": torch.tensor([[40, 42]])}, "expected consecutive positions from 40"),
        ({"lengths": torch.tensor([41])}, "expected 42 for every row"),
    ],
)
def test_what_the_module_would_get_wrong_is_refused(native: HFReference, ids: Tensor, change: Wires, said: str) -> None:
    side = native.steps()
    *_, (_, _, state) = walk(side, ids[:1], (40,))
    with pytest.raises(UsageError, match=said):
        call(side, inputs(state, ids[:1, 40:42], 40) | change)


def test_the_cache_argument_has_the_name_of_this_version(native: HFReference, ids: Tensor) -> None:
    """A wrong name is swallowed without an error, and the cache stays empty (transformers before and after 5.24)."""
    cache = hf.dynamic_cache(native.net.model.config)
    forward(native.net, ids[:, :5], torch.arange(5).expand(2, -1), cache)
    assert cache.get_seq_length() == 5


def test_steps_are_a_side_of_the_contract(native: HFReference) -> None:
    from harness.types import StepReference, Steps

    side = native.steps()
    assert isinstance(side, HFSteps)
    assert isinstance(side, Steps)
    assert isinstance(side, StepReference)
    assert isinstance(side.oracle(), Steps)
