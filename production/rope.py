"""Rotary embeddings: the table, the rotation and its inverse.

Frequencies ``f_i = theta^(-2i/R)``, i < R/2. YaRN (compress table only) blends f_i with f_i / factor by a ramp over i
between the dims that turn beta_fast and beta_slow times within the original length, rounded outwards (paper of YaRN,
section 3.2; HF: ``_compute_yarn_parameters``). DeepSeek-V4 puts no amplitude on cos and sin.

Phases ``position * f_i``, and their cosine and sine, are taken in float64 and rounded once, to an fp32 table: at
position 1M an fp32 phase would be off by 1e-2.

The rotation is interleaved and touches the last R channels only: with a = x[2i], b = x[2i + 1] of that slice

    x[2i] = a cos_i - b sin_i,    x[2i + 1] = b cos_i + a sin_i

in fp32, rounded once; the other channels pass unchanged (HF: ``apply_rotary_pos_emb``). The inverse takes -sin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from production.component import Call, Component, Params, Port, naming, port, ports, rounding
from production.config import Rope
from production.errors import ProductionError


@lru_cache(maxsize=32)
def frequencies(rope: Rope, device: torch.device) -> Tensor:
    """float64 [R/2]."""
    exponent = torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim
    plain = torch.pow(torch.tensor(rope.theta, dtype=torch.float64), -exponent)
    if rope.yarn is None:
        return plain.to(device)
    yarn = rope.yarn

    def dim_that_turns(times: float) -> float:
        turns = math.log(yarn.original_max_position_embeddings / (times * 2 * math.pi))
        return rope.dim * turns / (2 * math.log(rope.theta))

    low = max(math.floor(dim_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(dim_that_turns(yarn.beta_slow)), rope.dim - 1)
    width = high - low if high != low else 0.001  # an empty range becomes a step
    stretched = ((torch.arange(rope.dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return (plain * (1 - stretched) + plain / yarn.factor * stretched).to(device)


def table(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin), fp32 [*positions.shape, R/2]."""
    phase = positions.unsqueeze(-1).double() * frequencies(rope, positions.device)
    return phase.cos().float(), phase.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Copy of x (..., D), in x's dtype, with its last R channels rotated; cos and sin broadcast against (..., R/2)."""
    y = x.clone(memory_format=torch.contiguous_format)
    cos, sin = cos.float(), sin.float()
    if inverse:
        sin = -sin
    tail = y[..., y.shape[-1] - 2 * cos.shape[-1] :]
    a, b = tail[..., 0::2].float(), tail[..., 1::2].float()
    tail[..., 0::2], tail[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    return y


@dataclass(frozen=True, kw_only=True)
class RopeCache(Component):
    """Both tables for the positions of a call. positions: int64, absolute, >= 0."""

    plan = rounding(out="fp32")  # no "angle": phases are float64
    takes = ports(positions=port("B S", "int64"))
    gives = ports(
        **{f"{name}_{part}": port("B S R2", "fp32") for name in ("main", "compress") for part in ("cos", "sin")}
    )

    main: Rope
    compress: Rope

    def compute(self, p: Params, call: Call, *, positions: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        if positions.numel() and (lowest := int(positions.min())) < 0:
            raise ProductionError("rope_cache: positions", expected="absolute positions >= 0", came=str(lowest))
        main_cos, main_sin = table(self.main, positions)
        compress_cos, compress_sin = table(self.compress, positions)
        return {
            "main_cos": main_cos,
            "main_sin": main_sin,
            "compress_cos": compress_cos,
            "compress_sin": compress_sin,
        }


@dataclass(frozen=True, kw_only=True)
class Rotation(Component):
    """Rotates queries, keys, or (``inverse``) attention outputs by the table that this layer uses.

    ``table``: "main" on sliding layers, "compress" on CSA and HCA layers. Tables may be fp32 or bf16; y is contiguous.
    """

    plan = rounding(out="bf16")

    table: str
    inverse: bool
    x_name: str = naming()
    dims: str = naming()

    @property
    def takes(self) -> Mapping[str, Port]:  # type: ignore[override]
        return {self.x_name: port(self.dims), **{name: port("B S R2", "bf16/fp32") for name in RopeCache.gives}}

    @property
    def gives(self) -> Mapping[str, Port]:  # type: ignore[override]
        return {self.x_name: port(self.dims)}

    def compute(self, p: Params, call: Call, **inputs: Tensor) -> dict[str, Tensor]:
        x, cos, sin = inputs[self.x_name], inputs[f"{self.table}_cos"], inputs[f"{self.table}_sin"]
        if x.dim() == 4:  # one angle for all heads
            cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        return {self.x_name: rotate(x, cos, sin, inverse=self.inverse)}
