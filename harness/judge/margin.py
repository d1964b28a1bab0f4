"""Rule 3, *margin*: every element of a local row lies within what the declared roundings can do.

Production computes y + (effects of its roundings), then rounds to the output dtype. To first order the effect is a sum
of independent terms r_i e_i, |e_i| <= 1, one for each rounding that the plan declares. Two bounds hold:

- certainly, |sum| <= T, their plain sum (``Judged.total``);
- for rounding errors uniform in [-1, 1] (sub-Gaussian with variance proxy 1/3), P(|sum| > lambda R) <=
  2 exp(-3 lambda^2 / 2) with R the root sum of squares (``Judged.rss``). lambda = 5 gives 1e-16 an element, and 2.5
  times the largest need measured over 1.3e9 clean elements (docs/numerics.md).

So the value before the last rounding is within d = min(lambda R, T) of y, its magnitude is at most |y| + d, and the
last rounding adds at most h(|y| + d):

    |production - oracle| <= B = h(|y| + d) + d

Nothing in B depends on the observed error, so a wrong stage cannot widen its own bound. A bound that a tensor of zeros
would satisfy says nothing: such a PASS is INCONCLUSIVE (``vacuous``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.judge.ulp import half_ulp
from harness.types import Judged

LAMBDA = 5.0
FORMULA = "|production - oracle| <= h(|y| + d) + d, d = min(lambda RSS, sum)"


@dataclass(frozen=True)
class Margin:
    """The signed error of every element in multiples of its bound."""

    signed: Tensor  # (production - oracle) / bound, 0 where the oracle is -inf (rule 1 looked there)
    bound: Tensor
    worst: float
    at: tuple[int, ...]
    vacuous: bool  # a zero output would pass


def spread(judged: Judged) -> Tensor:
    """d = min(lambda RSS, sum)."""
    return torch.minimum(LAMBDA * judged.rss, judged.total)


def bound(judged: Judged, dtype: str) -> Tensor:
    """B for an output of the given dtype."""
    d = spread(judged)
    return half_ulp(judged.value.abs() + d, dtype) + d


def margin(production: Tensor, judged: Judged, dtype: str) -> Margin:
    """Compare one non-empty tensor with the oracle's value and spread."""
    b = bound(judged, dtype)
    finite = torch.isfinite(judged.value)
    y = torch.where(finite, judged.value, 0.0)
    error = torch.where(finite, production.double() - y, 0.0)
    tiny = torch.finfo(torch.float64).tiny  # B is 0 only where h underflows; 0/0 is then no error, x/0 a huge one
    b = torch.where(finite, b, 1.0).clamp_min(tiny)
    signed = error / b
    size = signed.abs()
    flat = int(size.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), size.shape))
    return Margin(signed, b, float(size.flatten()[flat]), at, vacuous=bool((y.abs() <= b).all()))
