"""HyperHead: the last collapse of the streams, before the final norm.

``pre = sigmoid(scale * fn x + base) + eps`` with x the unweighted RMSNorm of the flattened streams, and
``collapsed = sum_n pre_n streams_n`` (HF: DeepseekV4HyperHead). fp32 inside; pre leaves in fp32, collapsed is rounded
once. Params, all fp32: fn (N, N d), base (N), scale (1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from production.component import Call, Component, Params, port, ports, rounding
from production.hyper_connection import collapse, project


@dataclass(frozen=True, kw_only=True)
class HyperHead(Component):
    """The head's collapse; see the module's docstring."""

    plan = rounding(collapsed="bf16")
    takes = ports(streams=port("B S N d"))
    gives = ports(pre=port("B S N", "fp32"), collapsed=port("B S d"))

    hc_eps: float
    rms_norm_eps: float

    def compute(self, p: Params, call: Call, *, streams: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        z = project(streams, p["fn"], self.rms_norm_eps)
        pre = torch.sigmoid(z * p["scale"].float() + p["base"].float()) + self.hc_eps
        return {"pre": pre, "collapsed": collapse(streams, pre).to(self.act)}
