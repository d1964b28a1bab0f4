"""Every planted defect is one finding: its kind, the tensor it names, and what it would do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases.checkpoints.verify import Report, verify
from tests.checkpoints.conftest import Made, cut_short, drop, patch, rewrite, shard_of

EXPERT = "layers.1.ffn.experts.1"
HF_EXPERT = "model.layers.1.mlp.experts.1"
Change = Callable[[Tensor], Tensor]


def byte(value: int, at: int = 3) -> Change:
    """One byte replaced."""

    def change(t: Tensor) -> Tensor:
        t.view(-1).view(torch.uint8)[at] = value
        return t

    return change


def filled(value: int, share: float = 1.0) -> Change:
    """The first bytes replaced."""

    def change(t: Tensor) -> Tensor:
        raw = t.view(-1).view(torch.uint8)
        raw[: int(share * raw.numel())] = value
        return t

    return change


def constant(value: float) -> Change:
    return lambda t: torch.full_like(t, value)


def shown(report: Report) -> list[tuple[str, str]]:
    assert all(f.effect and "expected " in f.text for f in report.findings)
    assert all("\n" not in f.line and f.tensors[0] in f.line for f in report.findings)
    return [(finding.kind, finding.tensors[0]) for finding in report.findings]


DEFECTS: list[tuple[str, str, Change, str]] = [
    ("modelopt-experts", f"{EXPERT}.w3.weight_scale_2", lambda t: t * 1.5, "gate and up scales differ"),
    ("modelopt-experts", f"{EXPERT}.w3.input_scale", lambda t: t * 1.5, "gate and up input scales differ"),
    ("modelopt-experts", f"{EXPERT}.w2.weight_scale_2", lambda t: 1 / t, "reciprocal scale"),
    ("modelopt-experts", f"{EXPERT}.w2.weight_scale_2", constant(0.0), "zero scale"),
    ("modelopt-experts", f"{EXPERT}.w2.weight_scale_2", constant(float("nan")), "NaN scale"),
    ("modelopt-experts", f"{EXPERT}.w2.weight_scale_2", constant(float("inf")), "bad scale"),
    ("modelopt-experts", f"{EXPERT}.w2.weight_scale_2", lambda t: -t, "bad scale"),
    ("modelopt-experts", f"{EXPERT}.w2.input_scale", constant(1.0), "input scale 1.0"),
    ("modelopt-experts", f"{EXPERT}.w2.input_scale", constant(0.0), "bad input scale"),
    ("modelopt-experts", f"{EXPERT}.w2.input_scale", lambda t: 1 / t, "reciprocal input scale"),
    ("modelopt-experts", f"{EXPERT}.w2.weight_scale", byte(0x7F), "NaN scale"),
    ("modelopt-experts", f"{EXPERT}.w2.weight_scale", byte(0x00), "zero scale"),
    ("modelopt-experts", f"{EXPERT}.w2.weight_scale", byte(0x85), "negative scale"),
    ("modelopt-experts", f"{EXPERT}.w2.weight_scale", filled(0x7E, 0.2), "saturated scale"),
    ("modelopt-experts", f"{EXPERT}.w2.weight", filled(0x88), "all zero"),
    ("compressed-tensors", f"{HF_EXPERT}.up_proj.weight_global_scale", lambda t: t * 2, "gate and up scales differ"),
    ("compressed-tensors", f"{HF_EXPERT}.down_proj.weight_global_scale", lambda t: 1 / t, "reciprocal scale"),
    ("compressed-tensors", f"{HF_EXPERT}.down_proj.input_global_scale", constant(1.0), "input scale 1.0"),
    ("compressed-tensors", "model.layers.1.self_attn.kv_proj.weight_scale", constant(0.0), "zero scale"),
    ("compressed-tensors", "model.layers.1.self_attn.kv_proj.weight_scale", constant(float("nan")), "NaN scale"),
    ("compressed-tensors", "model.layers.1.self_attn.kv_proj.weight_scale", lambda t: -t, "negative scale"),
    ("deepseek", "layers.1.attn.wkv.weight", byte(0xFF), "not finite"),
    ("deepseek", "layers.1.attn.wkv.weight", filled(0x7E, 0.5), "saturated"),
    ("deepseek", "layers.1.attn.wkv.weight", filled(0x80), "all zero"),
    ("deepseek", "layers.1.attn.wkv.scale", byte(255, 0), "NaN scale"),
    ("deepseek", "layers.1.attn.wkv.scale", byte(254, 0), "saturated scale"),
    ("deepseek", "layers.1.attn.wkv.scale", byte(0, 0), "zero scale"),
    ("deepseek", f"{EXPERT}.w1.scale", byte(255), "NaN scale"),
    ("deepseek", f"{EXPERT}.w1.scale", byte(0), "zero scale"),
    ("deepseek", "layers.0.ffn.gate.tid2eid", lambda t: t + 1, "expert out of range"),
    ("deepseek", "layers.0.ffn.gate.tid2eid", lambda t: -1 - t, "expert out of range"),
    ("deepseek", "layers.0.ffn.gate.tid2eid", constant(0), "all zero"),
    ("deepseek", "layers.0.ffn.gate.tid2eid", constant(1), "expert twice"),
    ("deepseek", "layers.0.ffn.gate.tid2eid", lambda t: torch.tensor([0, 1]).expand_as(t), "expert never used"),
    ("deepseek", "layers.1.attn.attn_sink", constant(0.0), "all zero"),
    ("deepseek", "layers.1.ffn.gate.bias", constant(0.0), "all zero"),
    ("deepseek", "layers.2.attn.compressor.ape", constant(0.0), "all zero"),
    ("deepseek", "layers.1.attn_norm.weight", constant(1.0), "all one"),
    ("deepseek", "layers.1.hc_ffn_scale", constant(1.0), "all one"),
    ("deepseek", "embed.weight", lambda t: t.fill_(float("nan")), "not finite"),
    ("hf", "model.layers.1.mlp.experts.gate_up_proj", constant(0.0), "all zero"),
    ("hf", "model.layers.1.self_attn.sinks", constant(0.0), "all zero"),
]


@pytest.mark.parametrize(("layout", "name", "change", "kind"), DEFECTS)
def test_a_value_that_cannot_be(copy: Made, layout: str, name: str, change: Change, kind: str) -> None:
    folder = copy(layout)
    patch(folder, name, change)
    assert shown(verify(folder)) == [(kind, name)]
    assert verify(folder, values=False).findings == ()  # headers say nothing about values


def test_an_unused_block_may_have_any_scale(copy: Made) -> None:
    """A packer may write 2^-127 for a block of zeros."""
    folder = copy("deepseek")

    def empty(t: Tensor) -> Tensor:
        t.view(torch.uint8)[0, :16] = 0
        return t

    patch(folder, f"{EXPERT}.w1.weight", empty)
    patch(folder, f"{EXPERT}.w1.scale", byte(0, 0))
    assert verify(folder).findings == ()


def test_the_factor_between_gate_and_up_is_said(copy: Made) -> None:
    folder = copy("modelopt-experts")
    patch(folder, f"{EXPERT}.w3.weight_scale_2", lambda t: t * 4)
    (finding,) = verify(folder).findings
    assert "(4 x)" in finding.text
    assert "fused gate and up" in finding.effect


def test_swapped_scales_of_a_whole_checkpoint_are_one_entry_a_leaf(copy: Made) -> None:
    folder = copy("modelopt-experts")
    for layer in range(3):
        for expert in range(3):
            for leaf in ("w1", "w2", "w3"):
                patch(folder, f"layers.{layer}.ffn.experts.{expert}.{leaf}.weight_scale_2", lambda t: 1 / t)
    found = verify(folder).findings
    assert {finding.kind for finding in found} == {"reciprocal scale"}
    assert sum(finding.count for finding in found) == 27


def test_the_same_expert_twice(copy: Made) -> None:
    folder = copy("modelopt-experts")
    other: list[Tensor] = []
    patch(folder, "layers.1.ffn.experts.0.w2.weight", lambda t: (other.append(t.clone()), t)[1])
    patch(folder, f"{EXPERT}.w2.weight", lambda t: other[0])
    assert shown(verify(folder)) == [("same expert twice", f"{EXPERT}.w2.weight")]


def test_three_defects_are_three_findings(copy: Made) -> None:
    """One w3 scale changed, one shard cut short, one expert missing."""
    folder = copy("modelopt-all")
    drop(folder, lambda name: name.startswith("layers.2.ffn.experts.1."))
    patch(folder, f"{EXPERT}.w3.weight_scale_2", lambda t: t * 2)
    cut = shard_of(folder, "layers.0.attn.wo_b.weight")
    assert cut != shard_of(folder, f"{EXPERT}.w3.weight_scale_2")
    cut_short(cut, 100)
    assert shown(verify(folder)) == [
        ("broken shard", cut.name),
        ("gate and up scales differ", f"{EXPERT}.w3.weight_scale_2"),
        ("missing", "layers.2.ffn.experts.1.w1.weight"),
    ]


@pytest.mark.parametrize(
    ("layout", "name", "effect"),
    [
        ("deepseek", "layers.1.attn.attn_sink", "without sinks"),
        ("deepseek", "layers.1.attn.wkv.scale", "keys and values"),
        ("deepseek", "head.weight", "logits are wrong"),
        ("hf", "model.layers.1.mlp.experts.down_proj", "output of this MLP"),
        ("hf-saved", "model.layers.1.attn.norm.weight", "scale per channel"),
        ("modelopt-all", f"{EXPERT}.w1.weight_scale_2", "gate of this MLP"),
    ],
)
def test_a_missing_tensor(copy: Made, layout: str, name: str, effect: str) -> None:
    folder = copy(layout)
    drop(folder, lambda n: n == name)
    (finding,) = verify(folder).findings
    assert (finding.kind, finding.tensors) == ("missing", (name,))
    assert effect in finding.effect


def test_weights_only(copy: Made) -> None:
    folder = copy("modelopt-experts")
    drop(folder, lambda name: name.endswith("input_scale"))
    found = verify(folder).findings
    assert {finding.kind for finding in found} == {"input scale missing"}
    assert sum(finding.count for finding in found) == 27
    assert found[0].tensors[0] == "layers.0.ffn.experts.0.w1.input_scale"


def test_unexpected_and_misshapen_tensors(copy: Made) -> None:
    folder = copy("hf-experts")

    def change(content: dict[str, Tensor]) -> dict[str, Tensor]:
        if "model.layers.1.self_attn.sinks" in content:
            content["model.layers.1.self_attn.sinks"] = torch.ones(1, 4)
            content["model.layers.9.extra"] = torch.ones(2)
        if "lm_head.weight" in content:
            content["lm_head.weight"] = content["lm_head.weight"].half()
        return content

    rewrite(folder, change)
    assert sorted(shown(verify(folder))) == [
        ("unexpected", "model.layers.9.extra"),
        ("wrong dtype", "lm_head.weight"),
        ("wrong shape", "model.layers.1.self_attn.sinks"),
    ]


def test_files_and_index(copy: Made) -> None:
    folder = copy("deepseek")
    first, second, *_ = sorted(path.name for path in folder.glob("*.safetensors"))
    (folder / "model-00099-of-00099.safetensors").write_bytes((folder / first).read_bytes())
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    moved = next(name for name, shard in raw["weight_map"].items() if shard == first)
    raw["weight_map"][moved] = second
    del raw["weight_map"]["head.weight"]
    raw["weight_map"]["layers.7.ghost"] = second
    raw["weight_map"]["layers.8.ghost"] = "../elsewhere.safetensors"
    raw["metadata"]["total_size"] += 1
    index.write_text(json.dumps(raw))
    found = verify(folder).findings
    kinds = [(finding.kind, finding.tensors[0]) for finding in found]
    assert ("dangling shard", "model-00099-of-00099.safetensors") in kinds
    assert ("index", moved) in kinds
    assert ("index", "head.weight") in kinds
    assert ("index", "layers.8.ghost") in kinds
    assert ("index", "model.safetensors.index.json") in kinds
    assert any("not followed" in finding.text for finding in found)


def test_a_tensor_in_two_shards(copy: Made) -> None:
    folder = copy("hf")
    (folder / "model.safetensors.index.json").unlink()
    first = sorted(folder.glob("*.safetensors"))[0]
    (folder / "model-00098-of-00099.safetensors").write_bytes(first.read_bytes())
    (folder / "model-00099-of-00099.safetensors").symlink_to(first)
    kinds = {finding.kind for finding in verify(folder).findings}
    assert {"duplicate tensor", "duplicate shard", "index"} <= kinds


def test_an_unreadable_shard_is_one_finding(copy: Made) -> None:
    folder = copy("deepseek")
    shard = shard_of(folder, f"{EXPERT}.w1.weight")
    shard.write_bytes(b"\xff" * 64)
    assert shown(verify(folder)) == [("unreadable shard", shard.name)]
    shard.unlink()
    assert shown(verify(folder)) == [("unreadable shard", shard.name)]


def test_draft_modules(tmp_path: Path) -> None:
    from cases.checkpoints.layout import LAYOUTS
    from cases.checkpoints.make import make
    from cases.checkpoints.presets import TINY, cut

    folder = tmp_path / "draft"
    make(folder, cut(TINY, [2], experts=2, draft=True), LAYOUTS["modelopt-experts"], seed=1)
    report = verify(folder)
    assert report.findings == ()
    assert report.draft == "51 tensors, set aside"
    drop(folder, lambda name: name == "mtp.0.h_proj.weight")
    assert [(f.kind, f.tensors[0]) for f in verify(folder).findings] == [("missing", "mtp.0.h_proj.weight")]
    rewrite(folder, lambda c: {**c, "mtp.0.markov.weight": torch.ones(2)})
    report = verify(folder)
    assert report.findings == ()
    assert "another draft module" in report.draft
