"""Certification holds on the unmodified model and falls with any patch of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations import moe

from harness.types import Check, UsageError
from reference import build, capture, hf
from reference.certify import first_difference
from tests.reference.conftest import LENGTH, compose

M = hf.modeling


def failed(side: build.HFReference, case: Mapping[str, Tensor], wires: Mapping[str, Tensor]) -> dict[str, str]:
    return {check.name: check.detail for check in side.certify(case, wires) if not check.ok}


@pytest.mark.parametrize("which", ["native", "single"])
def test_clean(which: str, request: pytest.FixtureRequest, case: Mapping[str, Tensor]) -> None:
    side: build.HFReference = request.getfixturevalue(which)
    checks = list(side.certify(case, compose(side, case)))
    assert all(check.ok for check in checks), checks
    names = [check.name for check in checks]
    assert names[:4] == ["eager settings", "unmodified Hugging Face code", "taps change nothing", "masks"]
    assert names[4:] == ["wires: model scope"] + [f"{w}: layers.{n}" for n in range(4) for w in ("wires", "output")]


def test_every_wire_that_can_be_seen_is_seen(
    native: build.HFReference, case: Mapping[str, Tensor], wires: Mapping[str, Tensor]
) -> None:
    seen = capture.capture(native.net, case["input_ids"], case["positions"]).wires
    missing = {w.split(".", 2)[2] if w.startswith("layers") else w for w in wires if w not in seen}
    assert missing == {
        "case.input_ids",
        "case.positions",
        "case.lengths",
        "hc_head.pre",
        "attn_hc.pre",
        "ffn_hc.pre",
        "attn_core.lse",
        "attn_core.entropy",
        "attn_core.sink_mass",
        "experts.gate",
        "experts.up",
        "experts.act",
        "experts.down",
    }
    assert set(seen) <= set(wires)


def test_a_run_of_some_layers(
    native: build.HFReference, case: Mapping[str, Tensor], wires: Mapping[str, Tensor]
) -> None:
    """Only the wires given are compared, and the model stops after the last of them."""
    some = {w: v for w, v in wires.items() if w.startswith(("layers.0.", "layers.1.attn", "embed"))}
    names = [check.name for check in native.certify(case, some) if check.ok]
    assert names[4:] == ["wires: model scope", "wires: layers.0", "output: layers.0", "wires: layers.1"]


def test_one_changed_element(
    native: build.HFReference, case: Mapping[str, Tensor], wires: Mapping[str, Tensor]
) -> None:
    for wire in (
        "layers.2.compressor.pooled",
        "layers.1.indexer.picks",
        "layers.0.attn_core.visible",
        "hc_head.collapsed",
    ):
        changed = wires[wire].clone()
        flat = changed.view(-1)
        flat[3] = ~flat[3] if changed.dtype is torch.bool else flat[3] + 1
        found = failed(native, case, {**wires, wire: changed})
        assert len(found) == 1
        assert wire in next(iter(found.values()))
        assert "3]: " in next(iter(found.values()))


def test_the_sign_of_zero_counts() -> None:
    assert first_difference(torch.tensor([0.0]), torch.tensor([-0.0])) is not None
    assert first_difference(torch.tensor([torch.nan]), torch.tensor([torch.nan])) is None
    assert "float32 [1], bfloat16 [1]" in str(first_difference(torch.zeros(1), torch.zeros(1).bfloat16()))


def test_nothing_to_compare(native: build.HFReference, case: Mapping[str, Tensor]) -> None:
    assert "wires" in failed(native, case, {"case.input_ids": case["input_ids"]})


def test_an_unknown_wire(native: build.HFReference, case: Mapping[str, Tensor]) -> None:
    found = failed(native, case, {"layers.0.invented.x": torch.ones(2)})
    assert "no such tensor" in found["wires: layers.0"]


def test_incomplete_case(native: build.HFReference, case: Mapping[str, Tensor]) -> None:
    with pytest.raises(UsageError, match="came no lengths"):
        native.certify({k: v for k, v in case.items() if k != "lengths"}, {})
    with pytest.raises(UsageError, match="ragged"):
        native.certify({**case, "lengths": torch.tensor([LENGTH, 3])}, {})


def first_layer(wires: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Enough to certify with, and quick: the model is run for one layer."""
    return {wire: value for wire, value in wires.items() if wire.startswith("layers.0.")}


def scaled(plain: Callable[..., Any], where: int) -> Callable[..., Any]:
    """A plausible patch: the same result with one part of it a little larger, in the disguise of the original."""

    @functools.wraps(plain)
    def patched(*arguments: Any, **keywords: Any) -> Any:
        result = plain(*arguments, **keywords)
        if isinstance(result, tuple):
            return tuple(value * 1.01 if i == where else value for i, value in enumerate(result))
        return result * 1.01 if isinstance(result, Tensor) else result

    return patched


PATCHES: dict[str, tuple[Any, str, int]] = {
    "decoder layer": (M.DeepseekV4DecoderLayer, "forward", 0),
    "attention": (M.DeepseekV4Attention, "forward", 0),
    "hyper-connection": (M.DeepseekV4HyperConnection, "forward", 0),
    "hyper head": (M.DeepseekV4HyperHead, "forward", 0),
    "norm": (M.DeepseekV4RMSNorm, "forward", 0),
    "unweighted norm": (M.DeepseekV4UnweightedRMSNorm, "forward", 0),
    "rotary": (M.DeepseekV4RotaryEmbedding, "forward", 0),
    "indexer scorer": (M.DeepseekV4IndexerScorer, "forward", 0),
    "compressor": (M.DeepseekV4CSACompressor, "forward", 0),
    "router": (M.DeepseekV4TopKRouter, "forward", 1),
    "experts": (M.DeepseekV4Experts, "forward", 0),
    "gate of the experts": (M.DeepseekV4Experts, "_apply_gate", 0),
    "shared expert": (M.DeepseekV4MLP, "forward", 0),
    "block": (M.DeepseekV4SparseMoeBlock, "forward", 0),
    "model": (M.DeepseekV4ForCausalLM, "forward", 0),
    "attention function": (M, "eager_attention_forward", 0),
    "rotation": (M, "apply_rotary_pos_emb", 0),
    "mask": (hf.masking, "eager_mask", 0),
}


@pytest.mark.parametrize("name", PATCHES)
def test_patched_code(
    name: str,
    native: build.HFReference,
    case: Mapping[str, Tensor],
    wires: Mapping[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, attribute, where = PATCHES[name]
    monkeypatch.setattr(owner, attribute, scaled(getattr(owner, attribute), where))
    found = failed(native, case, first_layer(wires))
    assert attribute in found["unmodified Hugging Face code"]
    assert __file__ in found["unmodified Hugging Face code"]


def test_a_patched_decoder_layer_is_seen_in_the_numbers_too(
    native: build.HFReference, case: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = M.DeepseekV4DecoderLayer
    monkeypatch.setattr(layer, "forward", scaled(layer.forward, 0))
    found = failed(native, case, compose(native, case))
    assert "layers.0.ffn_mix.streams: composed and Hugging Face differ at [" in found["output: layers.0"]


def test_an_instance_with_a_forward_of_its_own(
    native: build.HFReference, case: Mapping[str, Tensor], wires: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = native.net.layer(1).input_layernorm
    monkeypatch.setattr(norm, "forward", lambda x: x, raising=False)
    found = failed(native, case, first_layer(wires))
    assert "model.layers.1.input_layernorm has a forward of its own" in found["unmodified Hugging Face code"]


def test_a_foreign_hook(native: build.HFReference, case: Mapping[str, Tensor], wires: Mapping[str, Tensor]) -> None:
    handle = native.net.layer(1).mlp.register_forward_hook(lambda *_: None)
    try:
        assert (
            "model.layers.1.mlp has hooks" in failed(native, case, first_layer(wires))["unmodified Hugging Face code"]
        )
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", ["attention", "experts"])
def test_a_function_registered_as_eager(
    kind: str, native: build.HFReference, case: Mapping[str, Tensor], wires: Mapping[str, Tensor]
) -> None:
    registry = type(M.ALL_ATTENTION_FUNCTIONS if kind == "attention" else moe.ALL_EXPERTS_FUNCTIONS)
    plain = M.eager_attention_forward if kind == "attention" else M.DeepseekV4Experts.forward.__wrapped__
    registry.register("eager", scaled(plain, 0))
    try:
        found = failed(native, case, first_layer(wires))
    finally:
        registry._global_mapping.pop("eager")
    assert f"registered as eager {kind}" in found["unmodified Hugging Face code"]


def test_a_call_of_its_own(
    native: build.HFReference, case: Mapping[str, Tensor], wires: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(M.DeepseekV4RMSNorm, "__call__", lambda self, x: x, raising=False)
    found = failed(native, case, first_layer(wires))
    assert "DeepseekV4RMSNorm.__call__ comes from" in found["unmodified Hugging Face code"]


def test_a_global_hook(native: build.HFReference, case: Mapping[str, Tensor], wires: Mapping[str, Tensor]) -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "global" in failed(native, case, first_layer(wires))["unmodified Hugging Face code"]
    finally:
        handle.remove()


def test_a_patch_that_breaks_the_model(
    native: build.HFReference, case: Mapping[str, Tensor], wires: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(M.DeepseekV4DecoderLayer, "forward", lambda self, x, **_: None)
    found = failed(native, case, first_layer(wires))
    assert "its forward raised AttributeError" in found["the model runs"]
    assert "DeepseekV4DecoderLayer.forward" in found["unmodified Hugging Face code"]


def test_positions_that_do_not_begin_at_zero(native: build.HFReference, case: Mapping[str, Tensor]) -> None:
    moved = {**case, "positions": case["positions"] + 4}
    with pytest.raises(UsageError, match=r"expected 0\.\.132 in every row, came rows that begin at \[4, 4\]"):
        native.certify(moved, {"layers.1.q_a.q_a": torch.zeros(1)})
    sliding = build.model(native.net.checkpoint.folder, layers=[0])
    assert all(check.ok for check in sliding.certify(moved, compose(sliding, moved)))


def test_a_replaced_module(
    native: build.HFReference, case: Mapping[str, Tensor], wires: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(M.DeepseekV4RMSNorm):  # type: ignore[misc]
        pass

    norm = native.net.layer(1).input_layernorm
    monkeypatch.setattr(norm, "__class__", Mine)
    assert "Mine" in failed(native, case, first_layer(wires))["unmodified Hugging Face code"]


@pytest.mark.parametrize("setting", ["_attn_implementation", "_experts_implementation"])
def test_other_implementations(
    setting: str, native: build.HFReference, case: Mapping[str, Tensor], wires: Mapping[str, Tensor]
) -> None:
    config = native.net.model.config
    setattr(config, setting, "sdpa" if "attn" in setting else "grouped_mm")
    try:
        assert setting.strip("_") in failed(native, case, first_layer(wires))["eager settings"]
    finally:
        setattr(config, setting, "eager")


def test_the_mask_trap(native: build.HFReference, case: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention registered without its mask function is not causal, and certification would say so."""
    ids, positions = case["input_ids"], case["positions"]
    good = capture.capture(native.net, ids, positions)
    assert all(mask is not None for mask in good.masks.values())
    plain = capture.forward(native.net, ids, positions)
    assert torch.equal(good.logits, plain)  # type: ignore[arg-type]
    edited = ids.clone()
    edited[:, 100] = (edited[:, 100] + 1) % 48
    after = capture.capture(native.net, edited, positions).logits
    assert after is not None
    assert torch.equal(after[:, :100], plain[:, :100])

    monkeypatch.setattr(type(hf.masking.ALL_MASK_ATTENTION_FUNCTIONS), "register", lambda *_: None)
    from reference.certify import masks

    bad = capture.capture(native.net, ids, positions)
    assert bad.logits is not None
    assert not torch.equal(bad.logits, plain)
    assert masks(bad) == Check("masks", False, "layers.0: attention was called without a mask: it is not causal")


def test_taps_are_gone_afterwards(native: build.HFReference, case: Mapping[str, Tensor]) -> None:
    capture.capture(native.net, case["input_ids"], case["positions"])
    assert capture.NAME not in hf.modeling.ALL_ATTENTION_FUNCTIONS
    assert capture.NAME not in hf.masking.ALL_MASK_ATTENTION_FUNCTIONS
    assert native.net.model.config._attn_implementation == "eager"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in native.net.model.modules())


def test_taps_are_gone_after_a_failure(native: build.HFReference, case: Mapping[str, Tensor]) -> None:
    with pytest.raises(IndexError):
        capture.capture(native.net, case["input_ids"] + 1000, case["positions"])
    test_taps_are_gone_afterwards(native, case)
