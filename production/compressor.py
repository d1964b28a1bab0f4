"""Compressed key/value entries: CSA (overlapping windows) and HCA (disjoint windows).

Every m tokens close a window and emit one entry. With C = W_kv x and Z = W_gate x + bias[position in the window], an
entry is a softmax-gated mean per channel, normed, and rotated at the absolute position of its window's first token
(paper sections 2.3.1 and 2.3.2; HF: DeepseekV4CSACompressor, DeepseekV4HCACompressor):

    pooled_e = sum_j softmax_j(Z)_j * C_j,      key_e = rope(RMSNorm(pooled_e), position e * m)

HCA: j runs over the m tokens of window e. CSA: the projections give two series, Ca in the first half of the channels
and Cb in the second; j runs over the Ca of window e - 1 and the Cb of window e (2m slots). The first window has no
Ca: its slots get no weight. Tokens after the last full window emit nothing; fewer than m tokens give T = 0.

fp32 throughout (products, softmax, pooling, norm, rotation); ``pooled`` leaves in fp32 and ``keys`` are rounded once.

``pool_*`` and ``finish`` are pure functions of window tensors and of the index of the first window, so that a cache
can call them on what it has buffered. The stage itself has no such state: its windows count from position 0, so each
row's positions must start there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from production.component import Call, Component, Params, port, ports, rounding
from production.config import Rope
from production.errors import ProductionError
from production.linear import product
from production.norms import rms_norm
from production.rope import rotate, table


def windows(x: Tensor, bias: Tensor, p: Params) -> tuple[Tensor, Tensor]:
    """fp32 (C, Z), each [B, T, m, channels], of the full windows of x [B, S, d]."""
    m = bias.shape[0]
    count = x.shape[1] // m
    x = x[:, : count * m]
    kv = product(x, p, "kv_proj.").unflatten(1, (count, m))
    gate = product(x, p, "gate_proj.").unflatten(1, (count, m))
    return kv, gate + bias.float()


def gated_mean(kv: Tensor, gate: Tensor) -> Tensor:
    """[B, T, slots, channels] -> [B, T, channels], softmax over the slots."""
    return (torch.softmax(gate, dim=2) * kv).sum(2)


def pool_disjoint(kv: Tensor, gate: Tensor) -> Tensor:
    """HCA: each window by itself."""
    return gated_mean(kv, gate)


def pool_overlapping(kv: Tensor, gate: Tensor, prior: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """CSA: Ca of the window before, Cb of this one. ``prior``: (C, Z) of the Ca before the first window, [B, m, D]."""
    half = kv.shape[-1] // 2
    if prior is None:
        first_kv, first_gate = torch.zeros_like(kv[:, :1, :, :half]), torch.full_like(gate[:, :1, :, :half], -torch.inf)
    else:
        first_kv, first_gate = prior[0].unsqueeze(1), prior[1].unsqueeze(1)
    before_kv = torch.cat((first_kv, kv[:, :-1, :, :half]), dim=1)
    before_gate = torch.cat((first_gate, gate[:, :-1, :, :half]), dim=1)
    return gated_mean(torch.cat((before_kv, kv[..., half:]), dim=2), torch.cat((before_gate, gate[..., half:]), dim=2))


def finish(pooled: Tensor, weight: Tensor, eps: float, rope: Rope, rate: int, first: int = 0) -> Tensor:
    """fp32 keys: the norm, then the rotation at (first + e) * rate."""
    entries = torch.arange(first, first + pooled.shape[1], device=pooled.device)
    cos, sin = table(rope, entries * rate)
    return rotate(rms_norm(pooled, weight, eps), cos, sin)


def require_start(positions: Tensor, what: str) -> None:
    """Without a compressor state, windows count from position 0."""
    if positions.shape[1] and bool((positions[:, 0] != 0).any()):
        raise ProductionError(
            f"{what}: positions",
            expected="every row to start at 0",
            came=f"starts {positions[:, 0].tolist()}",
            fix="a later start needs the windows before it, and this call carries none",
        )


@dataclass(frozen=True, kw_only=True)
class _Compressor(Component):
    plan = rounding(proj="fp32", probs="fp32", pooled="fp32", norm="fp32", table="fp32", out="bf16")
    takes = ports(x=port("B S d"), positions=port("B S", "int64"))
    gives = ports(pooled=port("B T D", "fp32"), keys=port("B T D"))

    compress_rate: int
    rms_norm_eps: float
    rope: Rope

    def pool(self, kv: Tensor, gate: Tensor) -> Tensor:
        raise NotImplementedError

    def compute(self, p: Params, call: Call, *, x: Tensor, positions: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        require_start(positions, "compressor")
        pooled = self.pool(*windows(x, p["position_bias"], p))
        keys = finish(pooled, p["kv_norm.weight"], self.rms_norm_eps, self.rope, self.compress_rate)
        return {"pooled": pooled, "keys": keys.to(self.act)}


@dataclass(frozen=True, kw_only=True)
class CsaCompressor(_Compressor):
    """Params: kv_proj.weight and gate_proj.weight bf16 (2D, d), position_bias fp32 (m, 2D), kv_norm.weight bf16 (D)."""

    def pool(self, kv: Tensor, gate: Tensor) -> Tensor:
        return pool_overlapping(kv, gate)


@dataclass(frozen=True, kw_only=True)
class HcaCompressor(_Compressor):
    """Params: kv_proj.weight and gate_proj.weight bf16 (D, d), position_bias fp32 (m, D), kv_norm.weight bf16 (D)."""

    def pool(self, kv: Tensor, gate: Tensor) -> Tensor:
        return pool_disjoint(kv, gate)
