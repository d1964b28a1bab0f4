"""Layouts: which names a checkpoint uses and in which format it stores each kind of linear.

The two are independent. Names come in four families (DeepSeek's own; DeepSeek's under ``model.`` as transformers saves
them; Hugging Face's with stacked experts; Hugging Face's with one tensor per expert), formats in five:

    plain     BF16 or F32
    fp8       .weight F8_E4M3 [N, K]; one scale per 128 x 128 block (E8M0, F32 or BF16), rounded up at the edges
    mxfp4     .weight I8 [N, K/2], two E2M1 a byte; .scale E8M0 [N, K/32]
    nvfp4     .weight U8 [N, K/2]; .weight_scale E4M3 [N, K/16]; .weight_scale_2 F32 []; .input_scale F32 []
    nvfp4-ct  .weight_packed U8 [N, K/2]; .weight_scale as nvfp4; .weight_global_scale F32 [1], the reciprocal of
              weight_scale_2; .input_global_scale F32 [1], the reciprocal of input_scale

Sources: the conversion mapping of transformers 5.24 ("deepseek_v4") and what its save_pretrained writes; NVIDIA
Model-Optimizer examples/deepseek/deepseek_v4; compressed-tensors' nvfp4-pack-quantized and float-quantized formats.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NAMES = ("deepseek", "hf-saved", "hf", "hf-experts")
FP8_LEAVES = ("scale", "weight_scale_inv", "weight_scale")


@dataclass(frozen=True)
class Layout:
    """``forms`` maps ``attention``, ``indexer query``, ``shared expert``, ``routed experts`` to a format."""

    names: str
    forms: Mapping[str, str]
    fp8_leaf: str = "scale"
    fp8_scale: str = "F8_E8M0"  # dtype in which FP8 scales are written; any of three is read

    def form(self, linear: str, draft: bool = False) -> str:
        """The format of a kind of linear; a draft block keeps the formats of the original release."""
        if not linear:
            return "plain"
        if draft:
            return "mxfp4" if linear == "routed experts" else "fp8"
        return self.forms[linear]

    @property
    def fused(self) -> bool:
        """Whether routed experts are stacked in one tensor a layer."""
        return self.names == "hf"

    @property
    def drafts(self) -> bool:
        """Whether the layout has a place for the next-token-prediction block."""
        return self.names == "deepseek"


def _forms(experts: str, shared: str, attention: str) -> dict[str, str]:
    return {
        "attention": attention,
        "indexer query": attention,
        "shared expert": shared,
        "routed experts": experts,
    }


LAYOUTS: Mapping[str, Layout] = {
    "deepseek": Layout("deepseek", _forms("mxfp4", "fp8", "fp8")),
    "hf": Layout("hf", _forms("plain", "plain", "plain")),
    "hf-saved": Layout("hf-saved", _forms("plain", "plain", "plain")),
    "hf-experts": Layout("hf-experts", _forms("plain", "plain", "plain")),
    "modelopt-experts": Layout("deepseek", _forms("nvfp4", "fp8", "fp8")),
    "modelopt-all": Layout("deepseek", _forms("nvfp4", "nvfp4", "nvfp4")),
    "compressed-tensors": Layout("hf-experts", _forms("nvfp4-ct", "nvfp4-ct", "fp8"), "weight_scale", "BF16"),
}


def title(layout: Layout) -> str:
    """The name of a layout, or what it is made of."""
    for name, known in LAYOUTS.items():
        if (known.names, known.forms) == (layout.names, layout.forms):
            return name
    return f"{layout.names} names, " + ", ".join(f"{kind} {form}" for kind, form in layout.forms.items())


_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    **{f"hc_head_{leaf}": f"model.hc_head.hc_{leaf}" for leaf in ("fn", "base", "scale")},
}
_POOL = {"wkv.weight": "kv_proj.weight", "wgate.weight": "gate_proj.weight", "ape": "position_bias"}
_POOL["norm.weight"] = "kv_norm.weight"
_HF = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_{half}_{leaf}": f"{half}_hc.{leaf}" for half in ("attn", "ffn") for leaf in ("fn", "base", "scale")},
    "attn.attn_sink": "self_attn.sinks",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    **{f"attn.compressor.{own}": f"self_attn.compressor.{hf}" for own, hf in _POOL.items()},
    **{f"attn.indexer.compressor.{own}": f"self_attn.compressor.indexer.{hf}" for own, hf in _POOL.items()},
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
}
_MLP = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def names_of(key: str, names: str) -> tuple[str, ...]:
    """What a part may be called on disk; the first is what is written. ``key`` is DeepSeek's own name."""
    if names == "deepseek" or key.startswith("mtp."):
        return (key,)
    if names == "hf-saved":
        if key == "head.weight":
            return "head.weight", "lm_head.weight", "model.head.weight"
        if key in _TOP:
            return _TOP[key], f"model.{key}"
        own = f"model.{key}"
        # transformers reverses its rename ".norm. -> .kv_norm." on attention's own kv_norm too
        return (own.replace(".kv_norm.", ".norm."), own) if key.endswith("attn.kv_norm.weight") else (own,)
    if key in _TOP:
        return (_TOP[key],)
    _, layer, rest = key.split(".", 2)
    at = f"model.layers.{layer}."
    if rest in _HF:
        return (at + _HF[rest],)
    stem, leaf, _ = rest.removeprefix("ffn.").rsplit(".", 2)  # experts.3.w1 or shared_experts.w1
    named = f"{at}mlp.{stem}.{_MLP[leaf]}.weight"
    return (named, f"{at}mlp.{stem}.{leaf}.weight") if stem.startswith("experts.") else (named,)


_MARKS = (
    ("hf", re.compile(r"^model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj$")),
    ("hf-experts", re.compile(r"^model\.layers\.\d+\.mlp\.experts\.\d+\.")),
    ("hf-saved", re.compile(r"^model\.layers\.\d+\.(attn|ffn)\.")),
    ("deepseek", re.compile(r"^layers\.\d+\.(attn|ffn)\.")),
)
_KINDS = (
    ("routed experts", re.compile(r"\.(ffn|mlp)\.experts\.")),
    ("shared expert", re.compile(r"\.shared_experts\.")),
    ("indexer query", re.compile(r"\.indexer\.(wq_b|q_b_proj)\.")),
    ("attention", re.compile(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|q_a_proj|q_b_proj|kv_proj|o_a_proj|o_b_proj)\.")),
)


def detect(dtypes: Mapping[str, str]) -> Layout | None:
    """The layout of tensors given as name -> dtype; None when no name is one of a DeepSeek-V4 layer.

    By majority, so that a missing or foreign tensor does not change what is expected of the rest.
    """
    families: Counter[str] = Counter()
    votes: dict[str, Counter[str]] = {kind: Counter() for kind, _ in _KINDS}
    leaves: Counter[str] = Counter()
    scales: Counter[str] = Counter()
    for name, dtype in dtypes.items():
        if name.startswith("mtp."):
            continue
        families.update(family for family, mark in _MARKS if mark.match(name))
        kind = None if ".compressor.kv_proj." in name or ".compressor.wkv." in name else _first(name)
        if kind is None:
            continue
        if form := _form(name, dtype, dtypes):
            votes[kind][form] += 1
        if form == "fp8":
            stem = name.removesuffix("weight")
            for leaf in FP8_LEAVES:
                if stem + leaf in dtypes:
                    leaves[leaf] += 1
                    scales[dtypes[stem + leaf]] += 1
    if not families:
        return None
    # Two stacked tensors a layer are outnumbered by anything.
    family = "hf" if families["hf"] else families.most_common(1)[0][0]
    forms = {kind: _most(found, "plain") for kind, found in votes.items()}
    if not votes["indexer query"]:
        forms["indexer query"] = forms["attention"]
    return Layout(family, forms, _most(leaves, "scale"), _most(scales, "F8_E8M0"))


def _first(name: str) -> str | None:
    if ".compressor.indexer.kv_proj." in name or ".indexer.compressor." in name:
        return None
    return next((kind for kind, mark in _KINDS if mark.search(name)), None)


def _form(name: str, dtype: str, dtypes: Iterable[str]) -> str | None:
    """The format that one tensor speaks for; None for companions."""
    if name.endswith(".weight_packed"):
        return "nvfp4-ct"
    if name.endswith((".gate_up_proj", ".down_proj")):
        return "plain"
    if not name.endswith(".weight"):
        return None
    if dtype == "U8" and f"{name.removesuffix('.weight')}.scale" in dtypes:
        return "mxfp4"
    return {"F8_E4M3": "fp8", "I8": "mxfp4", "U8": "nvfp4", "BF16": "plain", "F32": "plain"}.get(dtype)


def _most(found: Counter[str], default: str) -> str:
    return found.most_common(1)[0][0] if found else default
