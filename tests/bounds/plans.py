"""The two plans of docs/stages.md for every kind, and the dtypes of the outputs under each."""

from __future__ import annotations

_POOL = dict.fromkeys(("proj", "probs", "pooled", "norm", "table", "out"), "bf16")
_POOL_ONCE = {**dict.fromkeys(_POOL, "fp32"), "out": "bf16"}
_MLP = dict.fromkeys(("gate", "up", "silu", "act", "out"), "bf16")
_MLP_ONCE = {**dict.fromkeys(_MLP, "fp32"), "act": "bf16", "out": "bf16"}
_MORE = ("down", "weighted", "sum")

#: how the reference rounds in bf16
REFERENCE: dict[str, dict[str, str]] = {
    "attn_norm": {"out": "bf16"},
    "q_b_norm": {"rsqrt": "bf16", "out": "bf16"},
    "q_a": {"weight": "bf16", "acc": "fp32", "out": "bf16"},
    "o_a": {"weight": "bf16", "acc": "fp32", "out": "bf16"},
    "rope_cache": {"angle": "fp32", "out": "bf16"},
    "q_rope": {"out": "bf16"},
    "attn_unrope": {"out": "bf16"},
    "attn_hc": {"collapsed": "bf16"},
    "hc_head": {"collapsed": "bf16"},
    "attn_mix": {"coef": "bf16", "terms": "bf16", "out": "bf16"},
    "compressor": {**_POOL, "angle": "fp32"},
    "indexer": {**_POOL, "angle": "fp32", "weight": "bf16", "q": "bf16", "q_rope": "bf16", "head_weight": "bf16"},
    "attn_core": {"logits": "bf16", "probs": "bf16", "acc": "fp32", "out": "bf16"},
    "router": {"logits": "bf16", "scores": "bf16", "weights": "bf16"},
    "experts": {"weight": "bf16", **_MLP, **dict.fromkeys(_MORE, "bf16")},
    "shared_expert": {"weight": "bf16", **_MLP},
    "moe_sum": {"out": "bf16"},
}

#: fp32 between bf16 activations
PRODUCTION: dict[str, dict[str, str]] = {
    **REFERENCE,
    "q_b_norm": {"rsqrt": "fp32", "out": "bf16"},
    "q_a": {"acc": "fp32", "out": "bf16"},
    "o_a": {"acc": "fp32", "out": "bf16"},
    "rope_cache": {"out": "fp32"},
    "attn_mix": {"coef": "fp32", "terms": "fp32", "out": "bf16"},
    "compressor": _POOL_ONCE,
    "indexer": {**_POOL_ONCE, "q": "fp32", "q_rope": "bf16", "head_weight": "fp32"},
    "attn_core": {"logits": "fp32", "probs": "fp32", "acc": "fp32", "out": "bf16"},
    "router": dict.fromkeys(("logits", "scores", "weights"), "fp32"),
    "experts": {**_MLP_ONCE, **dict.fromkeys(_MORE, "fp32")},
    "shared_expert": _MLP_ONCE,
}

#: outputs whose own point has another name than theirs; all other outputs are rounded by the point of their name
_POINT = {"keys": "out", "collapsed": "collapsed", "pooled": "pooled", "logits": "logits", "weights": "weights"}
_ALWAYS_FP32 = {"pre", "post", "comb", "scores", "lse", "entropy", "sink_mass"}


def plan(kind: str, which: str) -> dict[str, str]:
    """`reference`, `production` or `fp32` (everything, in an fp32 run)."""
    if which == "fp32":
        return dict.fromkeys(REFERENCE[kind], "fp32")
    return (REFERENCE if which == "reference" else PRODUCTION)[kind]


def output_dtype(kind: str, output: str, points: dict[str, str]) -> str:
    """What an output is stored in: the dtype its rounding point declares."""
    if output in _ALWAYS_FP32 or (kind == "router" and output == "picks"):
        return "fp32"
    return points.get(output if output in points else _POINT.get(output, "out"), points.get("out", "fp32"))
