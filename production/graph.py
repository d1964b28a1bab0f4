"""The stage graph of docs/stages.md: which component stands in each stage, and which wires it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from production import registry
from production.config import ModelConfig
from production.rope import RopeCache
from production.stage import DirectStage, Stage

TABLES = {name: f"rope_cache.{name}" for name in RopeCache.gives}
#: (parameters, format of the projections or None) of a stage, by its full name
Source = Callable[[str], tuple[Mapping[str, Tensor], str | None]]


class Graph:
    """Stages in execution order, added one by one. ``source`` loads a stage's parameters when it is added."""

    def __init__(self, config: ModelConfig, source: Source, *, dtype: str, device: torch.device) -> None:
        self.config, self.source, self.dtype, self.device = config, source, dtype, device
        self.stages: list[Stage] = []

    def add(
        self,
        name: str,
        kind: str,
        variant: str | None,
        wires: Mapping[str, str],
        *,
        layer: int | None = None,
        direct_with: str | None = None,
        **settings: Any,
    ) -> str:
        """Add a stage and return its full name. ``variant`` None: the format of its projections."""
        at = "" if layer is None else f"layers.{layer}."
        full = at + name
        params, form = self.source(full)
        op = registry.create(full, kind, variant or form or "none", dtype=self.dtype, **settings)
        shape: dict[str, Any] = {
            "name": full,
            "layer": layer,
            "inputs": dict(wires),
            "params": params,
            "op": op,
            "sizes": self.config.sizes,
            "device": self.device,
        }
        self.stages.append(
            Stage(**shape) if direct_with is None else DirectStage(**shape, direct_with=at + direct_with)
        )
        return full


def assemble(config: ModelConfig, source: Source, layers: Iterable[int], *, dtype: str, device: torch.device) -> Graph:
    """The stages of the model scope and of the given layers. Wires are those of the whole model."""
    graph = Graph(config, source, dtype=dtype, device=device)
    graph.add("embed", "embed", "bf16", {"input_ids": "case.input_ids"}, hc_mult=config.hc_mult)
    graph.add(
        "rope_cache",
        "rope_cache",
        "interleaved",
        {"positions": "case.positions"},
        main=config.main_rope,
        compress=config.compress_rope,
    )
    for layer in layers:
        before = f"layers.{layer - 1}.ffn_mix.streams" if layer else "embed.streams"
        x, streams = _open(graph, layer, "attn", before)
        _close(graph, layer, "attn", before, _attention(graph, layer, x))
        x, streams = _open(graph, layer, "ffn", f"layers.{layer}.attn_mix.streams")
        _close(graph, layer, "ffn", streams, _ffn(graph, layer, x))
    eps = config.rms_norm_eps
    last = f"layers.{config.num_hidden_layers - 1}.ffn_mix.streams"
    graph.add("hc_head", "hyper_head", "sigmoid", {"streams": last}, hc_eps=config.hc_eps, rms_norm_eps=eps)
    _norm(graph, "final_norm", "hc_head.collapsed", "B S d")
    graph.add("lm_head", "lm_head", "bf16", {"x": "final_norm.x"})
    return graph


def _open(graph: Graph, layer: int, half: str, streams: str) -> tuple[str, str]:
    """Hyper-connection and norm in front of a half; returns the wires (normed input, streams)."""
    config = graph.config
    hc = graph.add(
        f"{half}_hc",
        "hyper_connection",
        "sinkhorn",
        {"streams": streams},
        layer=layer,
        direct_with=f"{half}_mix",
        hc_mult=config.hc_mult,
        hc_sinkhorn_iters=config.hc_sinkhorn_iters,
        hc_eps=config.hc_eps,
        rms_norm_eps=config.rms_norm_eps,
    )
    return f"{_norm(graph, f'{half}_norm', f'{hc}.collapsed', 'B S d', layer=layer)}.x", streams


def _close(graph: Graph, layer: int, half: str, streams: str, out: str) -> None:
    hc = f"layers.{layer}.{half}_hc"
    wires = {"streams": streams, "post": f"{hc}.post", "comb": f"{hc}.comb", "out": out}
    graph.add(f"{half}_mix", "residual_mix", "sinkhorn", wires, layer=layer, direct_with=f"{half}_hc")


def _attention(graph: Graph, layer: int, x: str) -> str:
    """From the normed input to the wire of the half's output."""
    c, kind = graph.config, graph.config.layer_kinds[layer]
    eps, rate = c.rms_norm_eps, c.compress_rate(layer)
    tables = "main" if kind == "sliding" else "compress"

    def linear(name: str, source: str, x_dims: str, y: str, y_dims: str, *tail: int) -> str:
        settings: dict[str, Any] = {"x_dims": x_dims, "y_name": y, "y_dims": y_dims, "tail": tail}
        return f"{graph.add(name, 'linear', None, {'x': source}, layer=layer, **settings)}.{y}"

    def rotation(name: str, port: str, source: str, dims: str, *, inverse: bool = False) -> str:
        settings: dict[str, Any] = {"table": tables, "inverse": inverse, "x_name": port, "dims": dims}
        return f"{graph.add(name, 'rotation', 'interleaved', {port: source, **TABLES}, layer=layer, **settings)}.{port}"

    q_a = linear("q_a", x, "B S d", "q_a", "B S QL", c.q_lora_rank)
    residual = f"{_norm(graph, 'q_a_norm', q_a, 'B S QL', layer=layer, y='q_residual')}.q_residual"
    q = linear("q_b", residual, "B S QL", "q", "B S H D", c.num_attention_heads, c.head_dim)
    q = f"{graph.add('q_b_norm', 'head_norm', 'rms', {'q': q}, layer=layer, rms_norm_eps=eps)}.q"
    wires = {"q": rotation("q_rope", "q", q, "B S H D")}

    kv = linear("kv", x, "B S d", "kv", "B S D", c.head_dim)
    kv = f"{_norm(graph, 'kv_norm', kv, 'B S D', layer=layer, x='kv', y='kv')}.kv"
    wires["kv"] = rotation("kv_rope", "kv", kv, "B S D")

    position = {"positions": "case.positions"}
    pooling: dict[str, Any] = {"compress_rate": rate, "rms_norm_eps": eps, "rope": c.compress_rope}
    if kind != "sliding":
        name = graph.add("compressor", "compressor", kind, {"x": x, **position}, layer=layer, **pooling)
        wires["compressed"] = f"{name}.keys"
    if kind == "csa":
        name = graph.add(
            "indexer",
            "indexer",
            None,
            {"x": x, "q_residual": residual, **position},
            layer=layer,
            index_n_heads=c.index_n_heads,
            index_head_dim=c.index_head_dim,
            index_topk=c.index_topk,
            **pooling,
        )
        wires["picks"] = f"{name}.picks"
    wires |= {**position, "lengths": "case.lengths"}
    core: dict[str, Any] = {"layer_kind": kind, "sliding_window": c.sliding_window, "compress_rate": rate}
    out = f"{graph.add('attn_core', 'attention', 'sink', wires, layer=layer, **core)}.out"
    out = rotation("attn_unrope", "out", out, "B S H D", inverse=True)
    o_a = f"{graph.add('o_a', 'grouped_linear', None, {'out': out}, layer=layer, o_groups=c.o_groups)}.o_a"
    return linear("o_b", o_a, "B S G OL", "out", "B S d", c.hidden_size)


def _ffn(graph: Graph, layer: int, x: str) -> str:
    c = graph.config
    router = graph.add(
        "router",
        "router",
        f"{c.router_kinds[layer]} {c.scoring_func}",
        {"x": x, "input_ids": "case.input_ids"},
        layer=layer,
        num_experts_per_tok=c.num_experts_per_tok,
        routed_scaling_factor=c.routed_scaling_factor,
    )
    limit: dict[str, Any] = {"layer": layer, "swiglu_limit": c.swiglu_limit}
    wires = {"x": x, "weights": f"{router}.weights", "picks": f"{router}.picks"}
    routed = graph.add("experts", "experts", None, wires, **limit)
    shared = graph.add("shared_expert", "shared_expert", None, {"x": x}, **limit)
    wires = {"routed": f"{routed}.out", "shared": f"{shared}.out"}
    return f"{graph.add('moe_sum', 'moe_sum', 'plain', wires, layer=layer)}.out"


def _norm(
    graph: Graph, name: str, source: str, dims: str, *, layer: int | None = None, x: str = "x", y: str = "x"
) -> str:
    settings: dict[str, Any] = {"rms_norm_eps": graph.config.rms_norm_eps, "x_name": x, "y_name": y, "dims": dims}
    return graph.add(name, "norm", "rms", {x: source}, layer=layer, **settings)
