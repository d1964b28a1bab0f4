"""Dense projections: NVFP4 and BF16 weights, fp32 accumulation, one rounding of the output.

``y[b, s, n] = sum_k x[b, s, k] w[n, k]`` (HF: nn.Linear without bias). Operands are upcast to fp32, so products and
sums are fp32 whatever the activation's dtype; nothing is rounded before the output. An NVFP4 weight is folded exactly
(``nvfp4.fold``) for each call, and ``weight_scale_2`` multiplies the accumulator.

Shapes: x (B, S, ...) with the trailing dims flattened to K; y (B, S, *tail). Inputs may be strided; y is contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from production import nvfp4
from production.component import Call, Component, Params, Port, naming, port, rounding


def nvfp4_product(x: Tensor, p: Params, prefix: str = "") -> Tensor:
    """fp32 ``(x @ fold(weight)^T) * weight_scale_2``."""
    folded = nvfp4.fold(p[f"{prefix}weight"], p[f"{prefix}weight_scale"])
    return F.linear(x.float(), folded).mul_(p[f"{prefix}weight_scale_2"])


def bf16_product(x: Tensor, p: Params, prefix: str = "") -> Tensor:
    """fp32 ``x @ weight^T`` of upcast operands."""
    return F.linear(x.float(), p[f"{prefix}weight"].float())


def product(x: Tensor, p: Params, prefix: str = "") -> Tensor:
    """The fp32 product for whichever format the weight has."""
    return (nvfp4_product if f"{prefix}weight_scale" in p else bf16_product)(x, p, prefix)


@dataclass(frozen=True, kw_only=True)
class _Linear(Component):
    plan = rounding(acc="fp32", out="bf16")

    tail: tuple[int, ...] = naming()  # sizes of y's dims after B and S
    x_dims: str = naming()
    y_name: str = naming()
    y_dims: str = naming()

    @property
    def takes(self) -> Mapping[str, Port]:  # type: ignore[override]
        return {"x": port(self.x_dims)}

    @property
    def gives(self) -> Mapping[str, Port]:  # type: ignore[override]
        return {self.y_name: port(self.y_dims)}

    def _store(self, y: Tensor) -> dict[str, Tensor]:
        return {self.y_name: y.to(self.act).reshape(*y.shape[:2], *self.tail)}


@dataclass(frozen=True, kw_only=True)
class Nvfp4Linear(_Linear):
    """W4A16 projection. Params: weight uint8 (N, K/2), weight_scale e4m3 (N, K/16), weight_scale_2 fp32 [],
    input_scale fp32 [] (read from the checkpoint, never used). K is a multiple of 16."""

    def compute(self, p: Params, call: Call, *, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return self._store(nvfp4_product(x.flatten(2), p))


@dataclass(frozen=True, kw_only=True)
class Bf16Linear(_Linear):
    """Projection with an unquantised weight, bf16 (N, K)."""

    def compute(self, p: Params, call: Call, *, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return self._store(bf16_product(x.flatten(2), p))
