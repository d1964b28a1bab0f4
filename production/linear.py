"""Dense projections, one class per weight format: fp32 accumulation, one rounding of the output.

``y[b, s, n] = sum_k x[b, s, k] w[n, k]`` (HF: nn.Linear without bias). Operands are upcast to fp32, so products and
sums are fp32 whatever the activation's dtype; nothing is rounded before the output. A quantised weight is folded
exactly for each call, and scales that do not fold are applied to the accumulator (``production.weights``). So one
rounding plan holds for all formats: accumulator fp32, output in the model's dtype, weight not rounded.

Shapes: x (B, S, ...) with the trailing dims flattened to K; y (B, S, *tail). Inputs may be strided; y is contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from production.component import Call, Component, Params, Port, naming, port, rounding
from production.weights import operand


def product(x: Tensor, p: Params, prefix: str = "") -> Tensor:
    """fp32 ``x @ w^T`` for whichever format ``<prefix>weight`` has."""
    return operand(p, prefix).product(x)


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

    def compute(self, p: Params, call: Call, *, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        y = product(x.flatten(2), p)
        return {self.y_name: y.to(self.act).reshape(*y.shape[:2], *self.tail)}


class Nvfp4Linear(_Linear):
    """W4A16 projection. Params: weight uint8 (N, K/2), weight_scale e4m3 (N, K/16), weight_scale_2 fp32 [],
    input_scale fp32 [] (where the checkpoint has one; never used). K is a multiple of 16."""


class CtNvfp4Linear(_Linear):
    """W4A16 projection as compressed-tensors stores it: weight_global_scale fp32 [] divides the accumulator."""


class Mxfp4Linear(_Linear):
    """W4A16 projection with power-of-two scales. Params: weight uint8 (N, K/2), weight_scale E8M0 (N, K/32)."""


class Fp8Linear(_Linear):
    """W8A16 projection. Params: weight e4m3 (N, K), weight_scale_inv E8M0, bf16 or fp32 (N/128, K/128), rounded up.

    Despite its name the scale multiplies. fp32 scales are applied to the partial sum of each 128 columns.
    """


class Bf16Linear(_Linear):
    """Projection with an unquantised weight, bf16 or fp32 (N, K)."""
