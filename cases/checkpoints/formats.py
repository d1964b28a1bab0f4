"""The number formats of the layouts, encoded and decoded in torch.

Every decoder returns float64: E2M1 x E4M3 x float32 and E4M3 x float32 are exact there (30 and 28 significant bits),
and a division by a reciprocal global scale is rounded once, at 53 bits. The recipes of the encoders are those of the
programs that write the layouts (ModelOpt's nvfp4_tensor, compressed-tensors' nvfp4, DeepSeek's FP8 and MXFP4 with
power-of-two scales); where a recipe leaves a choice, the comment says which is taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E2M1_MAX, E4M3_MAX, E4M3_MIN = 6.0, 448.0, 2.0**-9
#: what maps the largest weight to the largest code times the largest block scale
GLOBAL = E2M1_MAX * E4M3_MAX
BIAS = 127  # of E8M0: byte b stands for 2^(b - 127); byte 255 is NaN

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: 2^e as float64 for e in -300..300: torch's ldexp and exp2 go through pow, which need not be exact
_POWERS = torch.tensor([2.0**e for e in range(-300, 301)], dtype=torch.float64)
#: midpoints between neighbouring codes go to the even mantissa: up at the first, down at the second
_UP, _DOWN = (0.75, 1.75, 3.5), (0.25, 1.25, 2.5, 5.0)


class Nvfp4(NamedTuple):
    """weight uint8 [N, K/2], scale float8_e4m3fn [N, K/16], scale_2 float32 [] (ModelOpt) or [1] (reciprocal)."""

    weight: Tensor
    scale: Tensor
    scale_2: Tensor


def e2m1_codes(x: Tensor) -> Tensor:
    """uint8 codes 0..15: nearest, ties to even, saturating at 6; a negative that rounds to zero keeps its sign."""
    size = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8)
    for bound in _UP:
        code += size >= bound
    for bound in _DOWN:
        code += size > bound
    return code | ((x < 0).to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """uint8 [..., K] -> [..., K/2], the even element in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Packed E2M1 (uint8 or int8) [..., K/2] -> float64 values [..., K]."""
    byte = packed.view(torch.uint8).to(torch.int64)
    pairs = torch.tensor(_VALUES + tuple(-v for v in _VALUES), dtype=torch.float64)
    table = torch.stack((pairs.repeat(16), pairs.repeat_interleave(16)), -1)  # [256, 2]: low half varies fastest
    return table[byte].flatten(-2)


def power(exponent: Tensor) -> Tensor:
    """2^exponent in float64, exactly."""
    return _POWERS[exponent.to(torch.int64) + 300]


def e8m0(exponent: Tensor) -> Tensor:
    """2^exponent as float8_e8m0fnu, built from the integer (a cast would round, and turn 0 into 2^-127)."""
    return (exponent + BIAS).clamp(0, 254).to(torch.uint8).view(torch.float8_e8m0fnu)


def scale_values(scale: Tensor) -> Tensor:
    """float64 values of any scale tensor; E8M0's NaN byte comes as NaN."""
    if scale.dtype != torch.float8_e8m0fnu:
        return scale.to(torch.float64)
    byte = scale.view(torch.uint8).to(torch.int32)
    return torch.where(byte == 255, torch.nan, power(byte - BIAS))


def encode_nvfp4(w: Tensor, amax: Tensor) -> Nvfp4:
    """ModelOpt's recipe for float32 w [N, K] and the amax of whatever shares its global scale."""
    scale_2 = (amax.float() / GLOBAL).reshape(())
    blocks = w.unflatten(-1, (-1, 16))
    scale = blocks.abs().amax(-1) / (E2M1_MAX * scale_2)
    scale = torch.where(scale == 0, 1.0, scale).clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
    step = (scale.float() * scale_2).unsqueeze(-1)
    return Nvfp4(pack(e2m1_codes(blocks / step).flatten(-2)), scale, scale_2)


def encode_nvfp4_ct(w: Tensor, amax: Tensor) -> Nvfp4:
    """compressed-tensors' recipe: the reciprocal global scale, shape [1]; a zero block scale becomes 0.125."""
    scale_2 = (GLOBAL / amax.float()).reshape(1)
    blocks = w.unflatten(-1, (-1, 16))
    scale = (scale_2 * (blocks.abs().amax(-1) / E2M1_MAX)).clamp(0, E4M3_MAX).to(torch.float8_e4m3fn).float()
    scale = torch.where(scale == 0, 0.125, scale)
    codes = e2m1_codes(blocks / (scale / scale_2).unsqueeze(-1))
    return Nvfp4(pack(codes.flatten(-2)), scale.to(torch.float8_e4m3fn), scale_2)


def decode_nvfp4(packed: Tensor, scale: Tensor, scale_2: Tensor, reciprocal: bool = False) -> Tensor:
    """float64 [N, K]; ``reciprocal`` divides by the global scale instead of multiplying."""
    blocks = unpack(packed).unflatten(-1, (-1, 16)) * scale.to(torch.float64).unsqueeze(-1)  # exact
    whole = scale_2.to(torch.float64).reshape(())
    return (blocks / whole if reciprocal else blocks * whole).flatten(-2)


def encode_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [N, K/2], E8M0 [N, K/32]); the smallest power of two by which no element saturates."""
    blocks = w.unflatten(-1, (-1, 32))
    exponent = _ceil_log2(blocks.abs().amax(-1), E2M1_MAX)
    codes = e2m1_codes((blocks * power(-exponent).unsqueeze(-1)).float())
    return pack(codes.flatten(-2)).view(torch.int8), e8m0(exponent)


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """float64 [N, K]."""
    return (unpack(packed).unflatten(-1, (-1, 32)) * scale_values(scale).unsqueeze(-1)).flatten(-2)


def encode_fp8(w: Tensor, scale_dtype: str) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [N, K], scales [ceil(N/128), ceil(K/128)] in ``scale_dtype``); edge blocks are smaller."""
    n, k = w.shape
    padded = F.pad(w, (0, -k % 128, 0, -n % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))  # [R, 128, C, 128]
    amax = blocks.abs().amax((1, 3))
    if scale_dtype == "F8_E8M0":
        exponent = _ceil_log2(amax, E4M3_MAX)
        step, scale = power(exponent).float(), e8m0(exponent)
    else:
        scale = torch.where(amax == 0, 1.0, amax / E4M3_MAX)
        scale = scale.to(torch.bfloat16) if scale_dtype == "BF16" else scale
        step = scale.float()
    codes = (blocks / step[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:n, :k].contiguous(), scale


def decode_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """float64 [N, K] from any scale dtype."""
    n, k = weight.shape
    steps = scale_values(scale).repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return weight.to(torch.float64) * steps


def cast_mxfp4_to_nvfp4(packed: Tensor, scale: Tensor, top: int) -> Nvfp4 | None:
    """The same values as NVFP4, or None where a block lies more than 17 powers of two below ``top``.

    ``top`` is the largest scale exponent among the matrices that share the global scale 2^(top - 8). Codes stay as they
    are; a block scale 2^(exponent - top + 8) serves two blocks of 16.
    """
    exponent = scale.view(torch.uint8).to(torch.int32) - BIAS
    shifted = exponent - (top - 8)
    if int(shifted.min()) < -9 or int(shifted.max()) > 8 or not -126 <= top - 8 <= 127:
        return None
    blocks = power(shifted).to(torch.float8_e4m3fn)
    scale_2 = power(torch.tensor(top - 8)).float()
    return Nvfp4(packed.view(torch.uint8), blocks.repeat_interleave(2, -1), scale_2)


def cast_nvfp4_to_mxfp4(
    packed: Tensor, scale: Tensor, scale_2: Tensor, reciprocal: bool
) -> tuple[Tensor, Tensor] | None:
    """The same values as MXFP4, or None where the scales are no powers of two or two neighbours differ."""
    whole = scale_2.to(torch.float64).reshape(())
    steps = scale.to(torch.float64) / whole if reciprocal else scale.to(torch.float64) * whole
    mantissa, exponent = torch.frexp(steps)
    left, right = exponent[..., 0::2], exponent[..., 1::2]
    if not bool((mantissa == 0.5).all()) or not torch.equal(left, right):
        return None
    if int(left.min()) - 1 < -BIAS or int(left.max()) - 1 > BIAS:
        return None
    return packed.view(torch.int8), e8m0(left - 1)


def _ceil_log2(amax: Tensor, largest: float) -> Tensor:
    """int32: the smallest e with amax <= largest * 2^e; -127 + something representable for zero blocks."""
    mantissa, exponent = torch.frexp(amax.double() / largest)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(amax == 0, 0, exponent).clamp(-BIAS, BIAS).to(torch.int32)
