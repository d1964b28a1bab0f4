"""Every tensor that a checkpoint must hold, generated from its config.

One entry a tensor: its name in the checkpoint (DeepSeek's own names), the Hugging Face parameter it fills, the stage
and canonical leaf under which the harness shows it, and its logical shape. A checkpoint is read only if its names are
exactly these, beside the multi-token-prediction block ``mtp.*``, which is set aside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from reference.geometry import CSA, SLIDING, Geometry

#: linear: BF16, F32 or packed NVFP4. float: BF16 or F32. table: integers.
Kind = Literal["linear", "float", "table"]


@dataclass(frozen=True)
class Entry:
    """One tensor; an expert's has its index. Entries of one target come in the order in which it stacks them."""

    name: str
    target: str
    stage: str
    leaf: str
    shape: tuple[int, ...]
    kind: Kind
    expert: int | None = None

    @property
    def stem(self) -> str:
        """The name without ``.weight``: companions of a packed weight start with it."""
        return self.name.removesuffix(".weight")


def entries(g: Geometry, depth: int | None = None) -> Iterator[Entry]:
    """The manifest of ``g``; with ``depth``, of its first layers only (the tensors outside layers always come)."""
    d, streams = g.hidden_size, g.hc_mult
    yield Entry("embed.weight", "model.embed_tokens.weight", "embed", "weight", (g.vocab_size, d), "float")
    for leaf, shape in (("fn", (streams, streams * d)), ("base", (streams,)), ("scale", (1,))):
        yield Entry(f"hc_head_{leaf}", f"model.hc_head.hc_{leaf}", "hc_head", leaf, shape, "float")
    yield Entry("norm.weight", "model.norm.weight", "final_norm", "weight", (d,), "float")
    yield Entry("head.weight", "lm_head.weight", "lm_head", "weight", (g.vocab_size, d), "linear")
    for layer in range(g.num_hidden_layers if depth is None else depth):
        yield from _layer(g, layer)


Row = tuple[str, str, str, str, tuple[int, ...], Kind]


def _layer(g: Geometry, n: int) -> Iterator[Entry]:
    rows = [*_hyper(g), *_attention(g)]
    if g.layer_types[n] != SLIDING:
        rows += _compressor(g, n)
    if g.layer_types[n] == CSA:
        rows += _indexer(g, n)
    rows += _mlp(g, n)
    for name, target, stage, leaf, shape, kind in rows:
        yield Entry(f"layers.{n}.{name}", f"model.layers.{n}.{target}", f"layers.{n}.{stage}", leaf, shape, kind)
    d, f = g.hidden_size, g.moe_intermediate_size
    for e in range(g.n_routed_experts):
        for w, leaf, target, shape in (
            ("w1", "gate_proj.weight", "gate_up_proj", (f, d)),
            ("w3", "up_proj.weight", "gate_up_proj", (f, d)),
            ("w2", "down_proj.weight", "down_proj", (d, f)),
        ):
            yield Entry(
                f"layers.{n}.ffn.experts.{e}.{w}.weight",
                f"model.layers.{n}.mlp.experts.{target}",
                f"layers.{n}.experts",
                leaf,
                shape,
                "linear",
                expert=e,
            )


def _hyper(g: Geometry) -> list[Row]:
    mixes, wide = (2 + g.hc_mult) * g.hc_mult, g.hc_mult * g.hidden_size
    return [
        (f"hc_{half}_{leaf}", f"{half}_hc.{leaf}", f"{half}_hc", leaf, shape, "float")
        for half in ("attn", "ffn")
        for leaf, shape in (("fn", (mixes, wide)), ("base", (mixes,)), ("scale", (3,)))
    ]


def _attention(g: Geometry) -> list[Row]:
    d, head, low, wide = g.hidden_size, g.head_dim, g.q_lora_rank, g.num_attention_heads * g.head_dim
    ranks = g.o_groups * g.o_lora_rank
    return [
        ("attn_norm.weight", "input_layernorm.weight", "attn_norm", "weight", (d,), "float"),
        ("attn.wq_a.weight", "self_attn.q_a_proj.weight", "q_a", "weight", (low, d), "linear"),
        ("attn.q_norm.weight", "self_attn.q_a_norm.weight", "q_a_norm", "weight", (low,), "float"),
        ("attn.wq_b.weight", "self_attn.q_b_proj.weight", "q_b", "weight", (wide, low), "linear"),
        ("attn.wkv.weight", "self_attn.kv_proj.weight", "kv", "weight", (head, d), "linear"),
        ("attn.kv_norm.weight", "self_attn.kv_norm.weight", "kv_norm", "weight", (head,), "float"),
        ("attn.attn_sink", "self_attn.sinks", "attn_core", "sinks", (g.num_attention_heads,), "float"),
        ("attn.wo_a.weight", "self_attn.o_a_proj.weight", "o_a", "weight", (ranks, wide // g.o_groups), "linear"),
        ("attn.wo_b.weight", "self_attn.o_b_proj.weight", "o_b", "weight", (d, ranks), "linear"),
    ]


def _pool(g: Geometry, prefix: str, target: str, stage: str, rate: int, series: int, head: int) -> list[Row]:
    wide = series * head
    return [
        (f"{prefix}.wkv.weight", f"{target}.kv_proj.weight", stage, "kv_proj.weight", (wide, g.hidden_size), "linear"),
        (
            f"{prefix}.wgate.weight",
            f"{target}.gate_proj.weight",
            stage,
            "gate_proj.weight",
            (wide, g.hidden_size),
            "linear",
        ),
        (f"{prefix}.ape", f"{target}.position_bias", stage, "position_bias", (rate, wide), "float"),
        (f"{prefix}.norm.weight", f"{target}.kv_norm.weight", stage, "kv_norm.weight", (head,), "float"),
    ]


def _compressor(g: Geometry, n: int) -> list[Row]:
    series = 2 if g.layer_types[n] == CSA else 1  # CSA pools two overlapping series
    return _pool(g, "attn.compressor", "self_attn.compressor", "compressor", g.rate(n), series, g.head_dim)


def _indexer(g: Geometry, n: int) -> list[Row]:
    own, target = "attn.indexer", "self_attn.compressor.indexer"
    wide = g.index_n_heads * g.index_head_dim
    return [
        *_pool(g, f"{own}.compressor", target, "indexer", g.rate(n), 2, g.index_head_dim),
        (
            f"{own}.wq_b.weight",
            f"{target}.q_b_proj.weight",
            "indexer",
            "q_b_proj.weight",
            (wide, g.q_lora_rank),
            "linear",
        ),
        (
            f"{own}.weights_proj.weight",
            f"{target}.scorer.weights_proj.weight",
            "indexer",
            "weights_proj.weight",
            (g.index_n_heads, g.hidden_size),
            "linear",
        ),
    ]


def _mlp(g: Geometry, n: int) -> list[Row]:
    d, f, experts = g.hidden_size, g.moe_intermediate_size, g.n_routed_experts
    rows: list[Row] = [
        ("ffn_norm.weight", "post_attention_layernorm.weight", "ffn_norm", "weight", (d,), "float"),
        ("ffn.gate.weight", "mlp.gate.weight", "router", "weight", (experts, d), "float"),
    ]
    if g.mlp_layer_types[n] == "hash_moe":
        shape = (g.vocab_size, g.num_experts_per_tok)
        rows.append(("ffn.gate.tid2eid", "mlp.gate.tid2eid", "router", "tid2eid", shape, "table"))
    else:
        leaf = "e_score_correction_bias"
        rows.append(("ffn.gate.bias", f"mlp.gate.{leaf}", "router", leaf, (experts,), "float"))
    for w, name, size in (("w1", "gate_proj", (f, d)), ("w3", "up_proj", (f, d)), ("w2", "down_proj", (d, f))):
        leaf = f"{name}.weight"
        rows.append(
            (f"ffn.shared_experts.{w}.weight", f"mlp.shared_experts.{leaf}", "shared_expert", leaf, size, "linear")
        )
    return rows
