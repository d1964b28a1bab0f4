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
from harness.judge.valid import all_finite
from harness.types import Judged

LAMBDA = 5.0
FORMULA = "|production - oracle| <= h(|y| + d) + d, d = min(lambda RSS, sum)"


@dataclass(frozen=True)
class Margin:
    """The signed error of every element in multiples of its bound."""

    signed: Tensor  # (production - oracle) / bound, 0 where the oracle is -inf (rule 1 looked there)
    error: Tensor
    bound: Tensor
    worst: float
    at: tuple[int, ...]
    blind: float  # share of elements where a zero would pass

    @property
    def vacuous(self) -> bool:
        """Whether a zero output would pass."""
        return self.blind == 1.0


def spread(judged: Judged) -> Tensor:
    """d = min(lambda RSS, sum)."""
    return torch.minimum(LAMBDA * judged.rss, judged.total)


def bound(judged: Judged, dtype: str) -> Tensor:
    """B for an output of the given dtype."""
    d = spread(judged)
    return half_ulp(judged.value.abs() + d, dtype) + d


def margin(production: Tensor, judged: Judged, dtype: str) -> Margin:
    """Compare one non-empty tensor with the oracle's value and spread. B is never 0: h has a smallest value."""
    b = bound(judged, dtype)
    y, error = judged.value, production.double() - judged.value
    if not all_finite(y):
        finite = torch.isfinite(y)
        y, error, b = (torch.where(finite, x, fill) for x, fill in ((y, 0.0), (error, 0.0), (b, 1.0)))
    signed = error / b
    size = signed.abs()
    flat = int(size.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), size.shape))
    return Margin(signed, error, b, float(size.flatten()[flat]), at, float((y.abs() <= b).double().mean()))
