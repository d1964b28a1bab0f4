"""The model that is built is the one transformers itself would load, and its stages say what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

from harness.types import DirectStage, Reference, Stage, UsageError
from reference import build, hf, rope
from reference.manifest import entries
from reference.nvfp4 import decode, to_bfloat16
from tests.reference.conftest import write


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("native", torch.bfloat16), ("fp32", torch.float32)])
def test_the_model_is_the_one_from_pretrained_builds(tmp_path: Path, dtype: str, torch_dtype: torch.dtype) -> None:
    """On a checkpoint without NVFP4, which transformers can read: names, dtypes, values, buffers and logits."""
    folder = write(tmp_path, pack=False, config={"quantization_config": None})
    ours = build.model(folder, dtype=dtype).net.model  # type: ignore[arg-type]
    theirs, info = DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch_dtype, output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for kind in ("named_parameters", "named_buffers"):
        mine, yours = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        assert mine.keys() == yours.keys()
        for name, value in yours.items():
            assert mine[name].dtype == value.dtype, name
            assert torch.equal(mine[name], value), name
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_protocols(native: build.HFReference) -> None:
    reference: Reference = native  # the type checker's part
    assert reference.logical_dtype() == "bf16"
    for stage in [*native.stages, *native.oracle().stages]:
        assert isinstance(stage, Stage)
        assert isinstance(stage, DirectStage) == stage.name.endswith(("_hc", "_mix"))


def test_both_sides_list_the_same(native: build.HFReference) -> None:
    theirs = native.oracle().stages
    assert [s.name for s in native.stages] == [s.name for s in theirs]
    for mine, other in zip(native.stages, theirs, strict=True):
        assert mine.inputs == other.inputs
        assert [(o.wire, o.dims, o.role) for o in mine.outputs] == [(o.wire, o.dims, o.role) for o in other.outputs]


def test_every_wire_has_a_source(native: build.HFReference) -> None:
    known = {"case.input_ids", "case.positions", "case.lengths"}
    for stage in native.stages:
        assert set(stage.inputs.values()) <= known, stage.name
        known |= {port.wire for port in stage.outputs}


def test_provenance(native: build.HFReference, checkpoint: Path) -> None:
    facts = native.provenance
    assert facts["attention"] == facts["experts"] == "eager"
    assert facts["checkpoint"] == str(checkpoint)
    assert len(facts["checkpoint_sha256"]) == 64
    assert {"transformers", "torch", "python", "dtype", "device"} <= facts.keys()
    assert all(isinstance(value, str) for value in facts.values())
    assert native.oracle().provenance["dtype"] == "float64"


def test_fewer_layers(checkpoint: Path) -> None:
    part = build.model(checkpoint, layers=[1])
    names = {stage.name for stage in part.stages}
    assert "layers.1.ffn_mix" in names
    assert not any(name.startswith("layers.2") for name in names)
    assert "lm_head" not in names
    assert part.provenance["layers"] == "2 of 4"
    assert "lm_head" in {stage.name for stage in build.model(checkpoint, layers=[3]).stages}


def test_every_parameter_belongs_to_one_stage(native: build.HFReference) -> None:
    shown = sum(p.numel() for s in native.stages for p in s.params.values())
    model = native.net.model
    assert shown == sum(t.numel() for t in model.state_dict().values())


def test_parameters_by_leaf(native: build.HFReference) -> None:
    by_name = {s.name: s for s in native.stages}
    assert set(by_name["layers.1.indexer"].params) == {
        "kv_proj.weight",
        "gate_proj.weight",
        "position_bias",
        "kv_norm.weight",
        "q_b_proj.weight",
        "weights_proj.weight",
    }
    assert set(by_name["layers.0.router"].params) == {"weight", "tid2eid"}
    assert set(by_name["layers.1.router"].params) == {"weight", "e_score_correction_bias"}
    experts = by_name["layers.2.experts"].params
    assert {leaf: list(p.shape) for leaf, p in experts.items()} == {
        "gate_proj.weight": [6, 32, 64],
        "up_proj.weight": [6, 32, 64],
        "down_proj.weight": [6, 64, 32],
    }


def test_decoded_is_exact(native: build.HFReference, single: build.HFReference) -> None:
    """float64 values of which the model's parameters are the nearest bfloat16 and float32."""
    for mine, other in zip(native.stages, single.stages, strict=True):
        exact = mine.decoded()
        assert exact.keys() == mine.params.keys()
        for leaf, value in exact.items():
            if leaf == "tid2eid":
                assert torch.equal(value, mine.params[leaf])
                continue
            assert value.dtype is torch.float64
            nearest = value.float() if mine.params[leaf].dtype is torch.float32 else to_bfloat16(value)
            assert torch.equal(mine.params[leaf], nearest), (mine.name, leaf)
            assert torch.equal(other.params[leaf], value.float()), (mine.name, leaf)


def test_expert_order(native: build.HFReference) -> None:
    stack = next(s for s in native.stages if s.name == "layers.3.experts").decoded()
    checkpoint = native.net.checkpoint
    for expert in range(6):
        for w, leaf in (("w1", "gate_proj.weight"), ("w2", "down_proj.weight"), ("w3", "up_proj.weight")):
            stem = f"layers.3.ffn.experts.{expert}.{w}"
            parts = (checkpoint.shards.tensor(f"{stem}.{p}") for p in ("weight", "weight_scale", "weight_scale_2"))
            assert torch.equal(stack[leaf][expert], decode(*parts))


def test_oracle_holds_the_decoded_weights(native: build.HFReference) -> None:
    for stage in native.oracle().stages:
        exact = stage.decoded()
        for leaf, value in stage.params.items():
            assert torch.equal(value, exact[leaf]), (stage.name, leaf)


def test_manifest_names_are_unique(native: build.HFReference) -> None:
    names = [entry.name for entry in entries(native.net.geometry)]
    assert len(names) == len(set(names)) == 6 + 4 * (15 + 3 + 3 + 18) + 3 * 4 + 2 * 6


def test_frequencies(native: build.HFReference) -> None:
    """Against transformers' float32 ones, and against the definition at 50 digits."""
    mpmath = pytest.importorskip("mpmath")
    table = rope.frequencies(native.net.geometry)
    rotary = native.net.model.model.rotary_emb
    for name, value in table.items():
        own: Tensor = getattr(rotary, f"{name}_inv_freq").double()
        assert bool(((value - own).abs() <= 4e-7 * value).all())
    with mpmath.workdps(50):
        for i, value in enumerate(table["main"].tolist()):
            assert abs(value / mpmath.mpf(10000) ** (-mpmath.mpf(i) / 8) - 1) < 1e-15
        turns = [64 / (2 * mpmath.pi) * mpmath.mpf(160000) ** (-mpmath.mpf(i) / 8) for i in range(8)]
    # YaRN: pairs of more than 32 turns over the original context are kept, those of less than one are slowed 16 times.
    plain = [160000 ** (-i / 8) for i in range(8)]
    for i, value in enumerate(table["compress"].tolist()):
        assert plain[i] / 16 <= value * (1 + 1e-15)
        assert value <= plain[i] * (1 + 1e-15)
        if turns[i] < 160000 ** (-1 / 8):
            assert value == pytest.approx(plain[i] / 16, rel=1e-14)


@pytest.mark.parametrize(
    ("found", "good"), [("5.19.3", False), ("4.60.0", False), ("5.20.0", True), ("6.0.0.dev0", True)]
)
def test_an_old_transformers_is_bad_input(found: str, good: bool) -> None:
    if good:
        hf.require_version(found)
        return
    with pytest.raises(UsageError, match=rf"expected 5\.20 or later, came {found}"):
        hf.require_version(found)
