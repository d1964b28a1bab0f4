"""config.json: what is read, what is derived, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from production.config import Rope, Yarn, parse_config, read_config
from production.errors import ProductionError
from tests.production.synthetic import CONFIG

RATIOS = {k: v for k, v in CONFIG.items() if k not in ("layer_types", "compress_rates")}


def with_ratios(*ratios: int, **changes: Any) -> dict[str, Any]:
    return {**RATIOS, "compress_ratios": list(ratios), **changes}


def test_reads_the_schedule_from_layer_types() -> None:
    config = parse_config(CONFIG)
    assert config.layer_kinds == ("sliding", "csa", "hca", "csa")
    assert config.router_kinds == ("hash", "hash", "dense", "dense")
    assert [config.compress_rate(n) for n in range(4)] == [0, 4, 16, 4]
    assert config.unread == ()


@pytest.mark.parametrize("ratios", [(0, 4, 128, 4), (0, 4, 128, 4, 0)])
def test_compress_ratios_are_cut_to_the_layers(ratios: tuple[int, ...]) -> None:
    config = parse_config(with_ratios(*ratios))
    assert config.layer_kinds == ("sliding", "csa", "hca", "csa")
    assert (config.csa_rate, config.hca_rate) == (4, 128)


def test_ropes() -> None:
    config = parse_config(CONFIG)
    assert config.main_rope == Rope(10000.0, 16)
    assert config.compress_rope == Rope(160000.0, 16, Yarn(16.0, 64, 32.0, 1.0))
    assert parse_config({**CONFIG, "rope_scaling": None}).compress_rope.yarn is None


def test_nested_rope_parameters_say_the_same() -> None:
    nested = {
        "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5},
        "compress": {**CONFIG["rope_scaling"], "rope_theta": 160000, "attention_factor": 1.0},
    }
    raw = {k: v for k, v in CONFIG.items() if k not in ("rope_scaling", "qk_rope_head_dim")}
    raw |= {"rope_parameters": nested, "partial_rotary_factor": 0.5}
    assert parse_config(raw).compress_rope == parse_config(CONFIG).compress_rope
    assert parse_config(raw).main_rope == parse_config(CONFIG).main_rope
    del nested["compress"]["attention_factor"]
    with pytest.raises(ProductionError, match=r"attention_factor: expected 1.0, came no such key"):
        parse_config(raw)


def test_unread_keys_are_named() -> None:
    assert parse_config({**CONFIG, "novelty": 1}).unread == ("novelty",)


def yarn(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, "rope_scaling": {**CONFIG["rope_scaling"], **changes}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**CONFIG, "model_type": "deepseek_v41"}, "expected 'deepseek_v4', came 'deepseek_v41'; DeepSeek-V4.1 is"),
        ({**CONFIG, "model_type": "llama"}, "model_type: expected 'deepseek_v4', came 'llama'"),
        ({k: v for k, v in CONFIG.items() if k != "head_dim"}, "head_dim: expected an integer >= 1, came no such key"),
        ({**CONFIG, "hidden_size": 64.0}, "hidden_size: expected an integer >= 1, came 64.0"),
        ({**CONFIG, "hidden_size": True}, "hidden_size: expected an integer >= 1, came True"),
        ({**CONFIG, "hc_eps": "small"}, "hc_eps: expected a number >= 0, came 'small'"),
        ({**CONFIG, "rms_norm_eps": float("nan")}, "rms_norm_eps: expected a number >= 0, came nan"),
        ({**CONFIG, "swiglu_limit": 0}, "swiglu_limit: expected a number > 0, came 0"),
        ({**CONFIG, "hidden_act": "gelu"}, "hidden_act: expected 'silu', came 'gelu'"),
        ({**CONFIG, "attention_bias": True}, "attention_bias: expected False, came True"),
        ({**CONFIG, "tie_word_embeddings": True}, "tie_word_embeddings: expected False, came True"),
        ({**CONFIG, "norm_topk_prob": False}, "norm_topk_prob: expected True, came False"),
        ({**CONFIG, "num_key_value_heads": 2}, "num_key_value_heads: expected 1, came 2"),
        ({**CONFIG, "n_shared_experts": 2}, "n_shared_experts: expected 1, came 2"),
        ({**CONFIG, "num_experts_per_tok": 7}, "num_experts_per_tok: expected at most 6, came 7"),
        ({**CONFIG, "o_groups": 3}, "num_attention_heads: expected a multiple of 3, came 4"),
        ({**CONFIG, "qk_rope_head_dim": 15}, r"qk_rope_head_dim: expected an even integer in 2..32, came 15"),
        ({**CONFIG, "partial_rotary_factor": 0.25}, "qk_rope_head_dim: .* partial_rotary_factor 0.25 says 8"),
        ({**CONFIG, "index_head_dim": 8}, "index_head_dim: expected at least 16, came 8"),
        (RATIOS, "compress_ratios: expected compress_ratios or layer_types, came no such key"),
        (with_ratios(0, 4, 128), "compress_ratios: expected a list of 4 or 5 entries, came 3 entries"),
        (with_ratios(0, 4, 2, 4), "compress_ratios: expected entries 0, 4 or 128, came 2"),
        (with_ratios(0, 4, 128, 4, compress_rate_csa=8), "compress_rates: expected 4 and 128, as compress_ratios"),
        ({**CONFIG, "compress_ratios": [0, 0, 0, 0]}, "layer_types: expected the schedule of compress_ratios"),
        ({**CONFIG, "layer_types": ["full_attention"] * 4}, "layer_types: expected entries among .*'full_attention'"),
        ({**CONFIG, "layer_types": CONFIG["layer_types"][:3]}, "layer_types: expected a list of 4 entries, came 3"),
        ({**CONFIG, "num_hash_layers": None}, "num_hash_layers: expected an integer >= 0"),
        (yarn(type="linear"), "rope_scaling.type: expected 'yarn' or 'default', came 'linear'"),
        (yarn(attention_factor=1.277), "rope_scaling.attention_factor: expected 1.0, came 1.277"),
        (yarn(truncate=False), "rope_scaling.truncate: expected true, came False"),
        (yarn(factor=0), "rope_scaling.factor: expected a number >= 1, came 0"),
        (yarn(original_max_position_embeddings=None), "original_max_position_embeddings: expected an integer >= 1"),
        ({**CONFIG, "rope_theta": None}, "rope_theta: expected a number > 1, came no such key"),
        (
            {**CONFIG, "quantization_config": {"weight_block_size": [32, 32]}},
            r"weight_block_size: expected \[128, 128\], came \[32, 32\]",
        ),
        ({**CONFIG, "quantization_config": {"group_size": 32}}, "group_size: expected 16, came 32"),
        ([], "expected a JSON object, came list"),
    ],
)
def test_refusals(raw: Any, message: str) -> None:
    with pytest.raises(ProductionError, match=message) as caught:
        parse_config(raw)
    assert "\n" not in str(caught.value)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ProductionError, match=r"config.json: expected a config.json, came no such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ProductionError, match="expected a JSON object, came unreadable text"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_config(tmp_path).vocab_size == 50
