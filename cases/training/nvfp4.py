"""NVFP4 as ModelOpt writes it: E2M1 codes, E4M3 scales over blocks of 16 along K, one float32 scale a tensor.

weight ~ e2m1(code) * float(weight_scale[n, k // 16]) * weight_scale_2
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX, E4M3_MAX, E4M3_MIN = 6.0, 448.0, 2.0**-9
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between two codes the midpoint goes to the code with the even mantissa: up at the first set, down at the second.
_TIES_UP, _TIES_DOWN = (0.75, 1.75, 3.5), (0.25, 1.25, 2.5, 5.0)


class Nvfp4(NamedTuple):
    """The bytes of one quantised linear; leading dimensions (experts) are allowed everywhere."""

    weight: Tensor  # uint8 [..., N, K/2], low nibble = even k
    weight_scale: Tensor  # float8_e4m3fn [..., N, K/16]
    weight_scale_2: Tensor  # float32 [...]


def tensor_scale(amax: Tensor) -> Tensor:
    """float32 scale that maps `amax` to the largest code times the largest block scale."""
    return amax.float() / (E2M1_MAX * E4M3_MAX)


def e2m1_codes(x: Tensor) -> Tensor:
    """uint8 codes 0..15 of x (any shape): nearest, ties to even, saturating at 6; the sign of a zero is kept."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for bound in _TIES_UP:
        code += magnitude >= bound
    for bound in _TIES_DOWN:
        code += magnitude > bound
    return code | ((x < 0).to(torch.uint8) << 3)


def block_scales(w: Tensor, scale_2: Tensor) -> Tensor:
    """float8_e4m3fn [..., N, K/16] for w [..., N, K] and scale_2 [...]."""
    block_amax = w.float().unflatten(-1, (-1, BLOCK)).abs().amax(-1)
    scale = block_amax / (E2M1_MAX * scale_2[..., None, None])
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    # torch below 2.12 turns an overflowing cast into NaN, later ones saturate: clamp first, and both agree.
    return scale.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize(w: Tensor, amax: Tensor | None = None) -> Nvfp4:
    """w [..., N, K] float, amax [...] (default: of each matrix) -> bytes."""
    amax = w.abs().amax((-2, -1)) if amax is None else amax
    scale_2 = tensor_scale(amax)
    scale = block_scales(w, scale_2)
    step = (scale.float() * scale_2[..., None, None]).repeat_interleave(BLOCK, -1)
    codes = e2m1_codes(w.float() / step)
    return Nvfp4(codes[..., 0::2] | (codes[..., 1::2] << 4), scale, scale_2)


def dequantize(q: Nvfp4) -> Tensor:
    """float32 [..., N, K]."""
    codes = torch.stack((q.weight & 15, q.weight >> 4), -1).flatten(-2)
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=torch.float32, device=q.weight.device)
    values = table[codes.long()].unflatten(-1, (-1, BLOCK))
    return (values * q.weight_scale.float().unsqueeze(-1)).flatten(-2) * q.weight_scale_2[..., None, None]


def fake_quantize(w: Tensor, amax: Tensor | None = None) -> Tensor:
    """w [..., N, K] as a bf16 model sees it after export; the gradient passes straight through."""
    with torch.no_grad():
        amax = w.abs().amax((-2, -1)) if amax is None else amax
        scale_2 = tensor_scale(amax)
        scale = block_scales(w, scale_2).float() * scale_2[..., None, None]
        scaled = w.unflatten(-1, (-1, BLOCK)) / scale.unsqueeze(-1)
        # The codes' grid without a table look-up (cheap in a captured graph): the step is 0.5 below 2, 1 below 4, 2
        # above, and round() breaks ties to even just as the even mantissa does.
        size = scaled.abs()
        step = 0.5 + 0.5 * (size >= 2) + 1.0 * (size >= 4)
        grid = ((scaled / step).round() * step).clamp(-E2M1_MAX, E2M1_MAX)
        error = (grid * scale.unsqueeze(-1)).flatten(-2).bfloat16().float() - w
    return w + error
