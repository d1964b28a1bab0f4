"""A miniature DeepSeek-V4 checkpoint in ModelOpt's NVFP4 layout, written from random bytes, and a case for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from reference import build
from reference.geometry import read
from reference.manifest import Entry, entries

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 48,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 8,
    "sliding_window": 24,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "swiglu_limit": 2.0,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
}
#: linears that stay BF16
PLAIN = ("head", "compressor.wkv", "compressor.wgate", "weights_proj")
LENGTH = 133  # one heavily compressed key, and a remainder in every rate

Write = Callable[..., Path]


def values(entry: Entry, draw: torch.Generator, pack: bool) -> dict[str, Tensor]:
    """Random tensors of one entry: NVFP4 as random bytes, everything else as random numbers."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=draw) * scale

    if entry.kind == "table":
        return {entry.name: torch.stack([torch.randperm(6, generator=draw)[:2] for _ in range(entry.shape[0])])}
    if entry.kind == "linear" and pack and not entry.stem.endswith(PLAIN):
        rows, columns = entry.shape
        codes = torch.randint(0x28, 0x40, (rows, columns // 16), generator=draw)  # 2**-2 .. 2
        return {
            f"{entry.stem}.weight": torch.randint(0, 256, (rows, columns // 2), generator=draw).to(torch.uint8),
            f"{entry.stem}.weight_scale": codes.to(torch.uint8).view(torch.float8_e4m3fn),
            f"{entry.stem}.weight_scale_2": (torch.rand((), generator=draw) + 0.5) / (2 * columns**0.5),
            f"{entry.stem}.input_scale": torch.rand((), generator=draw),
        }
    if "norm" in entry.name:
        return {entry.name: (1 + normal(*entry.shape, scale=0.2)).bfloat16()}
    if entry.kind == "linear" or entry.leaf == "weight":
        return {entry.name: normal(*entry.shape, scale=entry.shape[-1] ** -0.5).bfloat16()}
    spread = entry.shape[-1] ** -0.5 if entry.leaf == "fn" else 0.5
    return {entry.name: normal(*entry.shape, scale=spread) + (entry.leaf == "scale")}


def write(folder: Path, *, config: Mapping[str, Any] | None = None, pack: bool = True) -> Path:
    """A checkpoint of two shards and an index. ``config`` replaces keys of CONFIG (None removes one)."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {k: v for k, v in {**CONFIG, **(config or {})}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    draw = torch.Generator().manual_seed(20240)
    tensors: dict[str, Tensor] = {}
    for entry in entries(read(folder)):
        tensors |= values(entry, draw, pack)
    tensors["mtp.0.norm.weight"] = torch.ones(4)
    store(folder, tensors)
    return folder


def store(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Two shards by name order, and their index."""
    names = sorted(tensors)
    where: dict[str, str] = {}
    for part, chosen in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        shard = f"model-0000{part}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in chosen}, folder / shard)
        where |= dict.fromkeys(chosen, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("miniature"))


@pytest.fixture(scope="session")
def native(checkpoint: Path) -> build.HFReference:
    return build.model(checkpoint)


@pytest.fixture(scope="session")
def single(checkpoint: Path) -> build.HFReference:
    return build.model(checkpoint, dtype="fp32")


@pytest.fixture(scope="session")
def case() -> dict[str, Tensor]:
    """Two rows of one length, by bare name."""
    draw = torch.Generator().manual_seed(7)
    return {
        "input_ids": torch.randint(0, 48, (2, LENGTH), generator=draw),
        "positions": torch.arange(LENGTH).expand(2, -1).contiguous(),
        "lengths": torch.full((2,), LENGTH),
    }


def compose(reference: build.HFReference, case: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every wire of a side, stage after stage."""
    wires = {f"case.{name}": value for name, value in case.items()}
    for stage in reference.stages:
        outputs = stage.run(**{name: wires[wire] for name, wire in stage.inputs.items()})
        wires |= {port.wire: outputs[port.name] for port in stage.outputs}
    return wires


def arguments(stage: Any, wires: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: wires[wire] for name, wire in stage.inputs.items()}


@pytest.fixture(scope="session")
def wires(native: build.HFReference, case: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return compose(native, case)


@pytest.fixture(scope="session")
def single_wires(single: build.HFReference, case: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return compose(single, case)
