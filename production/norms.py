"""RMS norms, with and without a weight. fp32 inside, one rounding of the output.

``y = w * (x * rsqrt(mean(x^2) + eps))`` over the last axis (HF: DeepseekV4RMSNorm, and DeepseekV4UnweightedRMSNorm for
q_b_norm, which rounds its rsqrt to bf16 where this one keeps fp32). Any shape; y has x's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from production.component import Call, Component, Params, Port, naming, port, ports, rounding


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """fp32 ``1 / sqrt(mean(x^2) + eps)`` of an fp32 tensor, last axis kept with size one."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The norm in fp32, not yet rounded."""
    x = x.float()
    y = x * inverse_rms(x, eps)
    return y if weight is None else y.mul_(weight.float())


@dataclass(frozen=True, kw_only=True)
class RmsNorm(Component):
    """Weighted norm over the last axis. Params: weight (bf16 in the checkpoint, multiplied in fp32)."""

    plan = rounding(out="bf16")

    rms_norm_eps: float
    x_name: str = naming()
    y_name: str = naming()
    dims: str = naming()

    @property
    def takes(self) -> Mapping[str, Port]:  # type: ignore[override]
        return {self.x_name: port(self.dims)}

    @property
    def gives(self) -> Mapping[str, Port]:  # type: ignore[override]
        return {self.y_name: port(self.dims)}

    def compute(self, p: Params, call: Call, **inputs: Tensor) -> dict[str, Tensor]:
        return {self.y_name: rms_norm(inputs[self.x_name], p["weight"], self.rms_norm_eps).to(self.act)}


@dataclass(frozen=True, kw_only=True)
class HeadNorm(Component):
    """The unweighted norm of every query head over its D channels (q_b_norm)."""

    plan = rounding(rsqrt="fp32", out="bf16")
    takes = ports(q=port("B S H D"))
    gives = ports(q=port("B S H D"))

    rms_norm_eps: float

    def compute(self, p: Params, call: Call, *, q: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"q": rms_norm(q, None, self.rms_norm_eps).to(self.act)}
