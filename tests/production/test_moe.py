"""Routers and experts against float64: extremes, ties, the bias, the hash table, clamps, sub-rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from production.build import Model
from production.errors import ProductionError
from production.router import sqrt_softplus
from tests.production.check import V, assert_rounded, fp32_slack, run

DENSE, HASH = "layers.2.router", "layers.0.router"


def test_sqrt_softplus_everywhere() -> None:
    x = torch.cat((torch.linspace(-170, 200, 4001), torch.tensor([-17.0001, -16.9999, 0.0, -0.0, 20.0, 3e38])))
    exact = [math.sqrt(v + math.log1p(math.exp(-v)) if v > 0 else math.log1p(math.exp(v))) for v in x.double().tolist()]
    assert torch.allclose(sqrt_softplus(x).double(), torch.tensor(exact, dtype=torch.float64), rtol=1e-6, atol=0)
    assert sqrt_softplus(torch.tensor([-1e4])).item() == 0


def weights64(logits: Tensor, picks: Tensor) -> Tensor:
    x = logits.double()
    scores = torch.where(x > 0, x + torch.log1p(torch.exp(-x.abs())), torch.log1p(torch.exp(x))).sqrt()
    picked = scores.gather(-1, picks)
    return picked / (picked.sum(-1, keepdim=True) + 1e-20) * 1.5


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_dense_router(native: Model, scale: float) -> None:
    stage = native.stage(DENSE)
    x, ids = (torch.randn(2, 40, 64) * scale).bfloat16(), torch.zeros(2, 40, dtype=torch.int64)
    got, p = run(stage, x=x, input_ids=ids), stage.decoded()
    exact = x.double() @ p["weight"].T
    assert_rounded(got["logits"], exact, fp32_slack(x.double().abs() @ p["weight"].abs().T, 64))
    biased = sqrt_softplus(got["logits"]) + stage.params["e_score_correction_bias"]
    for b in range(2):
        for t in range(40):
            order = sorted(range(6), key=lambda e: (-biased[b, t, e].item(), e))
            assert got["picks"][b, t].tolist() == order[:2]
    assert torch.allclose(got["weights"].double(), weights64(got["logits"], got["picks"]), rtol=2e-6)


def test_the_bias_chooses_and_does_not_weigh(native: Model) -> None:
    stage = native.stage(DENSE)
    bias = torch.zeros(6)
    bias[4], bias[1] = 100.0, 50.0
    inputs = {"x": torch.randn(1, 9, 64).bfloat16(), "input_ids": torch.zeros(1, 9, dtype=torch.int64)}
    got = stage.run(params={"e_score_correction_bias": bias}, **inputs)
    assert got["picks"].tolist() == [[[4, 1]] * 9]
    assert torch.allclose(got["weights"].sum(-1), torch.full((1, 9), 1.5), rtol=1e-6)
    assert torch.allclose(got["weights"].double(), weights64(got["logits"], got["picks"]), rtol=2e-6)


def test_ties_go_to_the_lower_expert(native: Model) -> None:
    zero = {"e_score_correction_bias": torch.zeros(6)}
    inputs = {"x": torch.zeros(1, 3, 64).bfloat16(), "input_ids": torch.zeros(1, 3, dtype=torch.int64)}
    assert native.stage(DENSE).run(params=zero, **inputs)["picks"].tolist() == [[[0, 1]] * 3]


def test_underflowed_scores_stay_finite(native: Model) -> None:
    """Both picks far below fp32's exp range: the floor keeps 0/0 away."""
    stage = native.stage(HASH)
    x = torch.full((1, 2, 64), 100.0).bfloat16()
    weight = torch.full_like(stage.params["weight"], -1.0)  # logits -6400
    got = stage.run(params={"weight": weight}, x=x, input_ids=torch.zeros(1, 2, dtype=torch.int64))
    assert got["weights"].tolist() == [[[0.0, 0.0]] * 2]


def test_hash_router_follows_the_table(native: Model) -> None:
    stage = native.stage(HASH)
    ids = torch.randint(50, (2, 30))
    got = run(stage, x=torch.randn(2, 30, 64).bfloat16(), input_ids=ids)
    assert torch.equal(got["picks"], stage.params["tid2eid"][ids])
    assert torch.allclose(got["weights"].double(), weights64(got["logits"], got["picks"]), rtol=2e-6)
    roles = {name: {o.name: o.role for o in native.stage(name).outputs}["picks"] for name in (DENSE, HASH)}
    assert roles == {DENSE: "picks", HASH: "exact"}
    with pytest.raises(ProductionError, match=r"router: input_ids: expected 0..49, came 50..50"):
        stage.run(x=torch.randn(1, 1, 64).bfloat16(), input_ids=torch.tensor([[50]]))


@pytest.mark.parametrize("name", [DENSE, HASH])
def test_replayed_picks_are_weighted(native: Model, name: str) -> None:
    stage = native.stage(name)
    inputs = {"x": torch.randn(1, 9, 64).bfloat16(), "input_ids": torch.zeros(1, 9, dtype=torch.int64)}
    picks = torch.randint(6, (1, 9, 2))
    got = stage.run(replay={"picks": picks}, **inputs)
    assert torch.equal(got["picks"], picks)
    assert torch.allclose(got["weights"].double(), weights64(got["logits"], picks), rtol=2e-6)
    with pytest.raises(ProductionError, match=r"router: picks: expected expert ids 0..5, came 6..6"):
        stage.run(replay={"picks": picks * 0 + 6}, **inputs)


def mlp64(x: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(gate, up, act) of one row; act rounded as it is stored."""
    g, u = gate @ x, up @ x
    limited = g.clamp(max=10.0)
    act = limited / (1 + torch.exp(-limited)) * u.clamp(min=-10.0, max=10.0)
    return g, u, act.to(dtype).double()


@pytest.mark.parametrize("scale", [1.0, 6.0])
@pytest.mark.parametrize("side", ["native", "fp32"])
def test_experts_and_sub_rows(request: pytest.FixtureRequest, side: str, scale: float) -> None:
    """scale 6 drives gate above the limit and far below minus it, and up beyond both."""
    stage = request.getfixturevalue(side).stage("layers.1.experts")
    dtype = torch.bfloat16 if side == "native" else torch.float32
    x = (torch.randn(2, 9, 64) * scale).to(dtype)
    weights, picks = torch.rand(2, 9, 2), torch.randint(6, (2, 9, 2))
    got = run(stage, x=x, weights=weights, picks=picks)
    w = {name: stage.decoded()[f"{name}_proj.weight"] for name in ("gate", "up", "down")}
    assert scale == 1 or (got["gate"].max() > 10 and got["gate"].min() < -10 and got["up"].abs().max() > 10)
    for b in range(2):
        for t in range(9):
            total = torch.zeros(64, dtype=torch.float64)
            for slot in range(2):
                e = int(picks[b, t, slot])
                g, u, _ = mlp64(x[b, t].double(), w["gate"][e], w["up"][e], dtype)
                assert torch.allclose(got["gate"][b, t, slot].double(), g, rtol=1e-5, atol=1e-5 * scale)
                assert torch.allclose(got["up"][b, t, slot].double(), u, rtol=1e-5, atol=1e-5 * scale)
                gate, up = got["gate"][b, t, slot].double(), got["up"][b, t, slot].double()
                limited = gate.clamp(max=10)
                act = limited / (1 + torch.exp(-limited)) * up.clamp(-10, 10)
                assert_rounded(got["act"][b, t, slot], act, 16 * V * act.abs() + 1e-37)  # underflow of silu
                act = got["act"][b, t, slot].double()
                down = w["down"][e] @ act
                slack = fp32_slack(w["down"][e].abs() @ act.abs(), 32)
                assert_rounded(got["down"][b, t, slot], down, slack)
                total += weights[b, t, slot].double() * got["down"][b, t, slot].double()
            assert_rounded(got["out"][b, t], total, 8 * V * total.abs().max())


def test_an_expert_picked_twice_counts_twice_and_bf16_weights_are_taken(native: Model) -> None:
    stage = native.stage("layers.1.experts")
    x, ones = torch.randn(1, 3, 64).bfloat16(), torch.ones(1, 3, 2).bfloat16()
    same = stage.run(x=x, weights=ones, picks=torch.full((1, 3, 2), 4))
    once = stage.run(x=x, weights=ones * torch.tensor([2.0, 0.0]).bfloat16(), picks=torch.full((1, 3, 2), 4))
    assert torch.equal(same["out"], once["out"])
    with pytest.raises(ProductionError, match=r"experts: picks: expected expert ids 0..5, came -1..-1"):
        stage.run(x=x, weights=ones, picks=torch.full((1, 3, 2), -1))


def test_scales_belong_to_one_expert_and_one_projection(native: Model) -> None:
    """Doubling W3's scale of expert 2 changes `up` of its rows by two, and no gate and no other expert."""
    stage = native.stage("layers.1.experts")
    x, weights, picks = torch.randn(1, 30, 64).bfloat16(), torch.rand(1, 30, 2), torch.randint(6, (1, 30, 2))
    scale = stage.params["up_proj.weight_scale_2"].clone()
    scale[2] *= 2
    want = stage.run(x=x, weights=weights, picks=picks)
    got = stage.run(params={"up_proj.weight_scale_2": scale}, x=x, weights=weights, picks=picks)
    factor = torch.where(picks == 2, 2.0, 1.0).unsqueeze(-1)
    assert torch.equal(got["up"], want["up"] * factor)
    assert torch.equal(got["gate"], want["gate"])


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_shared_expert_has_the_same_clamps(native: Model, scale: float) -> None:
    stage = native.stage("layers.3.shared_expert")
    x = (torch.randn(2, 5, 64) * scale).bfloat16()
    got = run(stage, x=x)
    w = {name: stage.decoded()[f"{name}_proj.weight"] for name in ("gate", "up", "down")}
    for b in range(2):
        for t in range(5):
            g, u, _ = mlp64(x[b, t].double(), w["gate"], w["up"], torch.bfloat16)
            assert torch.allclose(got["gate"][b, t].double(), g, rtol=1e-5, atol=1e-5 * scale)
            assert torch.allclose(got["up"][b, t].double(), u, rtol=1e-5, atol=1e-5 * scale)
            limited = got["gate"][b, t].double().clamp(max=10)
            act = limited / (1 + torch.exp(-limited)) * got["up"][b, t].double().clamp(-10, 10)
            assert_rounded(got["act"][b, t], act, 16 * V * act.abs() + 1e-37)  # underflow of silu
            act = got["act"][b, t].double()
            assert_rounded(got["out"][b, t], w["down"] @ act, fp32_slack(w["down"].abs() @ act.abs(), 32))
