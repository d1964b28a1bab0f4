"""The stage graph of a six-layer model, as docs/stages.md has it, for the report's synthetic runs."""

from __future__ import annotations

LENGTH, HEADS, EXPERTS = 320, 4, 8
BUCKETS, TOKEN_WIDTH = 160, 2
SIZES = dict(B=1, S=LENGTH, N=4, M=4, d=128, H=HEADS, D=512, R2=32, QL=64, G=2, OL=64, T=80, K=32, DI=128)  # noqa: C408
SIZES |= dict(E=EXPERTS, k=2, F=128, V=64, J=400)  # noqa: C408
SLICED = {"S": "position", "H": "head", "D": "channel", "d": "channel", "N": "stream", "E": "expert", "G": "group"}
ATTENTION = ("sliding", "sliding", "csa", "hca", "csa", "hca")
FAULT = "layers.2.attn_core"

HEAD = "embed streams:BSNd:exact", "rope_cache main_cos:BS.R2:fp32 compress_cos:BS.R2:fp32"
TAIL = "hc_head pre:BSN:fp32 collapsed:BSd", "final_norm x:BSd", "lm_head logits:BSV:fp32"
LAYER = (
    "attn_hc pre:BSN:fp32 post:BSN:fp32 comb:BSNM:fp32 collapsed:BSd",
    "attn_norm x:BSd",
    "q_a q_a:BS.QL",
    "q_a_norm q_residual:BS.QL",
    "q_b q:BSHD",
    "q_b_norm q:BSHD",
    "q_rope q:BSHD",
    "kv kv:BSD",
    "kv_norm kv:BSD",
    "kv_rope kv:BSD",
    "compressor pooled:BTD:fp32 keys:BTD",
    "indexer keys:BT.DI scores:BST:fp32 picks:BSK:picks",
    "attn_core out:BSHD visible:BSJ:exact lse:BSH:fp32 entropy:BSH:stat sink_mass:BSH:stat",
    "attn_unrope out:BSHD",
    "o_a o_a:BSG.OL",
    "o_b out:BSd",
    "attn_mix streams:BSNd",
    "ffn_hc pre:BSN:fp32 post:BSN:fp32 comb:BSNM:fp32 collapsed:BSd",
    "ffn_norm x:BSd",
    "router logits:BSE:fp32 weights:BSk:fp32 picks:BSk:picks",
    "experts gate:BSkF:fp32 up:BSkF:fp32 act:BSkF down:BSkd:fp32 out:BSd",
    "shared_expert gate:BSF act:BSF out:BSd",
    "moe_sum out:BSd",
    "ffn_mix streams:BSNd",
)
FORMULA = {
    "local": "|production - oracle| <= h(|y| + d) + d,  d = min(lambda * RSS, sum)",
    "free": "error(production) <= 1.5 * error(reference), both against the oracle, picks replayed",
    "exact": "bit for bit",
    "picks": "every differing pick lies inside production's own score bound",
}


def graph(layers: int = 6) -> list[tuple[str, int | None, str]]:
    """(full name, layer, output spec) of every stage in execution order."""
    out: list[tuple[str, int | None, str]] = []
    for spec in HEAD:
        name, _, outputs = spec.partition(" ")
        out.append((name, None, outputs))
    for layer in range(layers):
        kind = ATTENTION[layer % len(ATTENTION)]
        for spec in LAYER:
            name, _, outputs = spec.partition(" ")
            if (name == "compressor" and kind == "sliding") or (name == "indexer" and kind != "csa"):
                continue
            out.append((f"layers.{layer}.{name}", layer, outputs))
    for spec in TAIL:
        name, _, outputs = spec.partition(" ")
        out.append((name, None, outputs))
    return out


def dims_of(word: str) -> tuple[str, ...]:
    first, _, last = word.partition(".")
    return (*first, last) if last else tuple(first)


_INDEX = {name: i for i, (name, _, _) in enumerate(graph(64))}


def graph_index(stage: str) -> int:
    """Position in execution order (layer graphs of any depth up to 64)."""
    return _INDEX[stage] if stage in _INDEX else len(_INDEX)
