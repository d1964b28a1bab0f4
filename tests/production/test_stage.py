"""Stages: the harness's protocol by shape, input checks, overrides, replay, plans in both dtypes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from harness import types
from production.build import Model, model
from production.errors import ProductionError
from tests.production import synthetic

ATTENTION = ["attn_hc", "attn_norm", "q_a", "q_a_norm", "q_b", "q_b_norm", "q_rope", "kv", "kv_norm", "kv_rope"]
REST = ["attn_core", "attn_unrope", "o_a", "o_b", "attn_mix", "ffn_hc", "ffn_norm"]
REST += ["router", "experts", "shared_expert", "moe_sum", "ffn_mix"]
EXTRA = {0: [], 1: ["compressor", "indexer"], 2: ["compressor"], 3: ["compressor", "indexer"]}


def test_the_stage_list(native: Model) -> None:
    layers = [f"layers.{n}.{s}" for n in range(4) for s in (*ATTENTION, *EXTRA[n], *REST)]
    names = [s.name for s in native.stages]
    assert names == ["embed", "rope_cache", *layers, "hc_head", "final_norm", "lm_head"]


def test_stages_have_the_harness_shape(native: Model) -> None:
    for stage in native.stages:
        assert isinstance(stage, types.Stage)
        hyper = stage.name.endswith(("_hc", "_mix"))
        assert isinstance(stage, types.DirectStage) == hyper
        module, name = stage.component.split(":")
        assert module.startswith("production.")
        assert name
        assert stage.covers == (stage.name,)
        assert stage.layer == (int(stage.name.split(".")[1]) if stage.name.startswith("layers.") else None)
        for output in stage.outputs:
            assert output.wire == f"{stage.name}.{output.name}"
            assert output.dtype in ("bf16", "fp32", "int64", "bool")
            assert output.role in ("value", "exact", "picks", "stat")


def test_every_wire_has_a_writer_before_its_reader(native: Model) -> None:
    known = {"case.input_ids", "case.positions", "case.lengths"}
    for stage in native.stages:
        assert set(stage.inputs.values()) <= known, stage.name
        known |= {output.wire for output in stage.outputs}


def test_fp32_turns_every_bf16_into_fp32(native: Model, fp32: Model) -> None:
    for a, b in zip(native.stages, fp32.stages, strict=True):
        assert "bf16" not in {*b.plan.values(), *(o.dtype for o in b.outputs)}
        assert {k: v.replace("bf16", "fp32") for k, v in a.plan.items()} == b.plan
        assert a.name == b.name
        assert a.config == b.config


def test_parameters_are_only_decoded_for_the_audit(native: Model) -> None:
    for stage in native.stages:
        decoded = stage.decoded()
        assert all(t.dtype in (torch.float64, torch.int64) for t in decoded.values())
        assert set(decoded) == {n for n in stage.params if not re.search("_scale(_2)?$", n)}


def test_config_is_plain_data(native: Model) -> None:
    core, rope = native.stage("layers.1.attn_core").config, native.stage("rope_cache").config
    assert core == {"layer_kind": "csa", "sliding_window": 16, "compress_rate": 4}
    assert rope["compress"]["yarn"]["factor"] == 16  # type: ignore[index]
    assert native.stage("layers.0.q_a").config == {}


def inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(1, 4, 64).bfloat16()}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"layers.0.q_a: inputs: expected x, came none; pass x \(wire layers.0.attn_norm.x\)"),
        ({**inputs(), "y": torch.zeros(1)}, r"layers.0.q_a: inputs: expected x, came x, y$"),
        ({"x": torch.zeros(1, 4, 64)}, r"input x: expected bf16 \[B, S, d=64\] on cpu, came fp32 \[1, 4, 64\] on cpu"),
        ({"x": torch.zeros(1, 4, 65).bfloat16()}, r"expected bf16 \[B, S, d=64\] on cpu, came bf16 \[1, 4, 65\]"),
        ({"x": torch.zeros(4, 64).bfloat16()}, r"expected bf16 \[B, S, d=64\] on cpu, came bf16 \[4, 64\]"),
        ({"x": torch.zeros(1, 4, 64, device="meta").bfloat16()}, r"on cpu, came bf16 \[1, 4, 64\] on meta"),
        ({"x": [1.0]}, r"input x: expected a tensor, came list"),
    ],
)
def test_inputs_are_checked(native: Model, given: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ProductionError, match=message):
        native.stage("layers.0.q_a").run(**given)


def test_free_dims_must_agree(native: Model) -> None:
    stage = native.stage("layers.0.moe_sum")
    with pytest.raises(
        ProductionError, match=r"input shared: expected bf16 \[B=1, S=4, d=64\] .* came bf16 \[1, 3, 64\]"
    ):
        stage.run(routed=torch.zeros(1, 4, 64).bfloat16(), shared=torch.zeros(1, 3, 64).bfloat16())


def test_overrides_are_checked_and_leave_the_stage_alone(native: Model) -> None:
    stage, x = native.stage("layers.0.q_a"), inputs()["x"]
    want = stage.run(x=x)["q_a"]
    zero = {"weight": torch.zeros_like(stage.params["weight"])}
    assert (stage.run(params=zero, x=x)["q_a"] == 0).all()
    assert torch.equal(stage.run(x=x)["q_a"], want)
    with pytest.raises(ProductionError, match=r"params: expected names among weight, weight_scale, .* came wieght"):
        stage.run(params={"wieght": zero["weight"]}, x=x)
    with pytest.raises(ProductionError, match=r"params weight: expected uint8 \[32, 32\] .* came fp32 \[32, 64\]"):
        stage.run(params={"weight": torch.zeros(32, 64)}, x=x)


def test_replay_is_only_for_stages_that_choose(native: Model) -> None:
    with pytest.raises(ProductionError, match="replay: expected nothing: this stage chooses nothing, came picks"):
        native.stage("layers.0.q_a").run(replay={"picks": torch.zeros(1, 4, 2).long()}, **inputs())
    router = native.stage("layers.2.router")
    given = {**inputs(), "input_ids": torch.zeros(1, 4, dtype=torch.int64)}
    with pytest.raises(ProductionError, match="replay: expected only 'picks', came weights"):
        router.run(replay={"weights": torch.zeros(1, 4, 2)}, **given)
    with pytest.raises(
        ProductionError, match=r"replay picks: expected int64 \[B=1, S=4, k=2\] .* came int64 \[1, 4, 3\]"
    ):
        router.run(replay={"picks": torch.zeros(1, 4, 3).long()}, **given)
    with pytest.raises(ProductionError, match=r"replay picks: expected .* came int64 \[1, 5, 2\]"):
        router.run(replay={"picks": torch.zeros(1, 5, 2).long()}, **given)
    assert router.run(replay={}, **given).keys() == {"logits", "weights", "picks"}


def test_stages_run_without_autograd_and_refuse_reduced_precision(native: Model) -> None:
    stage, x = native.stage("layers.0.q_a"), inputs()["x"].requires_grad_()
    assert not stage.run(x=x)["q_a"].requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ProductionError, match="expected no autocast"):
        stage.run(x=x)
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ProductionError, match=r"expected .*'highest', came 'medium'"):
            stage.run(x=x)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_builder_arguments(folder: synthetic.Path, native: Model) -> None:
    with pytest.raises(ProductionError, match="dtype: expected 'native' or 'fp32', came 'bf16'"):
        model(folder, dtype="bf16")
    with pytest.raises(ProductionError, match=r"layers: expected layers 0..3, came 4"):
        model(folder, layers=[0, 4])
    with pytest.raises(ProductionError, match=r"expected a stage of this model, came 'layers.0.q_c'"):
        native.stage("layers.0.q_c")
    one = model(folder, layers=[2])
    assert [s.name for s in one.stages if s.layer is not None] == [
        f"layers.2.{s}" for s in (*ATTENTION, "compressor", *REST)
    ]
    assert one.stage("layers.2.attn_hc").inputs == {"streams": "layers.1.ffn_mix.streams"}
    assert one.stage("hc_head").inputs == {"streams": "layers.3.ffn_mix.streams"}
    with pytest.raises(ProductionError, match="forward: expected all 4 layers, came layers 2; build the model without"):
        one.forward(torch.zeros(1, 3).long())
