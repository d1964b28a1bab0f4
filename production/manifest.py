"""Every tensor that a checkpoint must hold, by the stage that uses it.

DeepSeek's own names (``production.names`` translates those on disk), the names of docs/stages.md in the stages. A
``Leaf`` is one parameter of one stage; projections that may be quantised are given by their stem, and what lies under
it depends on the format found (``production.storage``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from production.config import ModelConfig

#: Tensors of the draft module: part of a checkpoint, no part of this model.
SET_ASIDE = "mtp."


@dataclass(frozen=True)
class Leaf:
    """One parameter. ``native`` holds ``{expert}`` where the parameter is stacked over ``experts``."""

    name: str  # in the stage
    native: str  # on disk: the tensor, or the stem of a projection
    shape: tuple[int, ...]
    dtype: str = "BF16"  # as released; BF16 and F32 are read for each other
    projection: bool = False
    experts: int = 0

    def stems(self) -> Iterator[str]:
        """The native name, once per expert where it is stacked."""
        if not self.experts:
            yield self.native
        for expert in range(self.experts):
            yield self.native.format(expert=expert)


def stage_leaves(config: ModelConfig) -> dict[str, tuple[Leaf, ...]]:
    """Full stage name -> its parameters, for the whole model."""
    d, streams = config.hidden_size, config.hc_mult
    leaves = {
        "embed": (Leaf("weight", "embed.weight", (config.vocab_size, d)),),
        "hc_head": _hyper("hc_head", streams, 1, streams * d),
        "final_norm": (Leaf("weight", "norm.weight", (d,)),),
        "lm_head": (Leaf("weight", "head.weight", (config.vocab_size, d)),),
    }
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        half = {**_attention_half(config, layer, at), **_ffn_half(config, layer, at)}
        leaves.update((at + stage, found) for stage, found in half.items())
    return leaves


def _attention_half(config: ModelConfig, layer: int, at: str) -> dict[str, tuple[Leaf, ...]]:
    d, dim, heads, streams = config.hidden_size, config.head_dim, config.num_attention_heads, config.hc_mult
    attn = at + "attn."
    stages = {
        "attn_hc": _hyper(at + "hc_attn", (2 + streams) * streams, 3, streams * d),
        "attn_norm": (Leaf("weight", at + "attn_norm.weight", (d,)),),
        "q_a": (_projection("weight", attn + "wq_a", config.q_lora_rank, d),),
        "q_a_norm": (Leaf("weight", attn + "q_norm.weight", (config.q_lora_rank,)),),
        "q_b": (_projection("weight", attn + "wq_b", heads * dim, config.q_lora_rank),),
        "kv": (_projection("weight", attn + "wkv", dim, d),),
        "kv_norm": (Leaf("weight", attn + "kv_norm.weight", (dim,)),),
        "attn_core": (Leaf("sinks", attn + "attn_sink", (heads,), "F32"),),
        "o_a": (
            _projection("weight", attn + "wo_a", config.o_groups * config.o_lora_rank, heads * dim // config.o_groups),
        ),
        "o_b": (_projection("weight", attn + "wo_b", d, config.o_groups * config.o_lora_rank),),
    }
    kind, rate = config.layer_kinds[layer], config.compress_rate(layer)
    if kind != "sliding":
        series = 2 if kind == "csa" else 1
        stages["compressor"] = _pooling(attn + "compressor.", series * dim, dim, rate, d)
    if kind == "csa":
        inner = attn + "indexer."
        stages["indexer"] = (
            *_pooling(inner + "compressor.", 2 * config.index_head_dim, config.index_head_dim, rate, d),
            _projection(
                "q_b_proj.weight", inner + "wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank
            ),
            Leaf("weights_proj.weight", inner + "weights_proj.weight", (config.index_n_heads, d)),
        )
    return stages


def _ffn_half(config: ModelConfig, layer: int, at: str) -> dict[str, tuple[Leaf, ...]]:
    d, inner, streams, experts = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.hc_mult,
        config.n_routed_experts,
    )
    ffn = at + "ffn."
    if config.router_kinds[layer] == "hash":
        choice = Leaf("tid2eid", ffn + "gate.tid2eid", (config.vocab_size, config.num_experts_per_tok), "I64")
    else:
        choice = Leaf("e_score_correction_bias", ffn + "gate.bias", (experts,), "F32")
    mlp = (
        ("gate_proj.weight", "w1", inner, d),
        ("up_proj.weight", "w3", inner, d),
        ("down_proj.weight", "w2", d, inner),
    )
    return {
        "ffn_hc": _hyper(at + "hc_ffn", (2 + streams) * streams, 3, streams * d),
        "ffn_norm": (Leaf("weight", at + "ffn_norm.weight", (d,)),),
        "router": (Leaf("weight", ffn + "gate.weight", (experts, d)), choice),
        "experts": tuple(
            Leaf(name, ffn + "experts.{expert}." + w, (n, k), projection=True, experts=experts) for name, w, n, k in mlp
        ),
        "shared_expert": tuple(_projection(name, ffn + "shared_experts." + w, n, k) for name, w, n, k in mlp),
    }


def _projection(name: str, stem: str, n: int, k: int) -> Leaf:
    return Leaf(name, stem, (n, k), projection=True)


def _hyper(stem: str, rows: int, scales: int, channels: int) -> tuple[Leaf, ...]:
    return (
        Leaf("fn", stem + "_fn", (rows, channels), "F32"),
        Leaf("base", stem + "_base", (rows,), "F32"),
        Leaf("scale", stem + "_scale", (scales,), "F32"),
    )


def _pooling(at: str, channels: int, dim: int, rate: int, d: int) -> tuple[Leaf, ...]:
    return (
        Leaf("kv_proj.weight", at + "wkv.weight", (channels, d)),
        Leaf("gate_proj.weight", at + "wgate.weight", (channels, d)),
        Leaf("position_bias", at + "ape", (rate, channels), "F32"),
        Leaf("kv_norm.weight", at + "norm.weight", (dim,)),
    )
