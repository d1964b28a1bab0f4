"""A small random checkpoint in ModelOpt's NVFP4 layout under native names, written shard by shard.

Everything that starts at zero or one in an untrained model is drawn here: sinks, biases, tables, norm weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 50,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 16,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 10.0,
    "num_hash_layers": 2,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "tie_word_embeddings": False,
}


class Draw:
    """Random tensors by the roles that they have in a checkpoint."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * std + mean

    def bf16(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return self.normal(*shape, std=std, mean=mean).bfloat16()

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def nvfp4(self, stem: str, n: int, k: int, std: float | None = None) -> dict[str, Tensor]:
        """Random codes and scales; entries of about ``std`` (1/sqrt(K) by default)."""
        scale = torch.exp(self.normal(n, k // 16, std=0.5)).clamp(2**-6, 448)
        # 3.3: RMS of a uniformly drawn E2M1 value; 1.3: of exp(N(0, 1/2))
        scale_2 = (std or k**-0.5) / 3.3 / 1.3 * float(torch.exp(self.normal(1, std=0.2)))
        return {
            f"{stem}.weight": self.ints(256, n, k // 2).to(torch.uint8),
            f"{stem}.weight_scale": scale.to(torch.float8_e4m3fn),
            f"{stem}.weight_scale_2": torch.tensor(scale_2),
            f"{stem}.input_scale": torch.tensor(0.37),
        }


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, by native name."""
    draw, c = Draw(seed), config
    d, n, v = c["hidden_size"], c["hc_mult"], c["vocab_size"]
    out: dict[str, Tensor] = {
        "embed.weight": draw.bf16(v, d),
        "norm.weight": draw.bf16(d, std=0.2, mean=1),
        "head.weight": draw.bf16(v, d, std=d**-0.5),
        "hc_head_fn": draw.normal(n, n * d, std=0.1),
        "hc_head_base": draw.normal(n, std=0.5),
        "hc_head_scale": draw.normal(1, std=0.2, mean=1),
    }
    for layer, kind in enumerate(c["layer_types"]):
        at = f"layers.{layer}."
        out |= _attention(draw, c, at + "attn.", kind)
        out |= _ffn(draw, c, at + "ffn.", hashed=layer < c["num_hash_layers"])
        for half in ("attn", "ffn"):
            out[f"{at}{half}_norm.weight"] = draw.bf16(d, std=0.2, mean=1)
            out[f"{at}hc_{half}_fn"] = draw.normal((2 + n) * n, n * d, std=0.1)
            out[f"{at}hc_{half}_base"] = draw.normal((2 + n) * n, std=0.7)
            out[f"{at}hc_{half}_scale"] = draw.normal(3, std=0.2, mean=1)
    return out


def _attention(draw: Draw, c: dict[str, Any], at: str, kind: str) -> dict[str, Tensor]:
    d, dim, heads, ql = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["q_lora_rank"]
    low = c["o_groups"] * c["o_lora_rank"]
    out = {
        f"{at}attn_sink": draw.normal(heads, std=1.5),
        f"{at}q_norm.weight": draw.bf16(ql, std=0.2, mean=1),
        f"{at}kv_norm.weight": draw.bf16(dim, std=0.2, mean=1),
        **draw.nvfp4(f"{at}wq_a", ql, d),
        **draw.nvfp4(f"{at}wq_b", heads * dim, ql),
        **draw.nvfp4(f"{at}wkv", dim, d),
        **draw.nvfp4(f"{at}wo_a", low, heads * dim // c["o_groups"]),
        **draw.nvfp4(f"{at}wo_b", d, low),
    }
    if kind != "sliding_attention":
        series = 2 if kind == "compressed_sparse_attention" else 1
        out |= _pooling(draw, f"{at}compressor.", series * dim, dim, c["compress_rates"][kind], d)
    if kind == "compressed_sparse_attention":
        inner = c["index_head_dim"]
        out |= _pooling(draw, f"{at}indexer.compressor.", 2 * inner, inner, c["compress_rates"][kind], d)
        out |= draw.nvfp4(f"{at}indexer.wq_b", c["index_n_heads"] * inner, ql)
        out[f"{at}indexer.weights_proj.weight"] = draw.bf16(c["index_n_heads"], d, std=d**-0.5)
    return out


def _pooling(draw: Draw, at: str, channels: int, dim: int, rate: int, d: int) -> dict[str, Tensor]:
    return {
        f"{at}wkv.weight": draw.bf16(channels, d, std=d**-0.5),
        f"{at}wgate.weight": draw.bf16(channels, d, std=2 * d**-0.5),
        f"{at}ape": draw.normal(rate, channels),
        f"{at}norm.weight": draw.bf16(dim, std=0.2, mean=1),
    }


def _ffn(draw: Draw, c: dict[str, Any], at: str, *, hashed: bool) -> dict[str, Tensor]:
    d, inner, experts = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    out = {f"{at}gate.weight": draw.bf16(experts, d, std=2 * d**-0.5)}
    if hashed:
        out[f"{at}gate.tid2eid"] = draw.ints(experts, c["vocab_size"], c["num_experts_per_tok"])
    else:
        out[f"{at}gate.bias"] = draw.normal(experts, std=0.2)
    for owner in [f"{at}shared_experts", *(f"{at}experts.{e}" for e in range(experts))]:
        for name, n, k in (("w1", inner, d), ("w3", inner, d), ("w2", d, inner)):
            out |= draw.nvfp4(f"{owner}.{name}", n, k, std=4 * k**-0.5 if name == "w1" else None)
    return out


def write(folder: Path, content: dict[str, Tensor], config: dict[str, Any], shards: int = 2) -> Path:
    """config.json, shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(content)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: content[name].contiguous() for name in names[shard::shards]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def checkpoint(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A complete checkpoint; ``changes`` to its configuration."""
    config = {**CONFIG, **changes}
    return write(folder, tensors(config, seed), config)
