"""Projections and norms against float64, on the model's own parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from production.build import Model, model
from tests.production import synthetic
from tests.production.check import V, assert_rounded, fp32_slack, run

LINEARS = ["layers.0.q_a", "layers.1.q_b", "layers.2.kv", "layers.3.o_b"]


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("side", ["native", "fp32"])
def test_nvfp4_linear(request: pytest.FixtureRequest, side: str, name: str) -> None:
    stage = request.getfixturevalue(side).stage(name)
    assert stage.component == "production.linear:Nvfp4Linear"
    weight = stage.decoded()["weight"]
    x = torch.randn(2, 7, *([2, 16] if name.endswith("o_b") else [weight.shape[1]]))
    x = x.bfloat16() if side == "native" else x
    y = run(stage, x=x)
    (got,) = y.values()
    flat = x.flatten(2).double()
    exact = flat @ weight.T
    slack = fp32_slack(flat.abs() @ weight.abs().T, weight.shape[1])
    assert_rounded(got.flatten(2), exact, slack)


def test_grouped_projection_keeps_groups_apart(native: Model) -> None:
    stage = native.stage("layers.1.o_a")
    out = torch.randn(2, 5, 4, 32).bfloat16()
    got = run(stage, out=out)["o_a"]
    weight = stage.decoded()["weight"].view(2, 16, 64)
    groups = out.double().view(2, 5, 2, 64)  # heads 0, 1 and heads 2, 3
    exact = torch.einsum("bsgc,grc->bsgr", groups, weight)
    slack = fp32_slack(torch.einsum("bsgc,grc->bsgr", groups.abs(), weight.abs()), 64)
    assert_rounded(got, exact, slack)


def test_bf16_weights_are_taken_where_a_checkpoint_has_them(tmp_path: Path) -> None:
    """The same model with one stage's weight in bf16 instead of NVFP4."""
    content = synthetic.tensors(synthetic.CONFIG)
    for stem, shape in (("layers.0.attn.wq_a", (32, 64)), ("layers.1.attn.wo_a", (32, 64))):
        content = {name: t for name, t in content.items() if not name.startswith(stem + ".")}
        content[f"{stem}.weight"] = torch.randn(shape).bfloat16()
    m = model(synthetic.write(tmp_path / "mixed", content, synthetic.CONFIG))
    assert m.stage("layers.0.q_a").component == "production.linear:Bf16Linear"
    assert m.stage("layers.1.o_a").component == "production.grouped_linear:Bf16GroupedLinear"
    x = torch.randn(1, 3, 64).bfloat16()
    weight = content["layers.0.attn.wq_a.weight"].double()
    got = run(m.stage("layers.0.q_a"), x=x)["q_a"]
    assert_rounded(got, x.double() @ weight.T, fp32_slack(x.double().abs() @ weight.abs().T, 64))
    assert m.forward(torch.randint(50, (1, 9))).isfinite().all()


def test_input_scale_is_no_part_of_the_product(native: Model) -> None:
    for name in ("layers.0.q_a", "layers.0.shared_expert"):
        stage = native.stage(name)
        x = torch.randn(1, 4, 64).bfloat16()
        poisoned = {n: torch.full_like(t, torch.nan) for n, t in stage.params.items() if n.endswith("input_scale")}
        assert poisoned
        for key, value in stage.run(params=poisoned, x=x).items():
            assert torch.equal(value, stage.run(x=x)[key])


def test_the_tensor_scale_multiplies_the_accumulator(native: Model) -> None:
    stage = native.stage("layers.0.q_a")
    x = torch.randn(1, 4, 64).bfloat16()
    doubled = stage.run(params={"weight_scale_2": stage.params["weight_scale_2"] * 2}, x=x)["q_a"]
    assert torch.equal(doubled, stage.run(x=x)["q_a"] * 2)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_weighted_norm(native: Model, scale: float) -> None:
    """Small inputs show the eps, large ones do not overflow."""
    stage = native.stage("layers.1.kv_norm")
    kv = (torch.randn(2, 6, 32) * scale).bfloat16()
    got = run(stage, kv=kv)["kv"]
    x, weight = kv.double(), stage.decoded()["weight"]
    exact = weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_rounded(got, exact, 12 * V * exact.abs())


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_head_norm_is_per_head_and_weightless(native: Model, scale: float) -> None:
    q = (torch.randn(2, 6, 4, 32) * scale).bfloat16()
    got = run(native.stage("layers.0.q_b_norm"), q=q)["q"]
    x = q.double()
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_rounded(got, exact, 12 * V * exact.abs())


def test_head_and_embedding(native: Model) -> None:
    ids = torch.tensor([[3, 3, 49], [0, 7, 1]])
    embed = native.stage("embed")
    streams = run(embed, input_ids=ids)["streams"]
    for stream in range(4):
        assert torch.equal(streams[:, :, stream], embed.params["weight"][ids])
    x = torch.randn(1, 3, 64).bfloat16()
    head = native.stage("lm_head")
    weight = head.decoded()["weight"]
    got = run(head, x=x)["logits"]
    assert got.dtype == torch.float32  # the logits are not rounded
    assert_rounded(got, x.double() @ weight.T, fp32_slack(x.double().abs() @ weight.abs().T, 64))


def test_moe_sum_adds_before_it_rounds(native: Model) -> None:
    routed, shared = torch.randn(2, 1, 5, 64).bfloat16()
    got = run(native.stage("layers.0.moe_sum"), routed=routed, shared=shared)["out"]
    assert torch.equal(got, (routed.double() + shared.double()).bfloat16())
