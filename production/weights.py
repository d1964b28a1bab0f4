"""Weights of linears in the formats of the checkpoints, as factors that a product applies without rounding the weight.

    w[n, k] = matrix[n, k] * tiles[n, k // 128] * scale        (or / divisor)

``matrix`` is exact in fp32. What would not fit beside it (a scale with 24 significant bits) is applied to the fp32
accumulator, where one rounding pays for it: ``scale`` and ``divisor`` once per output, ``tiles`` once per partial sum.

format    stored parameters                                                    matrix          on the accumulator
bf16      weight bf16 or fp32 (N, K)                                           weight          -
fp8       weight e4m3 (N, K), weight_scale_inv (N/128, K/128), rounded up,     e4m3 * scale    -
          as E8M0 or bf16: 4 + 8 bits
          with weight_scale_inv fp32                                           e4m3            tiles
mxfp4     weight uint8 (N, K/2), weight_scale E8M0 (N, K/32)                   e2m1 * scale    -
nvfp4     weight uint8 (N, K/2), weight_scale e4m3 (N, K/16),                  e2m1 * e4m3     scale
          weight_scale_2 fp32 []
nvfp4-ct  weight uint8, weight_scale e4m3, weight_global_scale fp32 [],        e2m1 * e4m3     divisor
          the reciprocal of weight_scale_2 (compressed-tensors)

Leading dims (experts) are allowed everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from production import nvfp4

TILE = 128  # rows and columns of an FP8 block
MX_BLOCK = 32
FORMS = ("bf16", "fp8", "mxfp4", "nvfp4", "nvfp4-ct")
#: what accompanies a weight in a stage's parameters
COMPANIONS = (*nvfp4.COMPANIONS, "weight_scale_inv", "weight_global_scale", "input_global_scale")


@dataclass(frozen=True)
class Operand:
    """The weight of one linear, or of a stack of them; see the module's docstring. All fp32."""

    matrix: Tensor  # (..., N, K)
    tiles: Tensor | None = None  # (..., N, ceil(K / 128))
    scale: Tensor | None = None  # (...)
    divisor: Tensor | None = None  # (...)

    def product(self, x: Tensor) -> Tensor:
        """fp32 (..., N) of x (..., K), which is upcast; fp32 accumulation. Of one linear, not of a stack."""
        x = x.float()
        if self.tiles is None:
            y = F.linear(x, self.matrix)
        else:
            columns = zip(x.split(TILE, -1), self.matrix.split(TILE, -1), self.tiles.unbind(-1), strict=True)
            y = x.new_zeros(*x.shape[:-1], self.matrix.shape[0])
            for part, weight, factor in columns:
                y.add_(F.linear(part, weight).mul_(factor))
        if self.scale is not None:
            return y.mul_(self.scale)
        return y if self.divisor is None else y.div_(self.divisor)

    def rows(self, start: int, end: int) -> Operand:
        """Some of the output channels."""
        tiles = None if self.tiles is None else self.tiles[start:end]
        return replace(self, matrix=self.matrix[start:end], tiles=tiles)

    def decoded(self) -> Tensor:
        """The weight in float64: exact, but for the one rounding of a division."""
        value = self.matrix.double()
        if self.tiles is not None:
            value *= self.tiles.double().repeat_interleave(TILE, -1)[..., : value.shape[-1]]
        if self.scale is not None:
            value *= self.scale.double()[..., None, None]
        if self.divisor is not None:
            value /= self.divisor.double()[..., None, None]
        return value


def form_of(p: Mapping[str, Tensor], prefix: str = "") -> str:
    """The format of ``<prefix>weight``, from its dtype and companions. Unpacked weights keep theirs (``unpacked``)."""
    dtype = p[f"{prefix}weight"].dtype
    if dtype == torch.float8_e4m3fn:
        return "fp8"
    if f"{prefix}weight_global_scale" in p:
        return "nvfp4-ct"
    if f"{prefix}weight_scale_2" in p:
        return "nvfp4"
    if dtype != torch.uint8:
        return "bf16"
    return "mxfp4"


def operand(p: Mapping[str, Tensor], prefix: str = "", expert: int | None = None) -> Operand:
    """The operand of ``<prefix>weight``; of one expert of a stack if ``expert`` is given."""

    def part(name: str) -> Tensor:
        tensor = p[f"{prefix}{name}"]
        return tensor if expert is None else tensor[expert]

    form = form_of(p, prefix)
    if form == "bf16":
        return Operand(part("weight").float())
    if form == "fp8":
        return _fp8(part("weight"), part("weight_scale_inv"))
    if form == "mxfp4":
        return Operand(_mxfp4(part("weight"), part("weight_scale")))
    folded = nvfp4.fold(part("weight"), part("weight_scale"))
    if form == "nvfp4":
        return Operand(folded, scale=part("weight_scale_2"))
    return Operand(folded, divisor=part("weight_global_scale"))


def unpacked(p: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters with every packed or bf16 weight as its exact fp32 matrix, so that no call unpacks it again.

    Factors of the accumulator stay beside it, so ``operand`` of the result is ``operand`` of ``p``. FP8 weights stay
    as they are: their tiles are not part of the matrix.
    """
    made = {}
    for name, tensor in p.items():
        if name.endswith(COMPANIONS) or tensor.dtype == torch.float8_e4m3fn:
            made[name] = tensor
        elif tensor.dtype == torch.uint8:
            made[name] = operand(p, name.removesuffix("weight")).matrix
        else:
            made[name] = tensor.float() if tensor.is_floating_point() else tensor
    return made


def e8m0(scale: Tensor) -> Tensor:
    """fp32 values 2^(byte - 127) of E8M0, from the bits: byte 0 is a subnormal, byte 255 is NaN."""
    byte = scale.view(torch.uint8).int()
    bits = torch.where(byte == 0, 1 << 22, byte << 23)  # 2^-127 lies half below fp32's smallest normal
    return torch.where(byte == 255, torch.nan, bits.view(torch.float32))


def _fp8(weight: Tensor, scale: Tensor) -> Operand:
    """E8M0 and bf16 scales fold exactly; fp32 ones stay on the accumulator."""
    n, k = weight.shape[-2:]
    value = e8m0(scale) if scale.dtype == torch.float8_e8m0fnu else scale.float()
    rows = value.repeat_interleave(TILE, -2)[..., :n, :]
    matrix = weight.float()
    if scale.dtype == torch.float32:
        return Operand(matrix, tiles=rows)
    return Operand(matrix.mul_(rows.repeat_interleave(TILE, -1)[..., :k]))


def _mxfp4(weight: Tensor, scale: Tensor) -> Tensor:
    blocks = nvfp4.unpack(weight).unflatten(-1, (-1, MX_BLOCK))
    return blocks.mul_(e8m0(scale).unsqueeze(-1)).flatten(-2)
