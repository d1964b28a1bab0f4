"""Activation maxima of every NVFP4 linear over real prompts, which give the checkpoint's `input_scale`s."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV4ForCausalLM

from .arch import EXPERTS

_ATTN = {
    "q_a_proj": "wq_a",
    "q_b_proj": "wq_b",
    "kv_proj": "wkv",
    "o_a_proj": "wo_a",
    "o_b_proj": "wo_b",
    "compressor.indexer.q_b_proj": "indexer.wq_b",
}


@torch.no_grad()
def input_amax(model: DeepseekV4ForCausalLM, batches: Iterable[Tensor]) -> dict[str, float]:
    """Largest |input| of each quantised linear by checkpoint name, over `batches` of token ids [B, S].

    The gate and up halves of one MLP see one input, so they share a value. An expert that saw no token takes the
    largest value among its layer's experts.
    """
    seen: dict[str, float] = {}

    def note(names: Iterable[str], x: Tensor) -> None:
        if x.numel():
            value = x.abs().amax().item()
            for name in names:
                seen[name] = max(seen.get(name, 0.0), value)

    def linear(names: tuple[str, ...], _module: nn.Module, args: tuple[Any, ...]) -> None:
        note(names, args[0])

    def experts(stem: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        hidden, picks, _ = args  # [T, H], [T, k]
        for e in range(EXPERTS):
            x = hidden[(picks == e).any(-1)]
            note((f"{stem}.{e}.w1", f"{stem}.{e}.w3"), x)
            note((f"{stem}.{e}.w2",), module._apply_gate(x @ module.gate_up_proj[e].T))

    handles = []
    for i, layer in enumerate(model.model.layers):
        for path, leaf in _ATTN.items():
            if "indexer" in path and not hasattr(layer.self_attn.compressor, "indexer"):
                continue
            module = layer.self_attn.get_submodule(path)
            handles.append(module.register_forward_pre_hook(partial(linear, (f"layers.{i}.attn.{leaf}",))))
        shared = f"layers.{i}.ffn.shared_experts"
        mlp = layer.mlp.shared_experts
        handles.append(mlp.gate_proj.register_forward_pre_hook(partial(linear, (f"{shared}.w1", f"{shared}.w3"))))
        handles.append(mlp.down_proj.register_forward_pre_hook(partial(linear, (f"{shared}.w2",))))
        handles.append(layer.mlp.experts.register_forward_pre_hook(partial(experts, f"layers.{i}.ffn.experts")))
    try:
        for ids in batches:
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    _fill_unseen(seen, len(model.model.layers))
    return seen


def _fill_unseen(seen: dict[str, float], layers: int) -> None:
    """Give experts without a token the largest value of their layer and projection."""
    for i in range(layers):
        for leaf in ("w1", "w2", "w3"):
            names = [f"layers.{i}.ffn.experts.{e}.{leaf}" for e in range(EXPERTS)]
            top = max(seen.get(name, 0.0) for name in names)
            for name in names:
                seen.setdefault(name, top)
