"""Stages keep the promises of docs/stages.md: ports, overrides, replay, rounding points, direct mode."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.types import InvalidRun, UsageError
from reference import build
from reference.stages.base import HFStage
from tests.reference.conftest import LENGTH, arguments, compose

WORDS = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int64: "int64", torch.bool: "bool"}
SIZES = {
    "B": 2, "S": LENGTH, "N": 4, "M": 4, "d": 64, "H": 4, "D": 64, "R2": 8, "QL": 32, "G": 2, "OL": 16, "HI": 32,
    "DI": 32, "E": 6, "k": 2, "F": 32, "V": 48,
}  # fmt: skip


def stage(side: build.HFReference, name: str) -> HFStage:
    return next(s for s in side.stages if s.name == name)


def entries(side: build.HFReference, layer: int | None) -> dict[str, int]:
    rate = 0 if layer is None else side.net.geometry.rate(layer)
    found = LENGTH // rate if rate else 0
    return {"T": found, "J": LENGTH + found, "K": min(8, found)}


@pytest.mark.parametrize("which", ["native", "single"])
def test_outputs_are_as_promised(which: str, request: pytest.FixtureRequest, case: Mapping[str, Tensor]) -> None:
    side: build.HFReference = request.getfixturevalue(which)
    wires = compose(side, case)
    for s in side.stages:
        outputs = s.run(**arguments(s, wires))
        assert set(outputs) == {port.name for port in s.outputs}
        for port in s.outputs:
            value = outputs[port.name]
            sizes = SIZES | entries(side, s.layer)
            assert list(value.shape) == [sizes[d] for d in port.dims], port.wire
            assert WORDS[value.dtype] == port.dtype, port.wire


def test_plans(native: build.HFReference, single: build.HFReference) -> None:
    assert stage(native, "layers.0.q_a").plan == {"weight": "bf16", "acc": "fp32", "out": "bf16"}
    assert stage(native, "lm_head").plan["weight"] == "exact"  # stored as bf16
    assert stage(native, "rope_cache").plan == {"angle": "fp32", "out": "bf16"}
    assert "bf16" not in {dtype for s in single.stages for dtype in s.plan.values()}


@pytest.mark.parametrize("length", [1, 3, 4, 7, 128])
def test_short_sequences(native: build.HFReference, case: Mapping[str, Tensor], length: int) -> None:
    short = {k: v[:, :length] for k, v in case.items() if k != "lengths"} | {"lengths": torch.full((2,), length)}
    wires = compose(native, short)
    assert wires["layers.1.compressor.keys"].shape[1] == length // 4
    assert wires["layers.1.indexer.picks"].shape == (2, length, min(8, length // 4))
    assert all(check.ok for check in native.certify(short, wires))


def test_pre_is_not_bound_to_the_streams_seen(native: build.HFReference, wires: Mapping[str, Tensor]) -> None:
    for name in ("layers.0.attn_hc", "layers.2.ffn_hc", "hc_head"):
        s = stage(native, name)
        streams = torch.randn_like(arguments(s, wires)["streams"].float()).bfloat16()
        out = s.run(streams=streams)
        again = (out["pre"].unsqueeze(-1) * streams).sum(2).bfloat16()
        assert torch.equal(again, out["collapsed"])


def test_wrong_pre_is_noticed(
    native: build.HFReference, wires: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = stage(native, "layers.0.attn_hc")
    module = s.module  # type: ignore[attr-defined]
    plain = type(module).forward
    monkeypatch.setattr(type(module), "forward", lambda self, x: (*plain(self, x)[:2], plain(self, x)[2] * 2))
    with pytest.raises(InvalidRun, match="pre"):
        s.run(**arguments(s, wires))


def test_names_of_inputs(native: build.HFReference) -> None:
    with pytest.raises(UsageError, match=r"q_a: expected inputs \['x'\], came \['y'\]"):
        stage(native, "layers.0.q_a").run(y=torch.zeros(1))


def test_overrides(native: build.HFReference, wires: Mapping[str, Tensor]) -> None:
    """Every parameter can be replaced, by its decoded value in the checkpoint's layout, and is back afterwards."""
    for s in native.stages:
        if s.layer not in (None, 0, 1, 2):
            continue
        inputs, before = arguments(s, wires), s.run(**arguments(s, wires))
        same = s.run(params={leaf: value.double() for leaf, value in s.params.items() if leaf != "tid2eid"}, **inputs)
        for leaf, value in s.params.items():
            other = (value + 1) % 6 if leaf == "tid2eid" else value.double() * 1.5 + 0.1
            changed = s.run(params={leaf: other}, **inputs)
            assert any(not torch.equal(changed[k], v) for k, v in before.items()), (s.name, leaf)
        after = s.run(**inputs)
        for k, v in before.items():
            assert torch.equal(same[k], v), (s.name, k)
            assert torch.equal(after[k], v), (s.name, k)


def test_override_of_one_projection(native: build.HFReference, wires: Mapping[str, Tensor]) -> None:
    s = stage(native, "layers.1.experts")
    inputs = arguments(s, wires)
    before, after = s.run(**inputs), s.run(params={"up_proj.weight": s.params["up_proj.weight"] * 2}, **inputs)
    assert torch.equal(before["gate"], after["gate"])
    assert torch.equal(before["up"] * 2, after["up"])


def test_wrong_overrides(native: build.HFReference, wires: Mapping[str, Tensor]) -> None:
    s = stage(native, "layers.0.q_a")
    with pytest.raises(UsageError, match=r"expected a parameter of \['weight'\], came 'bias'"):
        s.run(params={"bias": torch.zeros(3)}, **arguments(s, wires))
    with pytest.raises(UsageError, match=r"expected shape \[32, 64\], came \[64, 32\]"):
        s.run(params={"weight": torch.zeros(64, 32)}, **arguments(s, wires))


@pytest.mark.parametrize("layer", [0, 1])
def test_router_replay(native: build.HFReference, wires: Mapping[str, Tensor], layer: int) -> None:
    s = stage(native, f"layers.{layer}.router")
    inputs = arguments(s, wires)
    own = s.run(**inputs)
    again = s.run(replay={"picks": own["picks"]}, **inputs)
    assert all(torch.equal(again[k], own[k]) for k in own)
    swapped = s.run(replay={"picks": own["picks"].flip(-1)}, **inputs)
    assert torch.equal(swapped["picks"], own["picks"].flip(-1))
    assert torch.equal(swapped["weights"], own["weights"].flip(-1))
    other = torch.stack([(own["picks"][..., 0] + 1) % 6, own["picks"][..., 0]], -1)
    scores = F.softplus(own["logits"]).sqrt().gather(-1, other)
    weights = scores / (scores.sum(-1, keepdim=True) + 1e-20) * 1.5
    assert torch.equal(s.run(replay={"picks": other}, **inputs)["weights"], weights)
    assert torch.equal(s.run(**inputs)["picks"], own["picks"])


def test_router_replay_uses_an_overridden_weight(native: build.HFReference, wires: Mapping[str, Tensor]) -> None:
    s = stage(native, "layers.1.router")
    inputs, picks = arguments(s, wires), wires["layers.1.router.picks"]
    zero = s.run(params={"weight": torch.zeros(6, 64)}, replay={"picks": picks}, **inputs)
    assert bool((zero["weights"] == 0.75).all())


def test_indexer_replay(native: build.HFReference, wires: Mapping[str, Tensor]) -> None:
    s = stage(native, "layers.1.indexer")
    inputs, own = arguments(s, wires), wires["layers.1.indexer.picks"]
    given = own.flip(-1)
    out = s.run(replay={"picks": given}, **inputs)
    assert torch.equal(out["picks"], given)
    assert torch.equal(out["scores"], wires["layers.1.indexer.scores"])


def test_picks_are_the_best_eligible(native: build.HFReference, wires: Mapping[str, Tensor]) -> None:
    scores, picks = wires["layers.1.indexer.scores"], wires["layers.1.indexer.picks"]
    for query in range(LENGTH):
        eligible = min((query + 1) // 4, scores.shape[-1])
        assert bool((scores[0, query, eligible:] == -torch.inf).all())
        chosen = picks[0, query][picks[0, query] >= 0]
        assert len(chosen) == min(8, eligible)
        best = scores[0, query].sort(descending=True).values[: len(chosen)]
        assert torch.equal(scores[0, query, chosen].sort(descending=True).values, best)


@pytest.mark.parametrize(("layer", "rate"), [(0, 0), (1, 4), (2, 128)])
def test_visible_keys(native: build.HFReference, wires: Mapping[str, Tensor], layer: int, rate: int) -> None:
    visible = wires[f"layers.{layer}.attn_core.visible"]
    query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    assert torch.equal(visible[0, :, :LENGTH], (key <= query) & (query - key < 24))
    if rate == 128:
        assert torch.equal(visible[1, :, LENGTH:], (torch.arange(LENGTH)[:, None] + 1) // 128 > torch.arange(1))
    if rate == 4:
        picks = wires[f"layers.{layer}.indexer.picks"]
        chosen = [set(visible[1, q, LENGTH:].nonzero().flatten().tolist()) for q in range(LENGTH)]
        assert chosen == [set(picks[1, q].tolist()) - {-1} for q in range(LENGTH)]


def test_ragged_batches_are_refused(native: build.HFReference, wires: Mapping[str, Tensor]) -> None:
    s = stage(native, "layers.0.attn_core")
    inputs = arguments(s, wires) | {"lengths": torch.tensor([LENGTH, LENGTH - 1])}
    with pytest.raises(UsageError, match="ragged batches are not supported yet"):
        s.run(**inputs)


def test_token_ids_out_of_range(native: build.HFReference) -> None:
    with pytest.raises(UsageError, match=r"ids in 0\.\.47"):
        stage(native, "embed").run(input_ids=torch.tensor([[48]]))


def test_direct_mode(native: build.HFReference, wires: Mapping[str, Tensor]) -> None:
    hc, mix = stage(native, "layers.1.attn_hc"), stage(native, "layers.1.attn_mix")
    streams, out = wires["layers.0.ffn_mix.streams"], wires["layers.1.o_b.out"]
    assert hc.direct_with == mix.name  # type: ignore[attr-defined]
    assert mix.direct_with == hc.name  # type: ignore[attr-defined]
    exact = streams.double()
    collapsed = hc.direct(streams=streams)["collapsed"]  # type: ignore[attr-defined]
    assert torch.equal(collapsed, exact.mean(2).bfloat16())
    added = mix.direct(streams=streams, out=out)["streams"]  # type: ignore[attr-defined]
    truth = exact + 0.1 * out.double().unsqueeze(2)
    assert bool(((added.double() - truth).abs() <= 2.0**-8 * truth.abs() * 1.001).all())
    raised = next(s for s in native.oracle().stages if s.name == mix.name).direct(streams=streams, out=out)  # type: ignore[attr-defined]
    assert torch.equal(raised["streams"], truth)
