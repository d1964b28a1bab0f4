"""The assembled model: against Hugging Face in fp32, and the invariants that need no reference."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from production.build import Model
from production.errors import ProductionError
from tests.production.synthetic import CONFIG

HF_LEAVES = {
    "attn_hc": "attn_hc.",
    "ffn_hc": "ffn_hc.",
    "attn_norm": "input_layernorm.",
    "ffn_norm": "post_attention_layernorm.",
    "q_a": "self_attn.q_a_proj.",
    "q_a_norm": "self_attn.q_a_norm.",
    "q_b": "self_attn.q_b_proj.",
    "kv": "self_attn.kv_proj.",
    "kv_norm": "self_attn.kv_norm.",
    "compressor": "self_attn.compressor.",
    "indexer": "self_attn.compressor.indexer.",
    "attn_core": "self_attn.",
    "o_a": "self_attn.o_a_proj.",
    "o_b": "self_attn.o_b_proj.",
    "router": "mlp.gate.",
    "shared_expert": "mlp.shared_experts.",
}
HF_MODEL = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}


def hugging_face(m: Model) -> Any:
    """HF's model in fp32 with production's decoded weights; a missing or left-over key is an error."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(**copy.deepcopy(CONFIG))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    state: dict[str, Tensor] = {}
    for stage in m.stages:
        decoded, at = stage.decoded(), f"model.layers.{stage.layer}."
        kind = stage.name.rsplit(".", 1)[-1]
        if stage.name == "hc_head":
            state |= {f"model.hc_head.hc_{leaf}": t for leaf, t in decoded.items()}
        elif stage.name in HF_MODEL:
            state[HF_MODEL[stage.name]] = decoded["weight"]
        elif kind == "experts":
            gate_up = torch.cat((decoded["gate_proj.weight"], decoded["up_proj.weight"]), dim=1)
            state |= {
                at + "mlp.experts.gate_up_proj": gate_up,
                at + "mlp.experts.down_proj": decoded["down_proj.weight"],
            }
        else:
            for leaf, t in decoded.items():
                leaf = "scorer." + leaf if leaf.startswith("weights_proj") else leaf
                state[at + HF_LEAVES[kind] + leaf] = t
    reference = DeepseekV4ForCausalLM(config).float().eval()
    reference.load_state_dict({k: t.float() if t.is_floating_point() else t for k, t in state.items()}, strict=True)
    return reference


@pytest.fixture(scope="module")
def reference(fp32: Model) -> Any:
    return hugging_face(fp32)


@pytest.mark.parametrize("length", [1, 3, 4, 15, 16, 17, 18, 19, 63, 97])
def test_fp32_equals_hugging_face(fp32: Model, reference: Any, length: int) -> None:
    ids = torch.randint(50, (2, length))
    with torch.no_grad():
        want = reference(ids, use_cache=False).logits
    got = fp32.forward(ids)
    assert (got - want).square().mean().sqrt() < 2e-5 * want.square().mean().sqrt()


def test_native_is_near_fp32(native: Model, fp32: Model) -> None:
    """bf16 activations move the logits by some per cent of their size, not more."""
    ids = torch.randint(50, (1, 60))
    a, b = native.forward(ids), fp32.forward(ids)
    assert 0 < (a - b).square().mean().sqrt() < 0.3 * b.square().mean().sqrt()


def test_run_twice_is_bitwise_equal_and_a_tap_changes_nothing(native: Model) -> None:
    ids = torch.randint(50, (2, 50))
    seen: dict[str, Mapping[str, Tensor]] = {}
    first, second = native.forward(ids), native.forward(ids)
    tapped = native.forward(ids, tap=seen.__setitem__)
    assert torch.equal(first, second)
    assert torch.equal(first, tapped)
    assert list(seen) == [s.name for s in native.stages]
    for stage in native.stages:
        assert set(seen[stage.name]) == {o.name for o in stage.outputs}


def test_stages_over_wires_are_the_forward_pass(native: Model) -> None:
    """Any executor over the wires gets the same bits."""
    ids = torch.randint(50, (1, 40))
    wires = {
        "case.input_ids": ids,
        "case.positions": torch.arange(40).unsqueeze(0),
        "case.lengths": torch.tensor([40]),
    }
    for stage in native.stages:
        outputs = stage.run(**{arg: wires[wire] for arg, wire in stage.inputs.items()})
        wires |= {o.wire: outputs[o.name] for o in stage.outputs}
    assert torch.equal(wires["lm_head.logits"], native.forward(ids))


def test_wires_are_freed(native: Model) -> None:
    """While layer 3 runs, nothing of layer 0 is alive except what is still to be read."""
    alive: dict[str, weakref.ref[Tensor]] = {}
    left: list[str] = []

    def tap(stage: str, outputs: Mapping[str, Tensor]) -> None:
        if stage == "layers.3.experts":
            left.extend(name for name, ref in alive.items() if ref() is not None)
        alive.update({f"{stage}.{name}": weakref.ref(t) for name, t in outputs.items()})

    native.forward(torch.randint(50, (1, 20)), tap=tap)
    expected = {"rope_cache.main_cos", "rope_cache.main_sin", "rope_cache.compress_cos", "rope_cache.compress_sin"}
    here = {f"layers.3.{w}" for w in ("ffn_norm.x", "attn_mix.streams", "ffn_hc.post", "ffn_hc.comb")}
    assert set(left) - {f"layers.3.router.{o}" for o in ("weights", "picks")} <= here | expected


def test_causality(native: Model) -> None:
    """An edit at t changes nothing before t and something at t: windows, entries and picks included."""
    ids = torch.randint(50, (1, 70))
    base = native.forward(ids)
    for t in (0, 15, 16, 47, 48, 69):
        edited = ids.clone()
        edited[0, t] = (ids[0, t] + 1) % 50
        other = native.forward(edited)
        assert torch.equal(other[:, :t], base[:, :t])
        assert not torch.equal(other[:, t:], base[:, t:])


def test_what_pads_hold_does_not_reach_valid_positions(native: Model) -> None:
    ids = torch.randint(50, (2, 45))
    lengths = torch.tensor([45, 30])
    base = native.forward(ids, lengths=lengths)
    ids[1, 30:] = torch.randint(50, (15,))
    other = native.forward(ids, lengths=lengths)
    assert torch.equal(base[0], other[0])
    assert torch.equal(base[1, :30], other[1, :30])


def test_a_padded_row_equals_the_row_alone(fp32: Model) -> None:
    ids = torch.randint(50, (3, 53))
    lengths = torch.tensor([53, 21, 6])
    together = fp32.forward(ids, lengths=lengths)
    for b, n in enumerate(lengths.tolist()):
        alone = fp32.forward(ids[b : b + 1, :n])
        assert (together[b, :n] - alone[0]).abs().max() < 1e-4 * alone.abs().max()


def test_rows_of_a_batch_are_independent(fp32: Model) -> None:
    ids = torch.randint(50, (3, 30))
    a, b = fp32.forward(ids), fp32.forward(ids.flip(0))
    assert (a - b.flip(0)).abs().max() < 1e-4 * a.abs().max()


def test_every_stage_gives_finite_numbers(native: Model) -> None:
    def tap(stage: str, outputs: Mapping[str, Tensor]) -> None:
        for name, t in outputs.items():
            ok = t.isfinite() | (t == -torch.inf) if name == "scores" else t.isfinite()
            assert ok.all(), (stage, name)

    native.forward(torch.randint(50, (2, 37)), tap=tap)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3).long(),), r"input_ids: expected int64 \[B, S\] with B, S >= 1, came \[3\]"),
        ((torch.zeros(1, 0).long(),), r"input_ids: expected int64 \[B, S\] with B, S >= 1, came \[1, 0\]"),
        (([[1, 2]],), "input_ids: expected int64 .* came list"),
        ((torch.zeros(1, 3),), r"embed: input input_ids: expected int64 \[B, S\]"),
        ((torch.full((1, 3), 50),), r"embed: input_ids: expected token ids 0..49, came 50..50"),
        ((torch.zeros(1, 3).long(), torch.zeros(1, 2).long()), r"positions: expected \[1, 3\], came \[1, 2\]"),
        ((torch.zeros(1, 3).long(), None, torch.tensor([3, 3])), r"lengths: expected \[1\], came \[2\]"),
        ((torch.zeros(1, 3).long(), None, torch.tensor([4])), r"attn_core: lengths: expected 0..3, came \[4\]"),
    ],
)
def test_bad_calls(native: Model, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ProductionError, match=message):
        native.forward(*arguments)
