"""Four-bit weights straight to bfloat16, bit for bit what decoding in float64 and rounding once gives.

A byte holds two codes and a block one scale code, so all that a matrix can contain is a table of 256 x 256 pairs. The
table is made by the exact decoder and rounded there; a matrix is one gather from it. For 256 experts of a layer that is
seconds instead of minutes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from reference import formats, nvfp4


def nvfp4_bfloat16(packed: Tensor, scale: Tensor, scale_2: Tensor, *, divide: bool = False) -> Tensor:
    """bfloat16 ``[N, K]``; arguments as ``nvfp4.decode`` or, with ``divide``, as ``formats.nvfp4_divided``."""
    byte = torch.arange(256, dtype=torch.uint8)
    codes = byte.unsqueeze(-1).expand(256, 512 // nvfp4.BLOCK).contiguous().view(torch.float8_e4m3fn)
    decode = formats.nvfp4_divided if divide else nvfp4.decode
    return _gather(_pairs(decode(byte.expand(256, 256), codes, scale_2.cpu())), packed, scale)


def mxfp4_bfloat16(packed: Tensor, scale: Tensor) -> Tensor:
    """bfloat16 ``[N, K]``; arguments as ``formats.mxfp4``."""
    return _gather(_mxfp4_table(), packed.view(torch.uint8), scale)


@lru_cache(maxsize=1)
def _mxfp4_table() -> Tensor:
    byte = torch.arange(256, dtype=torch.uint8)
    codes = byte.unsqueeze(-1).expand(256, 512 // formats.MX_BLOCK).contiguous().view(torch.float8_e8m0fnu)
    return _pairs(formats.mxfp4(byte.expand(256, 256), codes))


def _pairs(values: Tensor) -> Tensor:
    """float64 ``[256, 512]``, a row per scale code -> 65,536 int32 words, each the two bfloat16 of one byte."""
    return nvfp4.to_bfloat16(values).contiguous().view(torch.int32).flatten()


def _gather(table: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    rows, half = packed.shape
    row = scale.view(torch.uint8).to(torch.int32).unsqueeze(-1) << 8  # [N, blocks, 1]
    place = row + packed.view(rows, scale.shape[-1], -1)
    return table.to(packed.device).index_select(0, place.flatten()).view(torch.bfloat16).view(rows, 2 * half)
