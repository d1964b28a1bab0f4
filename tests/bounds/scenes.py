"""Inputs for every stage kind: ordinary, trained-like and extreme."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

B, H, D, R2, N, HID, QL, F, E, K = 2, 4, 128, 16, 4, 128, 64, 96, 8, 3
RATE = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}

#: ordinary; activations of 1e-4 and 1e3; channels of very different size; one token again and again; halves that
#: cancel; logits in the tens; coefficients in the tails
SCENES = ("normal", "small", "large", "outliers", "repeated", "cancel", "sharp", "tails")
LENGTHS = (1, 3, 4, 9, 33, 130)


@dataclass(frozen=True)
class Scene:
    """A stage as `spread` reads it, and one set of inputs. All float64; inputs are bf16 or fp32 numbers."""

    name: str
    kind: str
    config: Mapping[str, Any]
    params: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]


class Draw:
    """Random tensors of one scene."""

    def __init__(self, scene: str, length: int, seed: int, dtype: str) -> None:
        self.scene, self.length, self.dtype = scene, length, dtype
        self.g = torch.Generator().manual_seed(hash((SCENES.index(scene), length, seed)) % 2**31)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g, dtype=torch.float64)

    def stored(self, x: Tensor) -> Tensor:
        """As production would get it: bf16, or fp32 in an fp32 run."""
        return x.to(torch.bfloat16 if self.dtype == "bf16" else torch.float32).double()

    def act(self, *shape: int) -> Tensor:
        """Activations [B, S, ..., K]."""
        x = self.normal(*shape)
        if self.scene == "small":
            x = x * 1e-4
        if self.scene == "large":
            x = x * 1e3
        if self.scene == "outliers":
            x = x * torch.exp(1.5 * self.normal(shape[-1]))
        if self.scene == "repeated":
            x = x[:, :2].repeat(1, -(-shape[1] // 2), *(1,) * (len(shape) - 2))[:, : shape[1]]
        if self.scene == "cancel":
            half = shape[-1] // 2
            x[..., half : 2 * half] = -x[..., :half] * (1 + 1e-3 * self.normal(*shape[:-1], half))
        return self.stored(x)

    def nvfp4(self, *shape: int) -> Tensor:
        """Decoded NVFP4: E2M1 codes, E4M3 block scales, one fp32 scale that is no bf16 number."""
        codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        code = codes[torch.randint(0, 8, shape, generator=self.g)] * self.normal(*shape).sign()
        block = (1 + self.normal(*shape[:-1], shape[-1] // 16).abs()).mul(40).to(torch.float8_e4m3fn).double()
        scale_2 = torch.tensor(math.pi / 3 / 40 / 3.5 / shape[-1] ** 0.5, dtype=torch.float32).double()
        w = code * block.repeat_interleave(16, -1) * scale_2
        if self.scene == "cancel":
            half = shape[-1] // 2
            w[..., half:] = w[..., :half]
        return w

    def bf16(self, *shape: int) -> Tensor:
        w = self.normal(*shape) * shape[-1] ** -0.5
        if self.scene == "cancel":
            half = shape[-1] // 2
            w[..., half:] = w[..., :half]
        return w.to(torch.bfloat16).double()

    def fp32(self, *shape: int) -> Tensor:
        return self.normal(*shape).float().double()


def frequencies() -> tuple[Tensor, Tensor]:
    i = torch.arange(R2, dtype=torch.float64)
    return 10000.0 ** (-i / R2), 160000.0 ** (-i / R2) / torch.where(i > R2 / 2, 16.0, 1.0)


def _config(layer_type: str = "compressed_sparse_attention") -> dict[str, Any]:
    main, compress = frequencies()
    return {
        "rms_norm_eps": 1e-6, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "hc_mult": N, "o_groups": 2,
        "scaling": D**-0.5, "layer_type": layer_type, "compress_rate": RATE.get(layer_type, 0),
        "rope_layer_type": "compress", "inv_freq_main": main, "inv_freq_compress": compress,
        "index_n_heads": 8, "swiglu_limit": 10.0, "routed_scaling_factor": 1.5, "num_experts_per_tok": K,
    }  # fmt: skip


def _norm(d: Draw) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    return _config(), {"weight": torch.exp(0.3 * d.normal(HID)).float().double()}, {"x": d.act(B, d.length, HID)}


def _head_norm(d: Draw) -> Any:
    return _config(), {}, {"x": d.act(B, d.length, H, D)}


def _linear(d: Draw) -> Any:
    return _config(), {"weight": d.nvfp4(F, HID)}, {"x": d.act(B, d.length, HID)}


def _o_a(d: Draw) -> Any:
    return _config(), {"weight": d.nvfp4(2 * 48, H * D // 2)}, {"out": d.act(B, d.length, H, D)}


def _positions(d: Draw) -> Tensor:
    start = 1_000_000 if d.scene in ("large", "tails") else 0
    return start + torch.arange(d.length).expand(B, -1)


def _rope_cache(d: Draw) -> Any:
    return _config(), {}, {"positions": _positions(d)}


def _rope(name: str) -> Callable[[Draw], Any]:
    def make(d: Draw) -> Any:
        phase = _positions(d).unsqueeze(-1) * frequencies()[1]
        tables = {f"{w}_{t}": d.stored(getattr(phase, t)()) for w in ("main", "compress") for t in ("cos", "sin")}
        return _config(), {}, {name: d.act(B, d.length, H, D), **tables}

    return make


def _hc(rows: int) -> Callable[[Draw], Any]:
    def make(d: Draw) -> Any:
        x = d.act(B, d.length, N, HID)
        if d.scene == "repeated":
            x = x[:, :, :1].expand_as(x).clone()  # the streams of the first layer
        base = d.normal(rows)
        if d.scene == "tails":
            base[:N] = torch.tensor([-12.0, -30.0, 30.0, -100.0])
        if d.scene in ("tails", "sharp"):
            base[2 * N :] *= 10
        if rows == N:
            scale = torch.tensor([1.1], dtype=torch.float64)
        else:
            scale = torch.tensor([0.9, 1.1, 3.0 if d.scene == "sharp" else 1.3], dtype=torch.float64)
        params = {"fn": d.fp32(rows, N * HID) * 0.05, "base": base, "scale": scale}
        return _config(), {k: t.float().double() for k, t in params.items()}, {"streams": x}

    return make


def _mix(d: Draw) -> Any:
    x = d.act(B, d.length, N, HID)
    comb = torch.softmax(2 * d.normal(B, d.length, N, N), -1) + 1e-6
    for axis in [-2] + [-1, -2] * 19:
        comb = comb / comb.sum(axis, keepdim=True)
    post = 2 * torch.sigmoid(3 * d.normal(B, d.length, N))
    out = d.act(B, d.length, HID)
    if d.scene == "cancel":
        out = d.stored(-(comb.unsqueeze(-1) * x.unsqueeze(3)).sum(2)[:, :, 0] / post[:, :, :1])
    inputs = {"streams": x, "post": post.float().double(), "comb": comb.float().double(), "out": out}
    return _config(), {}, inputs


def _pool_params(d: Draw, width: int, rate: int, overlap: bool) -> dict[str, Tensor]:
    wide = width * (2 if overlap else 1)
    gate = d.bf16(wide, HID) * (32.0 if d.scene == "sharp" else 1.0)
    bias = d.fp32(rate, wide) * (1e-3 if d.scene == "repeated" else 1.0)
    weight = torch.exp(0.3 * d.normal(width)).float().double()
    return {
        "kv_proj.weight": d.bf16(wide, HID),
        "gate_proj.weight": gate,
        "position_bias": bias,
        "kv_norm.weight": weight,
    }


def _compressor(layer_type: str) -> Callable[[Draw], Any]:
    def make(d: Draw) -> Any:
        overlap, rate = layer_type.startswith("compressed"), RATE[layer_type]
        x = d.act(B, d.length, HID)
        if d.scene == "cancel":  # two tokens in turn, opposite: pooled keys are almost nothing
            x = d.stored(x[:, :1] * torch.where(torch.arange(d.length) % 2 == 0, 1.0, -1.0)[:, None])
        inputs = {"x": x, "positions": torch.arange(d.length).expand(B, -1)}
        return _config(layer_type), _pool_params(d, D, rate, overlap), inputs

    return make


def _indexer(d: Draw) -> Any:
    config, params, inputs = _compressor("compressed_sparse_attention")(d)
    heads = config["index_n_heads"]
    params = _pool_params(d, D, 4, True)
    params |= {"q_b_proj.weight": d.nvfp4(heads * D, QL), "weights_proj.weight": d.bf16(heads, HID)}
    return config, params, {**inputs, "q_residual": d.act(B, d.length, QL)}


def _attention(d: Draw) -> Any:
    s, t = d.length, d.length // 4
    size = {"sharp": 6.0, "tails": 3.0}.get(d.scene, 1.0) if d.scene not in ("small", "large") else 1.0
    q, kv = d.stored(size * d.normal(B, s, H, D)), d.act(B, s, D)
    compressed = d.act(B, t, D)
    if d.scene == "large":
        q = d.stored(q * 1e-3)
    if d.scene == "repeated":
        kv = kv[:, :1].expand_as(kv).clone()
        compressed = kv[:, :1].expand(B, t, D).clone()
    sinks = d.normal(H)
    if d.scene in ("tails", "sharp"):
        sinks = torch.tensor([30.0, -30.0, 100.0, 0.1], dtype=torch.float64)
    age = torch.arange(s)[:, None] - torch.arange(s)[None]
    ready = torch.arange(t)[None] < ((torch.arange(s) + 1) // 4)[:, None]
    visible = torch.cat(((age >= 0) & (age < 64), ready & (torch.rand(s, t, generator=d.g) < 0.6)), 1).expand(B, -1, -1)
    config = {**_config(), "visible": visible}
    inputs = {"q": q, "kv": kv, "positions": torch.arange(s).expand(B, -1), "lengths": torch.full((B,), s)}
    if t:
        inputs["compressed"] = compressed
    return config, {"sinks": sinks.float().double()}, inputs


def _router(d: Draw) -> Any:
    weight = d.bf16(E, HID)
    x = d.act(B, d.length, HID)
    if d.scene == "tails":  # every logit far below zero, the softplus near underflow
        weight, x = weight.abs() * 60, d.stored(-x.abs() * (1 + 3 * d.normal(B, d.length, 1).abs()))
    picks = torch.rand(B, d.length, E, generator=d.g).argsort(-1)[..., :K].contiguous()
    params = {"weight": weight, "e_score_correction_bias": 0.2 * d.fp32(E)}
    return {**_config(), "picks": picks}, params, {"x": x, "input_ids": torch.zeros(B, d.length, dtype=torch.long)}


def _mlp(d: Draw, stack: tuple[int, ...]) -> dict[str, Tensor]:
    wide = 8.0 if d.scene in ("sharp", "tails") else 1.0
    return {
        "gate_proj.weight": d.nvfp4(*stack, F, HID) * wide,
        "up_proj.weight": d.nvfp4(*stack, F, HID) * wide,
        "down_proj.weight": d.nvfp4(*stack, HID, F),
    }


def _shared(d: Draw) -> Any:
    return _config(), _mlp(d, ()), {"x": d.act(B, d.length, HID)}


def _experts(d: Draw) -> Any:
    picks = torch.rand(B, d.length, E, generator=d.g).argsort(-1)[..., :K].contiguous()
    weights = d.stored(1.5 * torch.softmax(d.normal(B, d.length, K), -1))
    return _config(), _mlp(d, (E,)), {"x": d.act(B, d.length, HID), "weights": weights, "picks": picks}


def _moe_sum(d: Draw) -> Any:
    return _config(), {}, {"routed": d.act(B, d.length, HID), "shared": d.act(B, d.length, HID)}


MAKE: dict[str, tuple[str, Callable[[Draw], Any]]] = {
    "norm": ("attn_norm", _norm),
    "head_norm": ("q_b_norm", _head_norm),
    "linear": ("q_a", _linear),
    "o_a": ("o_a", _o_a),
    "rope_cache": ("rope_cache", _rope_cache),
    "rope": ("q_rope", _rope("q")),
    "unrope": ("attn_unrope", _rope("out")),
    "hyper": ("attn_hc", _hc(2 * N + N * N)),
    "hc_head": ("hc_head", _hc(N)),
    "mix": ("attn_mix", _mix),
    "csa": ("compressor", _compressor("compressed_sparse_attention")),
    "hca": ("compressor", _compressor("heavily_compressed_attention")),
    "indexer": ("indexer", _indexer),
    "attention": ("attn_core", _attention),
    "router": ("router", _router),
    "experts": ("experts", _experts),
    "shared": ("shared_expert", _shared),
    "moe_sum": ("moe_sum", _moe_sum),
}


def scene(stage: str, name: str, length: int, seed: int, dtype: str) -> Scene:
    """One question of `stage` (a key of MAKE)."""
    kind, make = MAKE[stage]
    config, params, inputs = make(Draw(name, length, seed, dtype))
    return Scene(f"layers.0.{kind}", kind, config, params, inputs)
