"""h(y): half an ulp of the output dtype at y, and what else depends on a dtype alone.

A float with p significant bits has spacing 2^(e - p + 1) in [2^e, 2^(e+1)), and the spacing of its smallest normal
binade below it. Round to nearest moves a value by at most half of that: h(y) = 2^(e - p), e = max(floor(log2 |y|),
e_min). h never falls as |y| grows, so h(|y| + d) bounds the rounding of any value within d of y.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: name -> torch dtype: the names that stages declare
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MANTISSA, BIAS = 52, 1023  # of float64
#: name -> (significant bits, smallest normal exponent)
FORMATS = {"bf16": (8, -126), "fp16": (11, -14), "fp32": (24, -126), "fp64": (53, -1022)}


def name_of(dtype: torch.dtype) -> str:
    """The declared name of a torch dtype."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def half_ulp(y: Tensor, dtype: str) -> Tensor:
    """Half an ulp of ``dtype`` at every |y|, as float64. Non-finite values give inf."""
    bits, lowest = FORMATS[dtype]
    # The exponent is read from the bits and the power of two is made of bits: frexp and ldexp are several times slower.
    biased = y.detach().double().abs().view(torch.int64) >> MANTISSA
    exponent = (biased - BIAS).clamp_min(lowest) - bits
    # Below 2^-1022 (half ulps of fp64 subnormals) the smallest normal number is a bound, too.
    h = ((exponent + BIAS).clamp_min(1) << MANTISSA).view(torch.float64)
    return h.masked_fill_(biased == 2 * BIAS + 1, math.inf)


def kappa(dtype: str) -> float:
    """Rule 4's factor on the output rounding: 1 where it dominates (16 bits), 4 for fp32 (summation order)."""
    return 1.0 if FORMATS[dtype][0] < 24 else 4.0


def rms(x: Tensor) -> float:
    """Root mean square; 0 for an empty tensor."""
    return math.sqrt(float(x.detach().double().square().mean())) if x.numel() else 0.0
