"""The model's configuration, read from a checkpoint's ``config.json`` and checked before anything is built.

Only DeepSeek-V4 (``model_type: deepseek_v4``) is taken; V4.1 is another architecture and is refused by name. What the
components do not implement (biases, tied embeddings, other rope types, an attention factor other than 1) is refused
here rather than ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from production.errors import ProductionError
from production.keys import Keys

#: Layer kinds by compression ratio in ``compress_ratios``, and by name in ``layer_types``.
KIND_OF_RATIO = {0: "sliding", 4: "csa", 128: "hca"}
KIND_OF_TYPE = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
DEFAULT_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


@dataclass(frozen=True)
class Yarn:
    """YaRN's parameters; the attention factor is 1 in DeepSeek-V4 and is no parameter here."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class Rope:
    """One rotary embedding over ``dim`` channels."""

    theta: float
    dim: int
    yarn: Yarn | None = None


@dataclass(frozen=True)
class ModelConfig:
    """What the components need, under the names of ``config.json`` where it has one."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    scoring_func: str
    swiglu_limit: float
    main_rope: Rope
    compress_rope: Rope
    layer_kinds: tuple[str, ...]  # sliding | csa | hca
    router_kinds: tuple[str, ...]  # hash | dense
    csa_rate: int
    hca_rate: int
    unread: tuple[str, ...] = ()  # keys of config.json that nothing here reads

    def compress_rate(self, layer: int) -> int:
        """Tokens per compressed entry; 0 on a sliding layer."""
        return {"sliding": 0, "csa": self.csa_rate, "hca": self.hca_rate}[self.layer_kinds[layer]]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dims of docs/stages.md that the configuration fixes."""
        return {
            "N": self.hc_mult,
            "M": self.hc_mult,
            "d": self.hidden_size,
            "H": self.num_attention_heads,
            "D": self.head_dim,
            "R2": self.qk_rope_head_dim // 2,
            "QL": self.q_lora_rank,
            "G": self.o_groups,
            "OL": self.o_lora_rank,
            "HI": self.index_n_heads,
            "DI": self.index_head_dim,
            "E": self.n_routed_experts,
            "k": self.num_experts_per_tok,
            "F": self.moe_intermediate_size,
            "V": self.vocab_size,
        }


def read_config(checkpoint: str | Path) -> ModelConfig:
    """The validated configuration of a checkpoint folder."""
    path = Path(checkpoint) / "config.json"
    if not path.is_file():
        raise ProductionError(str(path), expected="a config.json", came="no such file", fix="pass a checkpoint folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ProductionError(str(path), expected="a JSON object", came=f"unreadable text ({error})") from None
    return parse_config(raw, where=str(path))


def parse_config(raw: object, where: str = "config.json") -> ModelConfig:
    """The validated configuration of a parsed ``config.json``."""
    if not isinstance(raw, dict):
        raise ProductionError(where, expected="a JSON object", came=type(raw).__name__)
    keys = Keys(raw, where)
    _check_architecture(keys)
    layers = keys.count("num_hidden_layers")
    csa_rate, hca_rate, layer_kinds = _layer_kinds(keys, layers)
    head_dim = keys.count("head_dim")
    rope_dim = _rope_dim(keys, head_dim)
    main_rope, compress_rope = _ropes(keys, rope_dim)
    config = ModelConfig(
        vocab_size=keys.count("vocab_size"),
        hidden_size=keys.count("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=keys.count("num_attention_heads"),
        head_dim=head_dim,
        qk_rope_head_dim=rope_dim,
        q_lora_rank=keys.count("q_lora_rank"),
        o_groups=keys.count("o_groups"),
        o_lora_rank=keys.count("o_lora_rank"),
        sliding_window=keys.count("sliding_window"),
        index_n_heads=keys.count("index_n_heads"),
        index_head_dim=keys.count("index_head_dim"),
        index_topk=keys.count("index_topk"),
        hc_mult=keys.count("hc_mult"),
        hc_sinkhorn_iters=keys.count("hc_sinkhorn_iters"),
        hc_eps=keys.number("hc_eps", lambda v: v >= 0, "a number >= 0"),
        rms_norm_eps=keys.number("rms_norm_eps", lambda v: v >= 0, "a number >= 0"),
        n_routed_experts=keys.count("n_routed_experts"),
        num_experts_per_tok=keys.count("num_experts_per_tok"),
        moe_intermediate_size=keys.count("moe_intermediate_size"),
        routed_scaling_factor=keys.number("routed_scaling_factor"),
        scoring_func=str(keys.take("scoring_func", "sqrtsoftplus")),
        swiglu_limit=keys.number("swiglu_limit", lambda v: v > 0, "a number > 0"),
        main_rope=main_rope,
        compress_rope=compress_rope,
        layer_kinds=layer_kinds,
        router_kinds=_router_kinds(keys, layers),
        csa_rate=csa_rate,
        hca_rate=hca_rate,
        unread=keys.unread(),
    )
    _check_sizes(config, where)
    return config


def _check_architecture(keys: Keys) -> None:
    model_type = keys.take("model_type")
    if model_type == "deepseek_v41":
        raise keys.error("model_type", "'deepseek_v4'", model_type, "DeepSeek-V4.1 is another architecture")
    if model_type != "deepseek_v4":
        raise keys.error("model_type", "'deepseek_v4'", model_type)
    keys.exactly("hidden_act", "silu", "silu", "no other activation is implemented")
    keys.exactly("num_key_value_heads", 1, 1, "attention has one shared key/value head")
    keys.exactly("n_shared_experts", 1, 1, "one shared expert is implemented")
    keys.exactly("norm_topk_prob", True, True, "routing weights are always renormalised")
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        keys.exactly(key, False, False, "not implemented")
    quant = keys.take("quantization_config", {})
    if not isinstance(quant, dict):
        raise keys.error("quantization_config", "an object", quant)
    if quant.get("group_size", 16) != 16:
        raise keys.error("quantization_config.group_size", "16", quant["group_size"], "NVFP4 blocks have 16 values")
    if quant.get("weight_block_size", [128, 128]) != [128, 128]:
        raise keys.error("quantization_config.weight_block_size", "[128, 128]", quant["weight_block_size"])


def _layer_kinds(keys: Keys, layers: int) -> tuple[int, int, tuple[str, ...]]:
    """(csa rate, hca rate, kind of every layer) from compress_ratios or layer_types."""
    rates = dict(DEFAULT_RATES)
    given = keys.take("compress_rates", {})
    if not isinstance(given, dict) or set(given) - set(rates):
        raise keys.error("compress_rates", f"an object with the keys {', '.join(rates)}", given)
    rates.update(given)
    for key, name in zip(("compress_rate_csa", "compress_rate_hca"), rates, strict=True):
        rates[name] = keys.take(key, rates[name])
    for name, rate in rates.items():
        if not isinstance(rate, int) or isinstance(rate, bool) or rate < 1:
            raise keys.error(f"compress_rates.{name}", "an integer >= 1", rate)
    csa_rate, hca_rate = rates.values()

    draft = keys.take("num_nextn_predict_layers", 1)
    ratios, types = keys.take("compress_ratios"), keys.take("layer_types")
    if ratios is None and types is None:
        raise keys.error("compress_ratios", "compress_ratios or layer_types", None, "a schedule is never guessed")
    found: list[tuple[str, ...]] = []
    if ratios is not None:
        # The entries after num_hidden_layers belong to the draft module, not to a last dense layer.
        lengths = {layers, layers + draft} if isinstance(draft, int) else {layers}
        if not isinstance(ratios, list) or len(ratios) not in lengths:
            raise keys.wrong_length("compress_ratios", ratios, *lengths)
        ratios = ratios[:layers]
        if bad := [r for r in ratios if isinstance(r, bool) or r not in KIND_OF_RATIO]:
            raise keys.error("compress_ratios", "entries 0, 4 or 128", bad[0])
        found.append(tuple(KIND_OF_RATIO[r] for r in ratios))
        used = {kind: rate for kind, rate in (("csa", csa_rate), ("hca", hca_rate)) if kind in found[0]}
        if any(KIND_OF_RATIO.get(rate) != kind for kind, rate in used.items()):
            raise keys.error("compress_rates", "4 and 128, as compress_ratios says", rates)
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise keys.wrong_length("layer_types", types, layers)
        if bad := [t for t in types if t not in KIND_OF_TYPE]:
            raise keys.error("layer_types", f"entries among {', '.join(KIND_OF_TYPE)}", bad[0])
        found.append(tuple(KIND_OF_TYPE[t] for t in types))
    if len(set(found)) != 1:
        raise keys.error("layer_types", "the schedule of compress_ratios", types, "remove one of the two")
    return csa_rate, hca_rate, found[0]


def _router_kinds(keys: Keys, layers: int) -> tuple[str, ...]:
    names = {"hash_moe": "hash", "moe": "dense"}
    hashed, types = keys.take("num_hash_layers"), keys.take("mlp_layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise keys.wrong_length("mlp_layer_types", types, layers)
        if bad := [t for t in types if t not in names]:
            raise keys.error("mlp_layer_types", f"entries among {', '.join(names)}", bad[0])
        return tuple(names[t] for t in types)
    if not isinstance(hashed, int) or isinstance(hashed, bool) or hashed < 0:
        raise keys.error("num_hash_layers", "an integer >= 0 (or mlp_layer_types)", hashed)
    return tuple("hash" if layer < hashed else "dense" for layer in range(layers))


def _rope_dim(keys: Keys, head_dim: int) -> int:
    given, factor = keys.take("qk_rope_head_dim"), keys.take("partial_rotary_factor")
    if given is None and factor is None:
        raise keys.error("qk_rope_head_dim", "an even integer (or partial_rotary_factor)", None)
    derived = given if factor is None else int(head_dim * keys.number("partial_rotary_factor"))
    dim = derived if given is None else given
    if not isinstance(dim, int) or isinstance(dim, bool) or dim != derived or dim % 2 or not 0 < dim <= head_dim:
        fix = "" if factor is None else f"partial_rotary_factor {factor} says {derived}"
        raise keys.error("qk_rope_head_dim", f"an even integer in 2..{head_dim}", dim, fix)
    return dim


def _ropes(keys: Keys, dim: int) -> tuple[Rope, Rope]:
    """Main: plain. Compress: YaRN when the checkpoint says so, never with an amplitude on cos and sin."""
    nested, flat = keys.take("rope_parameters"), keys.take("rope_scaling")
    if isinstance(nested, dict) and isinstance(nested.get("main"), dict) and isinstance(nested.get("compress"), dict):
        main, compress = nested["main"], nested["compress"]
        for key in ("rope_theta", "compress_rope_theta"):
            keys.take(key)
        main_theta, compress_theta = main.get("rope_theta"), compress.get("rope_theta")
        place = "rope_parameters.compress"
        for label, part in nested.items():
            if (
                part.get("partial_rotary_factor") not in (None, keys.raw.get("partial_rotary_factor"))
                and int(part["partial_rotary_factor"] * keys.raw["head_dim"]) != dim
            ):
                wanted = f"a factor that gives {dim} channels"
                raise keys.error(
                    f"rope_parameters.{label}.partial_rotary_factor", wanted, part["partial_rotary_factor"]
                )
        if _rope_type(compress) == "yarn" and compress.get("attention_factor") is None:
            raise keys.error(f"{place}.attention_factor", "1.0", None, "without it YaRN's own amplitude would apply")
    elif nested is not None and flat is not None:
        raise keys.error("rope_scaling", "rope_scaling or rope_parameters", flat, "remove one of the two")
    else:
        main, compress = {}, nested if nested is not None else flat or {}
        main_theta, compress_theta = keys.take("rope_theta"), keys.take("compress_rope_theta")
        place = "rope_scaling"
    if not isinstance(compress, dict):
        raise keys.error(place, "an object", compress)
    if _rope_type(main) != "default":
        raise keys.error("rope_parameters.main.rope_type", "'default'", _rope_type(main))
    positive = (lambda v: v > 1, "a number > 1")
    return (
        Rope(keys.number_of("rope_theta", main_theta, *positive), dim),
        Rope(keys.number_of("compress_rope_theta", compress_theta, *positive), dim, _yarn(keys, compress, place)),
    )


def _rope_type(part: Mapping[str, Any]) -> str:
    return str(part.get("rope_type", part.get("type", "default")))


def _yarn(keys: Keys, part: Mapping[str, Any], place: str) -> Yarn | None:
    rope_type = _rope_type(part)
    if rope_type == "default":
        return None
    if rope_type != "yarn":
        raise keys.error(f"{place}.type", "'yarn' or 'default'", rope_type, "no other rope type is implemented")
    if part.get("attention_factor", 1.0) != 1.0:
        raise keys.error(f"{place}.attention_factor", "1.0", part["attention_factor"], "DeepSeek-V4 has no amplitude")
    if part.get("truncate", True) is not True:
        raise keys.error(f"{place}.truncate", "true", part["truncate"], "the correction range is rounded outwards")
    original = part.get("original_max_position_embeddings")
    if not isinstance(original, int) or isinstance(original, bool) or original < 1:
        raise keys.error(f"{place}.original_max_position_embeddings", "an integer >= 1", original)
    positive = (lambda v: v > 0, "a number > 0")
    return Yarn(
        factor=keys.number_of(f"{place}.factor", part.get("factor"), lambda v: v >= 1, "a number >= 1"),
        original_max_position_embeddings=original,
        beta_fast=keys.number_of(f"{place}.beta_fast", part.get("beta_fast") or 32, *positive),
        beta_slow=keys.number_of(f"{place}.beta_slow", part.get("beta_slow") or 1, *positive),
    )


def _check_sizes(config: ModelConfig, where: str) -> None:
    rules = (
        (config.num_attention_heads % config.o_groups == 0, "num_attention_heads", f"a multiple of {config.o_groups}"),
        (config.qk_rope_head_dim <= config.index_head_dim, "index_head_dim", f"at least {config.qk_rope_head_dim}"),
        (
            config.num_experts_per_tok <= config.n_routed_experts,
            "num_experts_per_tok",
            f"at most {config.n_routed_experts}",
        ),
    )
    for ok, key, expected in rules:
        if not ok:
            raise ProductionError(f"{where}: {key}", expected=expected, came=str(getattr(config, key)))
