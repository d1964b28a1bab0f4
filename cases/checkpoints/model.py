"""The numbers of config.json that name and size tensors, in either of its two forms.

DeepSeek's form gives ``compress_ratios`` (one entry more per next-token-prediction block), ``num_hash_layers`` and
``rope_scaling``; Hugging Face's gives ``layer_types``, ``mlp_layer_types`` and ``rope_parameters``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.types import UsageError

#: attention type by compression ratio
ATTENTION = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
RATIO = {name: ratio for ratio, name in ATTENTION.items()}
ROPES = ("default", "yarn")


@dataclass(frozen=True)
class Model:
    """Sizes under short names; the config key stands behind each."""

    hidden: int  # hidden_size
    vocab: int  # vocab_size
    heads: int  # num_attention_heads
    head: int  # head_dim
    q_rank: int  # q_lora_rank
    groups: int  # o_groups
    o_rank: int  # o_lora_rank
    experts: int  # n_routed_experts
    top_k: int  # num_experts_per_tok
    inner: int  # moe_intermediate_size
    index_heads: int  # index_n_heads
    index_head: int  # index_head_dim
    streams: int  # hc_mult
    kinds: tuple[str, ...]  # attention type of every layer
    ratios: tuple[int, ...]  # tokens per compressed entry, 0 for sliding attention
    hashed: tuple[bool, ...]  # whether a layer's router is a hash table
    draft: int  # num_nextn_predict_layers

    @property
    def layers(self) -> int:
        return len(self.ratios)


#: field -> key of config.json
SIZES: Mapping[str, str] = {
    "hidden": "hidden_size",
    "vocab": "vocab_size",
    "heads": "num_attention_heads",
    "head": "head_dim",
    "q_rank": "q_lora_rank",
    "groups": "o_groups",
    "o_rank": "o_lora_rank",
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "inner": "moe_intermediate_size",
    "index_heads": "index_n_heads",
    "index_head": "index_head_dim",
    "streams": "hc_mult",
}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder, of model type deepseek_v4; UsageError in one line otherwise."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise UsageError(f"{folder}: expected a checkpoint folder, came {'a file' if folder.exists() else 'nothing'}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: expected a file, came none; give a folder that holds a checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: expected JSON, came {' '.join(str(error).split())[:200]}; copy it again") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{path}: expected a JSON object, came {type(raw).__name__}; copy it again")
    kind = raw.get("model_type")
    if kind == "deepseek_v41":
        raise UsageError(
            f"{path}: expected model_type 'deepseek_v4', came 'deepseek_v41': DeepSeek-V4.1 is another architecture "
            "(32x32 scale blocks, shared key/value layers, engram tables) and is not covered; give a V4 checkpoint"
        )
    if kind != "deepseek_v4":
        raise UsageError(f"{path}: expected model_type 'deepseek_v4', came {kind!r}; give a DeepSeek-V4 checkpoint")
    return raw


def model(config: Mapping[str, Any], where: str = "config.json") -> Model:
    """The checked sizes of a config; UsageError names the key."""
    sizes = {field: _count(config, key, where) for field, key in SIZES.items()}
    layers = _count(config, "num_hidden_layers", where)
    draft = config.get("num_nextn_predict_layers", 0)
    if type(draft) is not int or draft < 0:
        raise _bad(where, "num_nextn_predict_layers", "an integer >= 0", draft)
    _check_ropes(config, where)
    kinds, rates = _kinds(config, layers, draft, where), _rates(config, where)
    found = Model(
        **sizes,
        kinds=kinds,
        ratios=tuple(rates[kind] for kind in kinds),
        hashed=_hashed(config, layers, where),
        draft=draft,
    )
    if found.heads * found.head % found.groups:
        raise _bad(where, "o_groups", "a divisor of num_attention_heads * head_dim", found.groups)
    if found.top_k > found.experts:
        raise _bad(where, "num_experts_per_tok", f"at most n_routed_experts ({found.experts})", found.top_k)
    return found


def hugging_face_form(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config in DeepSeek's form as transformers writes it when it saves."""
    found = {k: v for k, v in config.items() if k not in ("compress_ratios", "num_hash_layers", "rope_scaling")}
    layers, hashed = config["num_hidden_layers"], config["num_hash_layers"]
    found["layer_types"] = [ATTENTION[r] for r in config["compress_ratios"][:layers]]
    found["mlp_layer_types"] = ["hash_moe"] * hashed + ["moe"] * (layers - hashed)
    found["compress_rates"] = {name: ratio for ratio, name in ATTENTION.items() if ratio}
    part = config["qk_rope_head_dim"] / config["head_dim"]
    yarn = {k: v for k, v in config["rope_scaling"].items() if k != "type"}
    found["partial_rotary_factor"] = part
    found["rope_parameters"] = {
        "main": {"partial_rotary_factor": part, "rope_theta": config["rope_theta"], "rope_type": "default"},
        "compress": {
            **yarn,
            "attention_factor": 1.0,
            "partial_rotary_factor": part,
            "rope_theta": config["compress_rope_theta"],
            "rope_type": config["rope_scaling"]["type"],
        },
    }
    found["num_nextn_predict_layers"] = 0  # transformers has no such block
    return found


def deepseek_form(config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """A config in either form, in DeepSeek's."""
    if "compress_ratios" in config and "rope_scaling" in config:
        return dict(config)
    sizes = model(config, where)
    if not set(sizes.ratios) <= set(ATTENTION):
        raise _bad(where, "compress_rates", "4 and 128, as DeepSeek's config can say", config["compress_rates"])
    if sorted(sizes.hashed, reverse=True) != list(sizes.hashed):
        raise _bad(where, "mlp_layer_types", "hash_moe layers first, as DeepSeek's config can say", "others")
    own = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor")
    found = {k: v for k, v in config.items() if k not in own}
    found["compress_ratios"] = [*sizes.ratios, *[0] * sizes.draft]
    found["num_hash_layers"] = sum(sizes.hashed)
    ropes = config.get("rope_parameters", {})
    compress, main = ropes.get("compress", ropes), ropes.get("main", {})
    kept = ("beta_fast", "beta_slow", "factor", "original_max_position_embeddings")
    found["rope_scaling"] = {k: compress[k] for k in kept if k in compress}
    found["rope_scaling"]["type"] = compress.get("rope_type", compress.get("type", "default"))
    found["rope_theta"] = main.get("rope_theta", config.get("rope_theta"))
    found["compress_rope_theta"] = compress.get("rope_theta", config.get("compress_rope_theta"))
    if "qk_rope_head_dim" not in found and "partial_rotary_factor" in config:
        found["qk_rope_head_dim"] = int(config["head_dim"] * config["partial_rotary_factor"])
    return found


def _count(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise _bad(where, key, "an integer >= 1", value)
    return value


def _rates(config: Mapping[str, Any], where: str) -> dict[str, int]:
    """Tokens per compressed entry by attention type; only Hugging Face's form can say others than 4 and 128."""
    given = config.get("compress_rates") or {}
    if not isinstance(given, dict) or any(type(rate) is not int or rate < 1 for rate in given.values()):
        raise _bad(where, "compress_rates", "an object of integers >= 1", given)
    return {**RATIO, **given}


def _kinds(config: Mapping[str, Any], layers: int, draft: int, where: str) -> tuple[str, ...]:
    ratios, types = config.get("compress_ratios"), config.get("layer_types")
    if ratios is None and types is None:
        raise _bad(where, "compress_ratios", "compress_ratios or layer_types (a schedule is never guessed)", None)
    found: list[tuple[str, ...]] = []
    if ratios is not None:
        lengths = sorted({layers, layers + draft})
        if not isinstance(ratios, list) or len(ratios) not in lengths:
            wanted = f"a list of {' or '.join(map(str, lengths))} entries"
            raise _bad(where, "compress_ratios", wanted, ratios)
        if bad := [r for r in ratios if type(r) is not int or r not in ATTENTION]:
            raise _bad(where, "compress_ratios", "entries 0, 4 or 128", bad[0])
        found.append(tuple(ATTENTION[ratio] for ratio in ratios[:layers]))
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise _bad(where, "layer_types", f"a list of {layers} entries", types)
        if bad := [t for t in types if t not in RATIO]:
            raise _bad(where, "layer_types", f"entries among {', '.join(RATIO)}", bad[0])
        found.append(tuple(types))
    if len(set(found)) != 1:
        raise _bad(where, "layer_types", "the schedule that compress_ratios gives", "another one")
    return found[0]


def _hashed(config: Mapping[str, Any], layers: int, where: str) -> tuple[bool, ...]:
    types = config.get("mlp_layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or not set(types) <= {"hash_moe", "moe"}:
            raise _bad(where, "mlp_layer_types", f"a list of {layers} entries, hash_moe or moe", types)
        return tuple(t == "hash_moe" for t in types)
    count = config.get("num_hash_layers")
    if type(count) is not int or count < 0:
        raise _bad(where, "num_hash_layers", "an integer >= 0 (or mlp_layer_types)", count)
    return tuple(layer < count for layer in range(layers))


def _check_ropes(config: Mapping[str, Any], where: str) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise _bad(where, key, "an object", rope)
        parts = [p for p in rope.values() if isinstance(p, dict)] or [rope]
        for part in parts:
            kind = part.get("rope_type", part.get("type", "default"))
            if kind not in ROPES:
                raise _bad(where, f"{key}.type", " or ".join(ROPES), kind)


def _bad(where: str, key: str, expected: str, came: object) -> UsageError:
    text = "no such key" if came is None else f"{len(came)} entries" if isinstance(came, list) else repr(came)
    return UsageError(f"{where}: {key}: expected {expected}, came {text[:160]}; correct config.json")
