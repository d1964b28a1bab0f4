"""Block-scaled formats beside NVFP4, decoded exactly (or rounded once, at 53 bits) in float64.

fp8     E4M3 codes [N, K]; one scale for each 128 x 128 block, as E8M0, BF16 or F32: 4 + 24 significant bits at most.
mxfp4   E2M1 nibbles, even column low, in bytes of any sign [N, K/2]; one E8M0 scale for 32 columns.
nvfp4   under compressed-tensors the global scale is a divisor: a quotient of float64, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference import nvfp4

#: rows and columns that share an FP8 scale
TILE = 128
#: columns that share an MXFP4 scale
MX_BLOCK = 32


def e8m0(scale: Tensor) -> Tensor:
    """float64 values of E8M0 bytes: 2^(byte - 127), and NaN for 255."""
    byte = scale.view(torch.uint8).to(torch.int64)
    power = ((byte - 127 + 1023) << 52).view(torch.float64)  # the bits of a power of two: no exp2 that may round
    return torch.where(byte == 255, torch.nan, power)


def scales(scale: Tensor) -> Tensor:
    """float64 values of a scale tensor of any dtype."""
    return e8m0(scale) if scale.dtype is torch.float8_e8m0fnu else scale.to(torch.float64)


def fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """The exact weight, float64 ``[N, K]``; the blocks at the lower and right edge may be smaller than TILE.

    weight: float8_e4m3fn ``[N, K]``
    scale:  E8M0, BF16 or F32 ``[ceil(N / 128), ceil(K / 128)]``
    """
    value = weight.to(torch.float64)
    for r, row in enumerate(scales(scale)):
        for c, step in enumerate(row):
            value[r * TILE : (r + 1) * TILE, c * TILE : (c + 1) * TILE] *= step
    return value


def mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """The exact weight, float64 ``[N, K]``.

    packed: int8 or uint8 ``[N, K/2]``
    scale:  E8M0 ``[N, K/32]``
    """
    # NVFP4's decoder with its blocks of 16: each MX scale serves two. 2^-127..2^127 does not fit E4M3, so the steps are
    # applied here and the nibbles come with unit scales.
    rows, half = packed.shape
    unit = torch.ones(rows, 2 * half // nvfp4.BLOCK, dtype=torch.float8_e4m3fn)
    values = nvfp4.decode(packed.view(torch.uint8), unit, torch.ones(()))
    return (values.view(rows, -1, MX_BLOCK) * e8m0(scale).unsqueeze(-1)).view(rows, 2 * half)


def nvfp4_divided(packed: Tensor, scale: Tensor, divisor: Tensor) -> Tensor:
    """NVFP4 with a reciprocal global scale, float64 ``[N, K]``.

    E2M1 x E4M3 is exact and the quotient is rounded once: the value that float64 holds closest to the exact one.

    packed:  uint8 ``[N, K/2]``
    scale:   float8_e4m3fn ``[N, K/16]``
    divisor: float32 ``[1]``, 448 * 6 / amax
    """
    return nvfp4.decode(packed, scale, torch.ones(())) / divisor.to(torch.float64).reshape(())
