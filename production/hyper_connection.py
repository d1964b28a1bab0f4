"""Manifold-constrained hyper-connections (mHC): the coefficients, the collapse, and the residual mix.

Paper section 2.2 and Xie et al. 2026; HF: DeepseekV4HyperConnection and the residual lines of DeepseekV4DecoderLayer.
The checkpoint's names map to the paper's as fn -> W, base -> S, scale -> alpha; their rows and entries come in the
order pre, post, comb:

    x     = RMSNorm(flatten(streams))                          unweighted, over all N * d channels
    pre   = sigmoid(alpha_pre  * W_pre  x + S_pre) + eps       [N]     weights of the block's input
    post  = 2 * sigmoid(alpha_post * W_post x + S_post)        [N]     weights of the block's output
    comb  = Sinkhorn(softmax(alpha_comb * W_comb x + S_comb, rows) + eps)   [N, M], nearly doubly stochastic
    collapsed = sum_n pre_n streams_n

Sinkhorn divides by the column sums (+ eps) first, then alternates rows and columns for the remaining iterations, so
columns sum to one in the end and rows only nearly. The mix reads comb transposed:

    streams'_m = post_m * out + sum_n comb[n, m] streams_n

All of it is fp32: pre, post and comb leave in fp32; ``collapsed`` and the mixed streams are rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from production.component import Call, Component, Params, port, ports, rounding
from production.norms import inverse_rms

DIRECT_GAIN = 0.1  # share of a block's output in direct-residual mode


class Mapping3(NamedTuple):
    """The three affine maps under the paper's names."""

    W_pre: Tensor
    W_post: Tensor
    W_comb: Tensor
    S_pre: Tensor
    S_post: Tensor
    S_comb: Tensor
    alpha_pre: Tensor
    alpha_post: Tensor
    alpha_comb: Tensor


def paper_names(fn: Tensor, base: Tensor, scale: Tensor, streams: int) -> Mapping3:
    """fn (2N + N^2, N d), base (2N + N^2), scale (3) split as pre, post, comb (comb row-major, [n, m])."""
    parts = [streams, streams, streams * streams]
    return Mapping3(*fn.split(parts), *base.split(parts), *scale.unbind(0))


def project(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """fp32 [B, S, rows] = fn @ RMSNorm(flatten(streams)); the norm's factor is applied after the product."""
    x = streams.flatten(2).float()
    return F.linear(x, fn.float()).mul_(inverse_rms(x, eps))


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """fp32 [B, S, d] = sum_n pre_n streams_n."""
    return torch.matmul(pre.unsqueeze(-2), streams.float()).squeeze(-2)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """fp32 [..., N, M]: softmax over rows, + eps, columns, then (rows, columns) iterations - 1 times."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


@dataclass(frozen=True, kw_only=True)
class HyperConnection(Component):
    """Coefficients and collapse before a block. Params: fn, base, scale, all fp32. streams is contiguous in (N, d)."""

    plan = rounding(collapsed="bf16")
    takes = ports(streams=port("B S N d"))
    gives = ports(
        pre=port("B S N", "fp32"),
        post=port("B S N", "fp32"),
        comb=port("B S N M", "fp32"),
        collapsed=port("B S d"),
    )
    direct_takes = ("streams",)

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float

    def compute(self, p: Params, call: Call, *, streams: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        n = self.hc_mult
        m = paper_names(p["fn"].float(), p["base"].float(), p["scale"].float(), n)
        z_pre, z_post, z_comb = project(streams, p["fn"], self.rms_norm_eps).split([n, n, n * n], dim=-1)
        pre = torch.sigmoid(z_pre * m.alpha_pre + m.S_pre) + self.hc_eps
        post = 2 * torch.sigmoid(z_post * m.alpha_post + m.S_post)
        comb = (z_comb * m.alpha_comb + m.S_comb).unflatten(-1, (n, n))
        return {
            "pre": pre,
            "post": post,
            "comb": sinkhorn(comb, self.hc_sinkhorn_iters, self.hc_eps),
            "collapsed": collapse(streams, pre).to(self.act),
        }

    def direct(self, *, streams: Tensor) -> dict[str, Tensor]:
        """Direct-residual mode: the block reads the mean of the streams."""
        return {"collapsed": (streams.float().sum(2) / self.hc_mult).to(self.act)}


@dataclass(frozen=True, kw_only=True)
class ResidualMix(Component):
    """The streams after a block. comb is contracted over its first stream axis (N), which is comb transposed."""

    plan = rounding(coef="fp32", terms="fp32", out="bf16")
    takes = ports(
        streams=port("B S N d"),
        post=port("B S N", "fp32"),
        comb=port("B S N M", "fp32"),
        out=port("B S d"),
    )
    gives = ports(streams=port("B S N d"))
    direct_takes = ("streams", "out")

    def compute(  # type: ignore[override]
        self, p: Params, call: Call, *, streams: Tensor, post: Tensor, comb: Tensor, out: Tensor
    ) -> dict[str, Tensor]:
        carried = torch.matmul(comb.transpose(-1, -2), streams.float())
        return {"streams": carried.addcmul_(post.unsqueeze(-1), out.float().unsqueeze(-2)).to(self.act)}

    def direct(self, *, streams: Tensor, out: Tensor) -> dict[str, Tensor]:
        """Direct-residual mode: a tenth of the block's output is added to every stream."""
        return {"streams": (streams.float() + DIRECT_GAIN * out.float().unsqueeze(-2)).to(self.act)}
