"""NVFP4 weights: two E2M1 values a byte, an E4M3 scale per 16 values along K, one fp32 scale per tensor.

Layout (ModelOpt): ``weight`` uint8 (N, K/2), the low nibble is the even k; ``weight_scale`` float8_e4m3fn (N, K/16),
row-major and not swizzled; ``weight_scale_2`` fp32, [] or one per expert. The weight is

    w[n, k] = e2m1(code[n, k]) * weight_scale[n, k // 16] * weight_scale_2

``fold`` computes the product of the first two factors. An E2M1 value has 2 significant bits and an E4M3 value 4, so
the product has at most 6 and lies within 2^-10 .. 6 * 448: exact in bf16 and in fp32. ``weight_scale_2`` belongs to
the fp32 accumulator (the GEMM's alpha), where one rounding pays for it. ``input_scale`` is for quantised activations
and no part of a W4A16 product.

Bytes stay uint8: torch offers no arithmetic on float4_e2m1fn_x2. ``as_fp4`` gives that view to a kernel that wants it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 16
#: What accompanies a packed ``weight``; all but the weight itself are folded into it by ``decode``.
COMPANIONS = ("weight_scale", "weight_scale_2", "input_scale")


def e2m1_values() -> list[float]:
    """The value of each of the 16 codes, from the format: sign, 2 exponent bits (bias 1), 1 mantissa bit."""
    values = []
    for code in range(16):
        sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
        magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
        values.append(-magnitude if sign else magnitude)
    return values


@lru_cache(maxsize=8)
def _pair_words(device: torch.device) -> Tensor:
    """256 words of 8 bytes, each the two fp32 values of one byte: a lookup gives two weights at once."""
    values = torch.tensor(e2m1_values(), dtype=torch.float32)
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
    return pairs.contiguous().view(torch.int64).flatten().to(device)


@lru_cache(maxsize=8)
def _scale_values(device: torch.device) -> Tensor:
    """The fp32 value of every E4M3 code (two of them NaN)."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


def unpack(weight: Tensor) -> Tensor:
    """uint8 (..., N, K/2) -> the E2M1 values, fp32 (..., N, K)."""
    words = _pair_words(weight.device).index_select(0, weight.reshape(-1).int())
    return words.view(torch.float32).view(*weight.shape[:-1], 2 * weight.shape[-1])


def fold(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """E2M1 * E4M3, fp32 (..., N, K); exact, and exact again when cast to bf16. Any leading (expert) dims.

    A weight that is no longer packed has been folded before (``production.weights.unpacked``) and comes back as it is.
    """
    if weight.dtype != torch.uint8:
        return weight
    scale = _scale_values(weight.device).index_select(0, weight_scale.view(torch.uint8).reshape(-1).int())
    blocks = unpack(weight).view(*weight_scale.shape, BLOCK)
    return blocks.mul_(scale.view(*weight_scale.shape, 1)).flatten(-2)


def decode(weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor) -> Tensor:
    """The weight in float64 (..., N, K), exact: 6 bits of ``fold`` times 24 of ``weight_scale_2``."""
    scale_2 = weight_scale_2.double()
    return fold(weight, weight_scale).double().mul_(scale_2.view(*scale_2.shape, 1, 1))


def decode_bf16(weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor) -> Tensor:
    """The weight of one matrix in bf16 (N, K), rounded once: for engines without an FP4 product.

    A byte and its block's scale code select one of 65,536 pairs of values, so a matrix is one lookup per byte.
    """
    values = torch.tensor(e2m1_values(), dtype=torch.float64)
    byte = torch.arange(256)
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    exact = scale[:, None] * values * weight_scale_2.double().cpu()  # [256 scale codes, 16 codes], 30 bits
    table = torch.stack((exact[:, byte & 15], exact[:, byte >> 4]), dim=-1)
    words = _round_bf16(table).view(torch.int32).flatten().to(weight.device)
    place = (weight_scale.view(torch.uint8).int() << 8).unsqueeze(-1) + weight.unflatten(-1, (-1, BLOCK // 2))
    return words.index_select(0, place.flatten()).view(torch.bfloat16).view(*weight.shape[:-1], 2 * weight.shape[-1])


def _round_bf16(x: Tensor) -> Tensor:
    """float64 to bf16, to nearest even, in one rounding: torch goes by way of fp32 and rounds twice."""
    mantissa, exponent = torch.frexp(x)
    # bf16 has 8 significant bits, fewer below its smallest normal 2^-126.
    bits = (exponent + 133).clamp(max=8)
    return torch.ldexp(torch.ldexp(mantissa, bits).round(), exponent - bits).bfloat16()


def as_fp4(weight: Tensor) -> Tensor:
    """The same bytes as torch.float4_e2m1fn_x2 (shape counts bytes), for kernels."""
    return weight.view(torch.float4_e2m1fn_x2)


def has_nan_scale(weight_scale: Tensor) -> bool:
    """Whether any block scale is one of E4M3's two NaN codes."""
    return weight_scale.numel() > 0 and int((weight_scale.view(torch.uint8) & 0x7F).max()) == 0x7F
