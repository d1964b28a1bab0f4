"""Inverse rope frequencies in float64, from the definition rather than from transformers' float32 code.

Plain rope turns pair ``i`` of ``2n`` channels by ``base ** (-i/n)`` per position. YaRN keeps the fast pairs (more than
``beta_fast`` turns over the original context), divides the slow ones (fewer than ``beta_slow`` turns) by ``factor``,
and blends linearly between; the two ends of the blend are rounded outward to whole pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from reference.geometry import Geometry


def frequencies(geometry: Geometry) -> dict[str, Tensor]:
    """``main`` and ``compress`` inverse frequencies, float64 ``[qk_rope_head_dim / 2]``."""
    return {name: one(geometry.qk_rope_head_dim, rope) for name, rope in geometry.rope.items()}


def one(width: int, rope: Mapping[str, Any]) -> Tensor:
    """Frequencies ``[width / 2]`` of one rope from its parameters, under Hugging Face's names."""
    base = float(rope["rope_theta"])
    pairs = width // 2
    plain = [base ** (-i / pairs) for i in range(pairs)]
    if rope["rope_type"] == "default":
        return torch.tensor(plain, dtype=torch.float64)
    factor, context = float(rope["factor"]), float(rope["original_max_position_embeddings"])

    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes this many turns over the original context: base^(-i/n) c = 2 pi turns."""
        return pairs * math.log(context / (2 * math.pi * turns)) / math.log(base)

    low = max(math.floor(pair_with(float(rope.get("beta_fast") or 32))), 0)
    high: float = min(math.ceil(pair_with(float(rope.get("beta_slow") or 1))), width - 1)
    if high == low:
        high += 0.001  # a step instead of a ramp
    slow = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(pairs)]
    return torch.tensor([f * (1 - s) + f / factor * s for f, s in zip(plain, slow, strict=True)], dtype=torch.float64)
