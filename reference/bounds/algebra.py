"""Values that carry the rounding error which a plan allows them.

A :class:`Spread` is a float64 value ``y`` with two first-order summaries of the errors that reach it:

* ``var``, the sum of the squared effects of the single roundings. Roundings are bounded, zero-mean to first order and
  nearly independent, so a sum of them behaves like a sub-Gaussian variable: with amplitudes ``a_i`` (largest effect of
  rounding i) Hoeffding gives P(|error| > t) <= 2 exp(-t^2 / (2 sum a_i^2)), and uniform roundings, whose variance proxy
  is a third of that, P(|error| > 5 sqrt(var)) <= 2 exp(-37.5) ~ 1e-16 an element (Higham & Mary, "A new approach to
  probabilistic rounding error analysis", SISC 2019, for the same argument on sums).
* ``lin``, the plain sum of the amplitudes: no rounding pattern exceeds it (Higham, "Accuracy and Stability", ch. 3).

Roundings that are *not* independent are handled where they arise: equal values round alike (:func:`coherent`), and a
factor common to many elements (a norm, a softmax denominator) is propagated as one error, not as many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Unit roundoff (half an ulp relative to the value) of a plan's dtypes. ``exact`` is "not rounded beyond fp32
#: arithmetic", which is what an absent point means as well.
UNIT = {"bf16": 2.0**-8, "fp32": 2.0**-24, "exact": 2.0**-24}
#: Unit roundoff of fp32, the arithmetic inside every stage.
V = UNIT["fp32"]
#: Smallest normal fp32 (and bf16) number: what flush-to-zero loses.
TINY = 2.0**-126
#: The multiple of rss that the margin rule uses. Only second-order guards here need it (how far may a value stray?).
REACH = 5.0


@dataclass(frozen=True)
class Spread:
    """A value, the sum of squares of the errors that reach it, and their plain sum; all float64, broadcastable."""

    y: Tensor
    var: Tensor
    lin: Tensor

    @property
    def rss(self) -> Tensor:
        return self.var.sqrt()

    @property
    def reach(self) -> Tensor:
        """How far the value may stray: what the margin rule would call delta."""
        return torch.minimum(REACH * self.rss, self.lin)

    def plus(self, *amplitudes: Tensor) -> Spread:
        """Add independent errors, each given by its largest absolute effect."""
        var, lin = self.var, self.lin
        for a in amplitudes:
            var, lin = var + a * a, lin + a.abs()
        return Spread(self.y, var, lin)

    def rounded(self, unit: float) -> Spread:
        """One rounding to a format of unit roundoff `unit`: at most unit |y|, whatever binade y strays into."""
        return self.plus(unit * self.y.abs())

    def times(self, factor: Tensor | float) -> Spread:
        """Exact multiplication by a known factor."""
        size = torch.as_tensor(factor, dtype=torch.float64).abs()
        return Spread(self.y * factor, self.var * size * size, self.lin * size)

    def view(self, *shape: int) -> Spread:
        return Spread(self.y.reshape(shape), self.var.reshape(shape), self.lin.reshape(shape))

    def result(self) -> tuple[Tensor, Tensor]:
        """(rss, total) of the value's shape, with total never below rss."""
        rss = self.rss.expand(self.y.shape).clone()
        return rss, torch.maximum(self.lin.expand(self.y.shape), rss)


def exact(y: Tensor) -> Spread:
    """A value that comes without error: an input or a parameter."""
    return Spread(y, torch.zeros_like(y), torch.zeros_like(y))


def rounding_error(value: Tensor, dtype: str) -> Tensor:
    """The error that rounding a *known* value makes: parameters and inputs, whose bits both sides see.

    Unlike ``unit |y|`` it is zero where the value is representable, and it has a sign: equal weights err alike.
    """
    if dtype == "bf16":
        return value.to(torch.bfloat16).double() - value
    return torch.zeros_like(value)


def rounding_key(value: Tensor, bits: int = 10) -> Tensor:
    """`value` cut to `bits` mantissa bits: values of one key are so close that bf16 rounds them with the same error.

    bf16 keeps 8 bits; two more separate unrelated values and still join values that differ by less than a quarter of
    its ulp (the same token at another position, for example).
    """
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp((mantissa * 2.0**bits).round(), exponent)


def class_sums(amplitude: Tensor, key: Tensor, dim: int) -> Tensor:
    """For each element along `dim`, the sum of |amplitude| over the elements of equal key.

    Equal values round alike: the errors of one class add up before they are squared, sum_classes (sum_class a)^2, which
    is sum_t a_t A_class(t) with this function's A. Where all keys differ A = a and the independent sum is back.
    """
    a = amplitude.abs().movedim(dim, -1)
    k, order = key.expand(amplitude.shape).movedim(dim, -1).sort(dim=-1)
    new = torch.ones_like(k, dtype=torch.int64)
    new[..., 1:] = (k[..., 1:] != k[..., :-1]).long()
    index = new.cumsum(-1) - 1
    sums = torch.zeros_like(a).scatter_add(-1, index, a.gather(-1, order))
    back = torch.zeros_like(a).scatter(-1, order, sums.gather(-1, index))
    return back.movedim(-1, dim)


def coherent(amplitude: Tensor, key: Tensor, dim: int) -> Tensor:
    """Sum over `dim` of squared errors whose equal-key members err alike (see :func:`class_sums`)."""
    return (amplitude.abs() * class_sums(amplitude, key, dim)).sum(dim)


def short_sum(terms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(rss amplitude, plain sum) of fp32 errors in a sum of a few products along `dim`, in any order.

    Each of the K products and K - 1 partial sums is rounded once, and none exceeds S = sum |terms|.
    """
    size = terms.shape[dim]
    magnitude = terms.abs().sum(dim)
    return V * size**0.5 * magnitude, V * (size + 1) * magnitude
