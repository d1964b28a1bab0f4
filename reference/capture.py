"""What the Hugging Face model computes on its own, seen through hooks: the wires that certify the composed ones.

Nothing is patched. Forward hooks read modules; queries, keys and the mask are the arguments of an attention function
registered beside eager attention, which calls it. The name is registered for the mask as well: without that,
transformers builds no mask at all and the model attends to the future without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from reference import hf
from reference.geometry import SLIDING
from reference.net import Net

NAME = "dsv4_harness_tap"


@dataclass
class Capture:
    """The wires of one forward by name, the masks that attention was handed by layer, and the logits."""

    wires: dict[str, Tensor] = field(default_factory=dict)
    masks: dict[int, Tensor | None] = field(default_factory=dict)
    logits: Tensor | None = None


def forward(net: Net, input_ids: Tensor, positions: Tensor) -> Tensor:
    """Logits of the whole model, no cache, nothing tapped: ``[B, S, V]``."""
    with torch.no_grad():
        logits: Tensor = net.model(input_ids=input_ids, position_ids=positions, use_cache=False).logits
    return logits


def capture(net: Net, input_ids: Tensor, positions: Tensor) -> Capture:
    """One forward with every tap in place; all taps are gone again afterwards."""
    seen = Capture()
    with _hooks(net, seen), _interface(net, seen):
        seen.logits = forward(net, input_ids, positions)
    if net.depth == net.geometry.num_hidden_layers:
        seen.wires["lm_head.logits"] = seen.logits
    return seen


@contextmanager
def _interface(net: Net, seen: Capture) -> Iterator[None]:
    """Route attention through a function that looks and then calls the eager one."""
    config = net.model.config
    attention: Any = type(hf.modeling.ALL_ATTENTION_FUNCTIONS)
    masks: Any = type(hf.masking.ALL_MASK_ATTENTION_FUNCTIONS)

    def tap(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **rest: Any) -> Any:
        out, probabilities = hf.modeling.eager_attention_forward(module, query, key, value, mask, **rest)
        layer, length = module.layer_idx, query.shape[2]
        here = f"layers.{layer}."
        seen.wires[f"{here}q_rope.q"] = query.transpose(1, 2)
        seen.wires[f"{here}kv_rope.kv"] = key[:, 0, :length]
        if module.layer_type != SLIDING:
            seen.wires[f"{here}compressor.keys"] = key[:, 0, length:]
        seen.masks[layer] = mask
        if mask is not None:
            seen.wires[f"{here}attn_core.visible"] = mask.squeeze(1) == 0
        seen.wires[f"{here}attn_core.out"] = out
        return out, probabilities

    attention.register(NAME, tap)
    masks.register(NAME, hf.masking.ALL_MASK_ATTENTION_FUNCTIONS[hf.EAGER])
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = hf.EAGER
        attention._global_mapping.pop(NAME, None)
        masks._global_mapping.pop(NAME, None)


@contextmanager
def _hooks(net: Net, seen: Capture) -> Iterator[None]:
    handles: list[Any] = []
    try:
        _hook_model(net, seen.wires, handles)
        for index in range(net.depth):
            _hook_layer(net, index, seen.wires, handles)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _after(handles: list[Any], module: nn.Module, look: Callable[[Any, Any], None]) -> None:
    """Call ``look(arguments, result)`` after each forward of ``module``."""
    handles.append(module.register_forward_hook(lambda _, arguments, result: look(arguments, result)))


def _hook_model(net: Net, wires: dict[str, Tensor], handles: list[Any]) -> None:
    model = net.model.model

    def first_layer(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        wires["embed.streams"] = arguments[0]
        for rope, (cos, sin) in keywords["position_embeddings"].items():
            wires[f"rope_cache.{rope}_cos"], wires[f"rope_cache.{rope}_sin"] = cos, sin

    handles.append(model.layers[0].register_forward_pre_hook(first_layer, with_kwargs=True))
    if net.depth == net.geometry.num_hidden_layers:
        _after(handles, model.hc_head, lambda _, y: wires.update({"hc_head.collapsed": y}))
        _after(handles, model.norm, lambda _, y: wires.update({"final_norm.x": y}))


def _hook_layer(net: Net, index: int, wires: dict[str, Tensor], handles: list[Any]) -> None:
    layer, g, here = net.layer(index), net.geometry, f"layers.{index}."

    def result(path: str, wire: str, shape: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        _after(handles, layer.get_submodule(path), lambda _, y: wires.update({here + wire: shape(y)}))

    def argument(path: str, wire: str, shape: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        _after(handles, layer.get_submodule(path), lambda x, _: wires.update({here + wire: shape(x[0])}))

    def hyper(half: str) -> None:
        def look(_: Any, y: tuple[Tensor, Tensor, Tensor]) -> None:
            wires.update(
                {f"{here}{half}_hc.{name}": t for name, t in zip(("post", "comb", "collapsed"), y, strict=True)}
            )

        _after(handles, layer.get_submodule(f"{half}_hc"), look)

    def heads(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], g.num_attention_heads, g.head_dim)

    hyper("attn")
    result("input_layernorm", "attn_norm.x")
    result("self_attn.q_a_proj", "q_a.q_a")
    result("self_attn.q_a_norm", "q_a_norm.q_residual")
    result("self_attn.q_b_proj", "q_b.q", heads)
    result("self_attn.q_b_norm", "q_b_norm.q", lambda q: q.transpose(1, 2))
    result("self_attn.kv_proj", "kv.kv")
    result("self_attn.kv_norm", "kv_norm.kv")
    argument("self_attn.o_a_proj", "attn_unrope.out", heads)
    result("self_attn.o_a_proj", "o_a.o_a")
    result("self_attn.o_b_proj", "o_b.out")
    argument("ffn_hc", "attn_mix.streams")
    hyper("ffn")
    result("post_attention_layernorm", "ffn_norm.x")
    result("mlp.shared_experts.gate_proj", "shared_expert.gate")
    result("mlp.shared_experts.up_proj", "shared_expert.up")
    argument("mlp.shared_experts.down_proj", "shared_expert.act")
    result("mlp.shared_experts", "shared_expert.out")
    result("mlp", "moe_sum.out")
    _after(handles, layer, lambda _, y: wires.update({f"{here}ffn_mix.streams": y}))
    _hook_experts(layer, here, wires, handles)
    if layer.self_attn.compressor is not None:
        _hook_compressor(layer.self_attn.compressor, here, wires, handles)


def _hook_experts(layer: Any, here: str, wires: dict[str, Tensor], handles: list[Any]) -> None:
    # Both see [B * S, ...]; the block's output, which comes after, tells B and S.
    parts: dict[str, Tensor] = {}

    def routed(_: Any, y: tuple[Tensor, Tensor, Tensor]) -> None:
        parts.update({f"router.{name}": t for name, t in zip(("logits", "weights", "picks"), y, strict=True)})

    def block(_: Any, y: Tensor) -> None:
        wires.update({here + name: t.view(*y.shape[:2], -1) for name, t in parts.items()})
        parts.clear()

    _after(handles, layer.mlp.gate, routed)
    _after(handles, layer.mlp.experts, lambda _, y: parts.update({"experts.out": y}))
    _after(handles, layer.mlp, block)


def _hook_compressor(compressor: Any, here: str, wires: dict[str, Tensor], handles: list[Any]) -> None:
    _after(handles, compressor.kv_norm, lambda x, _: wires.update({f"{here}compressor.pooled": x[0]}))
    indexer = getattr(compressor, "indexer", None)
    if indexer is None:
        return

    def scored(arguments: Any, y: Tensor) -> None:
        wires.update({f"{here}indexer.keys": arguments[1], f"{here}indexer.scores": y})

    def picked(arguments: Any, y: Tensor) -> None:
        finished = (arguments[2] + 1) // indexer.compress_rate
        raw = wires[f"{here}indexer.scores"]
        entry = torch.arange(raw.shape[-1], device=raw.device)
        wires[f"{here}indexer.scores"] = raw.masked_fill(entry >= finished.unsqueeze(-1), float("-inf"))
        wires[f"{here}indexer.picks"] = y

    _after(handles, indexer.scorer, scored)
    _after(handles, indexer, picked)
