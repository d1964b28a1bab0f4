"""NVFP4 as ModelOpt stores it, decoded exactly in float64.

A weight ``[N, K]`` is three tensors: nibbles ``[N, K/2]`` uint8 with the even column in the low half of a byte, one
E4M3 scale per 16 columns ``[N, K/16]``, and one float32 scale for the whole matrix. Element ``(n, k)`` is
``E2M1(nibble) * E4M3(scale[n, k // 16]) * scale_2``: 2 + 4 + 24 significant bits, so the product is exact in float64
(and neither in bfloat16 nor in float32).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: columns that share one E4M3 scale
BLOCK = 16

#: value of each 4-bit code: one sign bit, two exponent bits of bias 1, one mantissa bit
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decode(packed: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    """The exact weight as float64 ``[N, K]``.

    packed:  uint8 ``[N, K/2]``
    scale:   float8_e4m3fn ``[N, K/16]``, row-major, not swizzled; NaN codes decode to NaN
    scale_2: float32 ``[]``
    """
    rows, half = packed.shape
    if scale.shape != (rows, 2 * half // BLOCK) or 2 * half % BLOCK:
        raise ValueError(f"packed {tuple(packed.shape)} and scale {tuple(scale.shape)} do not describe one matrix")
    table = torch.tensor(E2M1, dtype=torch.float64, device=packed.device)
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1)  # [N, K/2, 2]: low half first
    values = table[codes.to(torch.int64)].view(rows, -1, BLOCK)  # [N, K/16, 16]
    blocks = scale.to(torch.float64) * scale_2.to(torch.float64)  # [N, K/16]; 4 + 24 bits, exact
    return (values * blocks.unsqueeze(-1)).view(rows, 2 * half)


def to_bfloat16(x: Tensor) -> Tensor:
    """Round float64 to bfloat16 once, to nearest, ties to even.

    torch converts by way of float32. A value just beside the middle of two bfloat16 neighbours can land on the middle
    in that first rounding and then go to the wrong one; it is moved back to its own side first.
    """
    single = x.to(torch.float32)
    left = x - single.to(torch.float64)  # what the first rounding lost, exact
    bits = single.view(torch.int32)
    middle = ((bits & 0xFFFF) == 0x8000) & (left != 0)
    away = torch.where((left > 0) == (single > 0), 1, -1).to(torch.int32)  # one ulp up or down in magnitude
    return torch.where(middle, bits + away, bits).view(torch.float32).to(torch.bfloat16)
