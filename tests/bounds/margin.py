"""The margin rule as the tests use it: error over bound, and who is caught."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LAMBDA = 5.0
DIGITS = {"bf16": 8, "fp32": 24}
TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32}


def half_ulp(y: Tensor, dtype: str) -> Tensor:
    """Half an ulp of `dtype` at |y|; half the smallest subnormal at zero."""
    exponent = (torch.frexp(y.abs())[1] - 1).clamp(min=-126)
    return torch.ldexp(torch.ones_like(y), exponent - DIGITS[dtype])


def bound(value: Tensor, rss: Tensor, total: Tensor, dtype: str) -> Tensor:
    """h(|y| + delta) + delta, delta = min(5 rss, total)."""
    delta = torch.minimum(LAMBDA * rss, total)
    return half_ulp(value.abs() + delta, dtype) + delta


@dataclass(frozen=True)
class Row:
    """One output: its clean ratio, and what the bound would catch."""

    ratio: float  # max |production - oracle| / bound
    caught: float  # share of elements of at least RMS size whose 2 % error exceeds the bound
    zero: bool  # would an all-zero output be caught?
    elements: int
    need: float  # the lambda that would have been enough: max (error - h) / rss


def row(value: Tensor, rss: Tensor, total: Tensor, dtype: str, got: Tensor) -> Row:
    """Compare a production output with an oracle value and its spread."""
    live = value.isfinite()
    y, g = value[live], got.double()[live]
    if not y.numel():
        return Row(0.0, 1.0, True, 0, 0.0)
    limit = bound(value, rss, total, dtype)[live]
    error = (g - y).abs()
    big = (y.abs() >= y.square().mean().sqrt()) & (y != 0)
    shifted = (g * 1.02).to(TORCH[dtype]).double()
    caught = ((shifted - y).abs() > limit)[big]
    share = float(caught.double().mean()) if caught.numel() else 1.0
    zero = bool((y.abs() > limit).any()) or not bool((y != 0).any())
    spread = rss[live]
    beyond = (error - half_ulp(y.abs() + torch.minimum(LAMBDA * spread, total[live]), dtype)).clamp(min=0.0)
    need = torch.where(spread > 0, beyond / spread.clamp(min=1e-300), torch.zeros_like(beyond))
    return Row(float((error / limit).max()), share, zero, y.numel(), float(need.max()))
