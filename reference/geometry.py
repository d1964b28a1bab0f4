"""What config.json says, checked and typed: the numbers that name tensors, size them and drive the stages.

transformers fills a missing key with a default of another model without a word. Here a key that shapes the arithmetic
must be present, and a value that the Hugging Face modules ignore or cannot honour is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.types import UsageError
from reference import hf

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

#: keys that no default may stand in for; a tuple means any one of them
REQUIRED: tuple[str | tuple[str, ...], ...] = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    ("qk_rope_head_dim", "partial_rotary_factor", "rope_parameters"),
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "sliding_window",
    "hc_mult",
    "hc_eps",
    "hc_sinkhorn_iters",
    "rms_norm_eps",
    "routed_scaling_factor",
    "scoring_func",
    "swiglu_limit",
    ("compress_ratios", "layer_types"),
    ("num_hash_layers", "mlp_layer_types"),
    ("rope_theta", "rope_parameters"),
    ("compress_rope_theta", "rope_parameters"),
    ("rope_scaling", "rope_parameters"),
)

#: keys whose other values the Hugging Face modules ignore, or the harness does not cover
FIXED: Mapping[str, object] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
}

#: what describes the file rather than the model: kept away from transformers, which would act on it
STORAGE = ("quantization_config", "expert_dtype", "torch_dtype", "dtype", "transformers_version", "model_type")


@dataclass(frozen=True)
class Geometry:
    """The numbers of one checkpoint under Hugging Face's names, with the schedule of its layers."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    sliding_window: int
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    rms_norm_eps: float
    routed_scaling_factor: float
    scoring_func: str
    swiglu_limit: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    compress_rates: Mapping[str, int]
    rope: Mapping[str, Mapping[str, Any]]  # "main" and "compress"
    keywords: Mapping[str, Any]  # config.json without what describes storage: the constructor's arguments

    def rate(self, layer: int) -> int:
        """Source tokens per compressed entry; 0 on a sliding layer."""
        return int(self.compress_rates.get(self.layer_types[layer], 0))


def read(folder: Path) -> Geometry:
    """Read and check ``config.json`` of a checkpoint folder.

    Raises UsageError, in one line, for anything that is not a complete ``deepseek_v4`` config.
    """
    path = folder / "config.json"
    raw = load_json(path)
    kind = raw.get("model_type")
    if kind == "deepseek_v41":
        raise UsageError(
            f"{path}: expected model_type 'deepseek_v4', came 'deepseek_v41': V4.1 is another architecture, which this "
            "harness does not cover; give a DeepSeek-V4 checkpoint"
        )
    if kind != "deepseek_v4":
        raise UsageError(f"{path}: expected model_type 'deepseek_v4', came {kind!r}; give a DeepSeek-V4 checkpoint")
    for need in REQUIRED:
        options = (need,) if isinstance(need, str) else need
        if not any(raw.get(key) is not None for key in options):
            raise UsageError(
                f"{path}: expected the key {' or '.join(options)}, came none; add it (transformers would fill in the "
                "value of another model)"
            )
    for key, only in FIXED.items():
        if raw.get(key, only) != only:
            raise UsageError(f"{path}: expected {key} {only!r}, came {raw[key]!r}; nothing else is covered")
    _check_quantization(path, raw.get("quantization_config"))
    return _typed(path, {k: v for k, v in raw.items() if k not in STORAGE})


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UsageError if it is missing, broken or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: expected a file, came none; give a checkpoint folder that holds it") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, a number of 5000 digits
        raise UsageError(f"{path}: expected JSON, came {_line(error)}; copy the file again") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: expected a JSON object, came {type(value).__name__}; copy the file again")
    return value


def _check_quantization(path: Path, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, dict):
        raise UsageError(f"{path}: expected quantization_config to be an object, came {value!r}; correct it")
    size = value.get("group_size", 16)
    if size != 16:
        raise UsageError(f"{path}: expected quantization_config.group_size 16 (NVFP4), came {size!r}; export as NVFP4")
    tile = value.get("weight_block_size", [128, 128])
    if tile != [128, 128]:
        raise UsageError(f"{path}: expected quantization_config.weight_block_size [128, 128] (FP8), came {tile!r}")


def _typed(path: Path, keywords: dict[str, Any]) -> Geometry:
    try:
        config = hf.configuration(keywords)
        geometry = Geometry(
            **{
                key: kind(getattr(config, key))
                for key, kind in (
                    (name, {"int": int, "float": float, "str": str}[str(annotation)])
                    for name, annotation in Geometry.__annotations__.items()
                    if str(annotation) in {"int", "float", "str"}
                )
            },
            layer_types=tuple(config.layer_types),
            mlp_layer_types=tuple(config.mlp_layer_types),
            compress_rates=dict(config.compress_rates),
            rope={name: dict(config.rope_parameters[name]) for name in ("main", "compress")},
            keywords=keywords,
        )
    except KeyError as error:
        raise UsageError(
            f"{path}: expected compress_ratios of 0, 4 and 128, came {keywords.get('compress_ratios')!r} "
            f"({_line(error)}); correct config.json"
        ) from None
    except Exception as error:  # transformers' validators raise types of their own, none of them public
        raise UsageError(f"{path}: expected a valid config, came {_line(error)}; correct config.json") from None
    _check(path, geometry)
    return geometry


def _check(path: Path, g: Geometry) -> None:
    """Relations that the modules assume and nobody else checks."""
    layers = g.num_hidden_layers
    sizes = {k: v for k, v in vars(g).items() if isinstance(v, int) and k != "num_hidden_layers"}
    rules = {
        "num_hidden_layers of at least 1": layers >= 1,
        "positive sizes": all(v > 0 for v in sizes.values()),
        f"an attention type for each of {layers} layers": len(g.layer_types) == layers,
        f"an MLP type for each of {layers} layers": len(g.mlp_layer_types) == layers,
        "num_attention_heads * head_dim divisible by o_groups": g.num_attention_heads * g.head_dim % g.o_groups == 0,
        "an even qk_rope_head_dim of at most head_dim": g.qk_rope_head_dim % 2 == 0
        and 0 < g.qk_rope_head_dim <= g.head_dim,
        "num_experts_per_tok of at most n_routed_experts": g.num_experts_per_tok <= g.n_routed_experts,
        "index_head_dim of at least the rope width": g.index_head_dim >= g.qk_rope_head_dim,
        "scoring_func 'sqrtsoftplus'": g.scoring_func == "sqrtsoftplus",
        "a main rope of type default": g.rope["main"]["rope_type"] == "default",
        "a compress rope of type yarn or default": g.rope["compress"]["rope_type"] in {"yarn", "default"},
    }
    broken = next((text for text, ok in rules.items() if not ok), None)
    if broken is not None:
        raise UsageError(f"{path}: expected {broken}, came {_shown(g)}; correct config.json")


def _shown(g: Geometry) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in vars(g).items() if isinstance(v, int | str))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
