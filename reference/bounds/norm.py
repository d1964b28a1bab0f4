"""Root-mean-square norms."""

from __future__ import annotations

import torch
from torch import Tensor

from .algebra import REACH, Spread, V, chain


def arithmetic(size: int) -> tuple[float, float]:
    """(rss, plain sum) of the relative fp32 error of x * rsqrt(mean(x^2) + eps) over `size` elements.

    The sum of squares has positive terms: its partial sums stay below the total, so its relative error is at most
    v chain(K), halved by the root. Beside it: squares, mean, eps (v/2 each), rsqrt (2 ulp on a GPU: 4 v) and two
    products (v each): root of sum of squares below 5 v, plain sum below 10 v.
    """
    return V * (float(chain(size)) ** 2 / 4 + 25.0) ** 0.5, V * (size / 2 + 10.0)


def rms_norm(x: Spread, weight: Tensor | None, eps: float, rsqrt_dtype: str = "exact") -> Spread:
    """y = w x r with r = (mean(x^2) + eps)^(-1/2), over the last axis.

    First order: dy_d = w_d r dx_d - y_d (r^2 / D) sum_e x_e dx_e, the second part common to the row. r is taken at the
    smallest mean square that the errors of x allow: a row that is almost nothing but error (pooled keys that cancel)
    is amplified by up to eps^(-1/2). `rsqrt_dtype` rounds r itself (HF's unweighted norm): one error for a whole row,
    and a known one (:meth:`Spread.fixed`).
    """
    size = x.y.shape[-1]
    w = torch.ones_like(x.y) if weight is None else weight

    def factor(t: Tensor) -> Tensor:
        return ((t * t).mean(-1, keepdim=True) + eps).rsqrt()

    r = factor(x.at)
    rss, total = arithmetic(size)
    scale = Spread(r, (rss * r) ** 2, total * r).fixed(rsqrt_dtype)
    out = scale.times(x.at * w)
    y = x.y * factor(x.y) * w
    out = Spread(y, out.var, out.lin).moved(out.at).plus(V * out.at.abs())
    if bool((x.lin != 0).any()):
        stray = torch.minimum(REACH * x.var.mean(-1, keepdim=True).sqrt(), x.lin.square().mean(-1, keepdim=True).sqrt())
        near = ((x.at * x.at).mean(-1, keepdim=True).sqrt() - stray).clamp(min=0.0)
        sup = (near**2 + eps).rsqrt()
        own, common = (w * sup).abs(), out.at.abs() * sup * sup / size
        out = Spread(
            y,
            out.var + own**2 * x.var + common**2 * (x.at**2 * x.var).sum(-1, keepdim=True),
            out.lin + own * x.lin + common * (x.at.abs() * x.lin).sum(-1, keepdim=True),
            out.bias,
        )
    return out
