"""Tensor names of other checkpoints, translated into DeepSeek's own: the manifest is written in those alone.

Four families are known: DeepSeek's; DeepSeek's below ``model.`` with Hugging Face's top level, as save_pretrained
writes them (attention's kv_norm is ``attn.norm`` there); Hugging Face's with stacked experts; Hugging Face's with a
tensor per expert. Only the module's name is translated, so what a linear's companions are called stays visible.
"""

from __future__ import annotations

import re

#: whole names outside the layers
TOP = {
    "model.embed_tokens": "embed",
    "model.embed": "embed",
    "lm_head": "head",
    "model.head": "head",
    "model.norm": "norm",
}
#: within a layer, in this order: the longer a path, the earlier
MODULES = (
    (r"^input_layernorm\b", "attn_norm"),
    (r"^post_attention_layernorm\b", "ffn_norm"),
    (r"^(attn|ffn)_hc\.(fn|base|scale)$", r"hc_\1_\2"),
    (r"^self_attn\.compressor\.indexer\.scorer\.", "attn.indexer."),
    (r"^self_attn\.compressor\.indexer\.q_b_proj\b", "attn.indexer.wq_b"),
    (r"^self_attn\.compressor\.indexer\.", "attn.indexer.compressor."),
    (r"^self_attn\.", "attn."),
    (r"^mlp\.", "ffn."),
    (r"\bcompressor\.kv_proj\b", "compressor.wkv"),
    (r"\bcompressor\.gate_proj\b", "compressor.wgate"),
    (r"\bcompressor\.position_bias$", "compressor.ape"),
    (r"\bcompressor\.kv_norm\b", "compressor.norm"),
    (r"^attn\.sinks$", "attn.attn_sink"),
    (r"^attn\.q_a_norm\b", "attn.q_norm"),
    (r"^attn\.norm\b", "attn.kv_norm"),
    (r"^attn\.q_([ab])_proj\b", r"attn.wq_\1"),
    (r"^attn\.kv_proj\b", "attn.wkv"),
    (r"^attn\.o_([ab])_proj\b", r"attn.wo_\1"),
    (r"^ffn\.gate\.e_score_correction_bias$", "ffn.gate.bias"),
    (r"^(ffn\.(?:shared_experts|experts\.\d+))\.gate_proj\b", r"\1.w1"),
    (r"^(ffn\.(?:shared_experts|experts\.\d+))\.up_proj\b", r"\1.w3"),
    (r"^(ffn\.(?:shared_experts|experts\.\d+))\.down_proj\b", r"\1.w2"),
)
_RULES = tuple((re.compile(pattern), target) for pattern, target in MODULES)
_LAYER = re.compile(r"^model\.(layers\.\d+\.)(.+)$")
_HEAD = re.compile(r"^model\.hc_head(?:\.hc)?_(fn|base|scale)$")
#: gate and up above each other, or down, of all experts of a layer
STACKED = re.compile(r"^model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)$")


def native(name: str) -> str:
    """DeepSeek's name of a tensor; what no family knows stays as it is, to be refused as unknown."""
    if (layer := _LAYER.match(name)) is not None:
        path = layer[2]
        for pattern, target in _RULES:
            path = pattern.sub(target, path)
        return layer[1] + path
    if (head := _HEAD.match(name)) is not None:
        return f"hc_head_{head[1]}"
    module, dot, leaf = name.rpartition(".")
    return f"{TOP[module]}{dot}{leaf}" if module in TOP else name
