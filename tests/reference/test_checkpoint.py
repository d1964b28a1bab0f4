"""What the loader refuses, and that it says so in one line that names the file and the tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.types import UsageError
from reference import build
from tests.reference.conftest import CONFIG, store, write

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def refusal(folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        build.model(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert "expected" in text
    assert "came" in text
    return text


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def everything(folder: Path) -> dict[str, Tensor]:
    return {**load_file(folder / FIRST), **load_file(folder / SECOND)}


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = everything(folder)
    change(tensors)
    store(folder, tensors)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "V4.1 by name": ({"model_type": "deepseek_v41"}, "V4.1 is another architecture"),
    "another model": ({"model_type": "llama"}, "'llama'"),
    "no model type": ({"model_type": None}, "came None"),
    "no schedule": ({"compress_ratios": None}, "compress_ratios or layer_types"),
    "no limit": ({"swiglu_limit": None}, "swiglu_limit"),
    "unknown rate": ({"compress_ratios": [0, 7, 128, 4]}, "compress_ratios of 0, 4 and 128"),
    "short schedule": ({"compress_ratios": [0, 4]}, "num_hidden_layers"),
    "wrong type": ({"hidden_size": "wide"}, "hidden_size"),
    "negative size": ({"moe_intermediate_size": -32}, "positive sizes"),
    "odd rope": ({"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
    "too many picks": ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
    "indivisible groups": ({"o_groups": 3}, "o_groups"),
    "tied head": ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    "unnormalised weights": ({"norm_topk_prob": False}, "norm_topk_prob"),
    "two key heads": ({"num_key_value_heads": 2}, "num_key_value_heads"),
    "another score": ({"scoring_func": "sigmoid"}, "scoring_func"),
    "another rope": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "compress rope"),
    "another block": ({"quantization_config": {"group_size": 32}}, "group_size 16"),
    "another tile": ({"quantization_config": {"weight_block_size": [32, 32]}}, "weight_block_size [128, 128]"),
    "quantization as a string": ({"quantization_config": "nvfp4"}, "quantization_config"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(copy: Path, name: str) -> None:
    change, words = CONFIGS[name]
    merged = {k: v for k, v in {**CONFIG, **change}.items() if v is not None}
    (copy / "config.json").write_text(json.dumps(merged))
    text = refusal(copy)
    assert words in text
    assert "config.json" in text


@pytest.mark.parametrize("content", ["{", "[1]", "", "\x00\x01"])
@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_broken_json(copy: Path, file: str, content: str) -> None:
    (copy / file).write_text(content)
    assert file in refusal(copy)


@pytest.mark.parametrize("file", ["config.json", INDEX, FIRST, SECOND])
def test_missing_file(copy: Path, file: str) -> None:
    (copy / file).unlink()
    assert file in refusal(copy)


def test_no_folder(tmp_path: Path, checkpoint: Path) -> None:
    assert "nothing" in refusal(tmp_path / "absent")
    assert "a file" in refusal(checkpoint / "config.json")


@pytest.mark.parametrize("keep", [0, 4, 200, -1, -1000])
def test_truncated_shard(copy: Path, keep: int) -> None:
    data = (copy / SECOND).read_bytes()
    (copy / SECOND).write_bytes(data[:keep])
    text = refusal(copy)
    assert SECOND in text
    assert "truncated or corrupt" in text


def test_corrupt_header(copy: Path) -> None:
    data = bytearray((copy / FIRST).read_bytes())
    data[8:40] = b"\xff" * 32
    (copy / FIRST).write_bytes(data)
    assert FIRST in refusal(copy)


INDEXES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no map": (lambda v: v.pop("weight_map"), "weight_map"),
    "empty map": (lambda v: v.update(weight_map={}), "weight_map"),
    "map of numbers": (lambda v: v["weight_map"].update({"norm.weight": 1}), "norm.weight"),
    "a path outside": (lambda v: v["weight_map"].update({"norm.weight": "../x.safetensors"}), "norm.weight"),
    "unknown shard": (lambda v: v["weight_map"].update({"norm.weight": "other.safetensors"}), "other.safetensors"),
    "wrong shard": (lambda v: v["weight_map"].update({"embed.weight": SECOND}), "embed.weight"),
    "not in the index": (lambda v: v["weight_map"].pop("embed.weight"), "embed.weight"),
    "not in the shard": (lambda v: v["weight_map"].update({"layers.9.x": FIRST}), "layers.9.x"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_index(copy: Path, name: str) -> None:
    change, words = INDEXES[name]
    edit_json(copy / INDEX, change)
    assert words in refusal(copy)


Q = "layers.1.attn.wq_a"
TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], tuple[str, ...]]] = {
    "missing": (lambda t: t.pop("layers.2.attn.attn_sink"), ("layers.2.attn.attn_sink",)),
    "missing expert": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith("layers.3.ffn.experts.5.")],
        ("layers.3.ffn.experts.5.w1.weight", "2 more"),
    ),
    "missing block scale": (lambda t: t.pop(f"{Q}.weight_scale"), (f"{Q}.weight_scale",)),
    "missing global scale": (lambda t: t.pop(f"{Q}.weight_scale_2"), (f"{Q}.weight_scale_2",)),
    "unexpected": (lambda t: t.update({"layers.0.attn.extra": torch.ones(2)}), ("layers.0.attn.extra", "F32 [2]")),
    "a layer too many": (lambda t: t.update({"layers.4.attn_norm.weight": torch.ones(64)}), ("layers.4",)),
    "a scale without a pack": (
        lambda t: t.update({f"{Q}.weight": torch.ones(32, 64, dtype=torch.bfloat16)}),
        (f"{Q}.input_scale",),
    ),
    "renamed": (
        lambda t: t.update({"model.norm.weight": t.pop("norm.weight")}),
        ("norm.weight", "model.norm.weight is unexpected"),
    ),
    "transposed": (
        lambda t: t.update({"layers.1.attn.wq_b.weight": t["layers.1.attn.wq_b.weight"].T.contiguous()}),
        ("layers.1.attn.wq_b.weight", "[256, 16]", "[16, 256]"),
    ),
    "a wrong block grid": (
        lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, :2].contiguous()}),
        (f"{Q}.weight_scale", "[32, 4]", "[32, 2]"),
    ),
    "a wrong table": (
        lambda t: t.update({"layers.0.ffn.gate.tid2eid": torch.zeros(48, 3, dtype=torch.int64)}),
        ("tid2eid", "[48, 2]", "[48, 3]"),
    ),
    "a global scale of one element": (
        lambda t: t.update({f"{Q}.weight_scale_2": torch.ones(1)}),
        (f"{Q}.weight_scale_2", "[1]"),
    ),
    "FP8 weights": (
        lambda t: t.update({f"{Q}.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)}),
        (f"{Q}.weight", "F8_E4M3"),
    ),
    "half precision": (lambda t: t.update({"norm.weight": torch.ones(64).half()}), ("norm.weight", "F16")),
    "scales in bytes": (
        lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].view(torch.uint8)}),
        (f"{Q}.weight_scale", "U8"),
    ),
    "NaN in a block scale": (
        lambda t: t[f"{Q}.weight_scale"].view(torch.uint8)[3].fill_(0x7F),
        (f"{Q}.weight_scale", "nan at [3, 0]"),
    ),
    "NaN in a global scale": (lambda t: t[f"{Q}.weight_scale_2"].fill_(float("nan")), (f"{Q}.weight_scale_2", "nan")),
    "a global scale of zero": (lambda t: t[f"{Q}.weight_scale_2"].zero_(), (f"{Q}.weight_scale_2", "0.0")),
    "a negative global scale": (lambda t: t[f"{Q}.weight_scale_2"].neg_(), (f"{Q}.weight_scale_2", "positive")),
    "infinity in a sink": (
        lambda t: t["layers.2.attn.attn_sink"][1:].fill_(float("inf")),
        ("layers.2.attn.attn_sink", "inf at [1]"),
    ),
    "NaN in a norm": (lambda t: t["norm.weight"][5:].fill_(float("nan")), ("norm.weight", "nan at [5]")),
    "an expert that is not there": (
        lambda t: t["layers.0.ffn.gate.tid2eid"][7].fill_(6),
        ("layers.0.ffn.gate.tid2eid", "0..5"),
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(copy: Path, name: str) -> None:
    change, words = TENSORS[name]
    edit_tensors(copy, change)
    text = refusal(copy)
    assert all(word in text for word in words), text


def test_a_shard_of_another_checkpoint(copy: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", config={"hidden_size": 128})
    shutil.copy(other / FIRST, copy / FIRST)
    text = refusal(copy)
    assert "shape" in text
    assert FIRST in text


def test_a_tensor_in_two_shards(copy: Path) -> None:
    first = load_file(copy / FIRST)
    save_file({**load_file(copy / SECOND), "embed.weight": first["embed.weight"]}, copy / SECOND)
    assert "embed.weight" in refusal(copy)


def test_prediction_block_is_set_aside(copy: Path) -> None:
    edit_tensors(copy, lambda t: t.update({"mtp.0.attn.wq_a.weight": torch.ones(3)}))
    build.model(copy)


def test_no_input_scales(copy: Path) -> None:
    edit_tensors(copy, lambda t: [t.pop(n) for n in list(t) if n.endswith("input_scale")])
    build.model(copy)


@pytest.mark.parametrize("layers", [[], [-1], [4], [0, 9]])
def test_layers_out_of_range(checkpoint: Path, layers: list[int]) -> None:
    with pytest.raises(UsageError, match=r"layers: expected some of 0\.\.3"):
        build.model(checkpoint, layers=layers)


def test_dtype(checkpoint: Path) -> None:
    wrong: Any = "fp16"
    with pytest.raises(UsageError, match="native or fp32"):
        build.model(checkpoint, dtype=wrong)
