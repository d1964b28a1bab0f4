"""The configurations that a checkpoint can be made from, and how they are cut to some layers and experts.

FLASH and PRO repeat the released config.json files; TINY has the sizes of the bundled checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.types import UsageError

FLASH: Mapping[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 43,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 129280,
}
PRO: Mapping[str, Any] = {
    **FLASH,
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "routed_scaling_factor": 2.5,
}
TINY: Mapping[str, Any] = {
    **FLASH,
    "pad_token_id": 2,
    "hidden_size": 128,
    "index_n_heads": 16,
    "index_topk": 32,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_hash_layers": 2,
    "o_groups": 2,
    "o_lora_rank": 64,
    "q_lora_rank": 64,
    "rope_scaling": {**FLASH["rope_scaling"], "original_max_position_embeddings": 256},
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "vocab_size": 64,
}
PRESETS: Mapping[str, Mapping[str, Any]] = {"tiny": TINY, "flash": FLASH, "pro": PRO}


def parse_layers(text: str, count: int) -> list[int]:
    """``0-3``, ``2`` or ``0,2,3`` as ascending layer numbers below ``count``; UsageError for anything else."""
    chosen: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--layers: expected numbers such as 0-3 or 0,2,3, came {text!r}")
        span = range(int(first), int(last or first) + 1)
        if not span or span[-1] >= count:
            raise UsageError(f"--layers: expected layers among 0-{count - 1}, came {piece.strip()!r}")
        chosen.update(span)
    return sorted(chosen)


def cut(
    config: Mapping[str, Any], layers: Sequence[int] | None = None, experts: int | None = None, draft: bool = False
) -> dict[str, Any]:
    """The config of a whole, smaller model: the given layers (renumbered from 0) and the first ``experts``.

    The schedule of the chosen layers stays theirs. Without ``draft`` the model has no next-token-prediction block.
    """
    found = dict(config)
    chosen = list(range(config["num_hidden_layers"])) if layers is None else list(layers)
    ratios = config["compress_ratios"]
    found["num_hidden_layers"] = len(chosen)
    found["num_hash_layers"] = sum(layer < config["num_hash_layers"] for layer in chosen)
    found["num_nextn_predict_layers"] = int(draft)
    found["compress_ratios"] = [ratios[layer] for layer in chosen] + [0] * draft
    if experts is not None:
        fewest, most = config["num_experts_per_tok"], config["n_routed_experts"]
        if not fewest <= experts <= most:
            raise UsageError(f"--experts: expected {fewest} to {most} (num_experts_per_tok and up), came {experts}")
        found["n_routed_experts"] = experts
    return found
