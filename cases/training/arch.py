"""The tiny DeepSeek-V4: its config, the Hugging Face model built from it, and the checkpoint's tensor names."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from .task import WORDS

# Keys, order and constants follow the DeepSeek-V4-Flash config; only the sizes are small. The last compress ratio
# belongs to the multi-token-prediction block, which this checkpoint does not contain.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 128,
    "index_head_dim": 128,
    "index_n_heads": 16,
    "index_topk": 32,
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_hash_layers": 2,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 256,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": len(WORDS),
}

LAYERS, EXPERTS, HASH_LAYERS = CONFIG["num_hidden_layers"], CONFIG["n_routed_experts"], CONFIG["num_hash_layers"]
RATIOS: list[int] = CONFIG["compress_ratios"][:LAYERS]

# Hugging Face's parameter leaf -> the checkpoint's, within one layer.
_LEAF = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"{half}_hc.{leaf}": f"hc_{half}_{leaf}" for half in ("attn", "ffn") for leaf in ("fn", "base", "scale")},
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    **{
        f"self_attn.compressor.{hf}{leaf}": f"attn.{own}compressor.{target}"
        for hf, own in (("", ""), ("indexer.", "indexer."))
        for leaf, target in (
            ("kv_proj.weight", "wkv.weight"),
            ("gate_proj.weight", "wgate.weight"),
            ("position_bias", "ape"),
            ("kv_norm.weight", "norm.weight"),
        )
    },
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
}
_TOP = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    **{f"model.hc_head.hc_{leaf}": f"hc_head_{leaf}" for leaf in ("fn", "base", "scale")},
}
_NVFP4 = re.compile(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|w[123])\.weight$")


def is_nvfp4(name: str) -> bool:
    """Whether a checkpoint weight is stored as NVFP4 (the compressors' projections stay BF16)."""
    return bool(_NVFP4.search(name)) and ".compressor." not in name


def is_f32(name: str) -> bool:
    """Whether a checkpoint tensor is stored as F32."""
    leaf = name.rsplit(".", 1)[-1]
    return leaf.startswith("hc_") or leaf in ("attn_sink", "ape") or name.endswith("gate.bias")


def is_nvfp4_parameter(hf_name: str) -> bool:
    """Whether a Hugging Face parameter (fused experts included) is stored as NVFP4."""
    if ".experts." in hf_name:
        return True
    return hf_name.startswith("model.layers.") and is_nvfp4(_checkpoint_name(hf_name))


def is_bf16_parameter(hf_name: str) -> bool:
    """Whether a Hugging Face parameter is stored as BF16."""
    if is_nvfp4_parameter(hf_name):
        return False
    name = _checkpoint_name(hf_name)
    return not is_f32(name) and not name.endswith("tid2eid")


def to_checkpoint(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face state dict -> the same tensors under checkpoint names, experts taken apart."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".experts." not in name:
            out[_checkpoint_name(name)] = tensor
            continue
        layer = name.split(".")[2]
        for e in range(tensor.shape[0]):
            stem = f"layers.{layer}.ffn.experts.{e}"
            if name.endswith("down_proj"):
                out[f"{stem}.w2.weight"] = tensor[e]
            else:
                out[f"{stem}.w1.weight"], out[f"{stem}.w3.weight"] = tensor[e].chunk(2, 0)
    return out


def from_checkpoint(tensors: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Decoded checkpoint tensors -> a Hugging Face state dict with the keys of `like`."""
    out: dict[str, Tensor] = {}
    for name in like:
        if ".experts." not in name:
            out[name] = tensors[_checkpoint_name(name)]
            continue
        stem = f"layers.{name.split('.')[2]}.ffn.experts"
        if name.endswith("down_proj"):
            out[name] = torch.stack([tensors[f"{stem}.{e}.w2.weight"] for e in range(EXPERTS)])
        else:
            halves = [(tensors[f"{stem}.{e}.w1.weight"], tensors[f"{stem}.{e}.w3.weight"]) for e in range(EXPERTS)]
            out[name] = torch.stack([torch.cat(pair) for pair in halves])
    return out


def build(experts: str = "eager") -> DeepseekV4ForCausalLM:
    """The Hugging Face model in fp32, eager attention."""
    config = DeepseekV4Config(**CONFIG)
    config._attn_implementation = "eager"
    config._experts_implementation = experts
    return DeepseekV4ForCausalLM(config)


def _checkpoint_name(hf_name: str) -> str:
    """One parameter's checkpoint name; KeyError for one this model should not have."""
    if hf_name in _TOP:
        return _TOP[hf_name]
    _, _, layer, leaf = hf_name.split(".", 3)
    return f"layers.{layer}.{_LEAF[leaf]}"
