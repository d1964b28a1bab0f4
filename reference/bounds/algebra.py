"""Values that carry the rounding error which a plan allows them.

A :class:`Spread` is a float64 value ``y`` with two first-order summaries of the errors that reach it:

* ``var``, the sum of the squared effects of the single roundings. Roundings are bounded, zero-mean to first order and
  nearly independent, so a sum of them behaves like a sub-Gaussian variable: with amplitudes ``a_i`` (largest effect of
  rounding i) Hoeffding gives P(|error| > t) <= 2 exp(-t^2 / (2 sum a_i^2)), and uniform roundings, whose variance proxy
  is a third of that, P(|error| > 5 sqrt(var)) <= 2 exp(-37.5) ~ 1e-16 an element (Higham & Mary, "A new approach to
  probabilistic rounding error analysis", SISC 2019, for the same argument on sums).
* ``lin``, the plain sum of the amplitudes: no rounding pattern exceeds it (Higham, "Accuracy and Stability", ch. 3).

* ``bias``, errors that are known: where the plan rounds a value whose every admissible perturbation rounds to the same
  number (all but about one in a thousand), the error is that number minus ``y``, sign included. It counts once, not
  five times; see :meth:`Spread.fixed`.

Roundings that are *not* independent are handled where they arise: equal values round alike (:func:`coherent`), and a
factor common to many elements (a norm, a softmax denominator) is propagated as one error, not as many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
    """A value with the squares, the plain sum and the known part of the errors that reach it; float64, of one shape."""

    y: Tensor
    var: Tensor
    lin: Tensor
    bias: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def __post_init__(self) -> None:
        for name in ("var", "lin", "bias"):
            object.__setattr__(self, name, getattr(self, name).expand(self.y.shape))

    @property
    def rss(self) -> Tensor:
        """Of the errors that are not known."""
        return self.var.sqrt()

    @property
    def reach(self) -> Tensor:
        """How far the value may stray from y + bias."""
        return torch.minimum(REACH * self.rss, self.lin)

    @property
    def at(self) -> Tensor:
        """Where the value is with its known errors: roundings and slopes are taken here."""
        return self.y + self.bias

    def map(self, change: Callable[[Tensor], Tensor]) -> Spread:
        """The same selection or change of shape for all parts."""
        return Spread(change(self.y), change(self.var), change(self.lin), change(self.bias))

    def plus(self, *amplitudes: Tensor) -> Spread:
        """Add independent errors, each given by its largest absolute effect."""
        var, lin = self.var, self.lin
        for a in amplitudes:
            var, lin = var + a * a, lin + a.abs()
        return Spread(self.y, var, lin, self.bias)

    def times(self, factor: Tensor | float) -> Spread:
        """Exact multiplication by a known factor."""
        f = torch.as_tensor(factor, dtype=torch.float64)
        return Spread(self.y * f, self.var * f * f, self.lin * f.abs(), self.bias * f)

    def rounded(self, unit: float) -> Spread:
        """One rounding to a format of unit roundoff `unit`, as an unknown error: at most unit |y|, in any binade.

        fp32's unit adds nothing: fp32 arithmetic has counted it.
        """
        return self.plus(unit * self.at.abs()) if unit > V else self

    def fixed(self, dtype: str) -> Spread:
        """One rounding to `dtype` where its result is known.

        Rounding to nearest is monotonic: if both ends of the interval that the value may lie in round to one number,
        every value in it does. Then the errors so far are gone and the known error is what is left. Elsewhere (a tie
        within reach) nothing is known and the rounding is one more unknown error.
        """
        if dtype != "bf16":
            return self
        at = self.at
        reach = self.reach + 1e-14 * at.abs()
        low, high = to_bf16(at - reach), to_bf16(at + reach)
        known = low == high
        loose = self.plus(UNIT["bf16"] * at.abs())
        none = torch.zeros_like(at)
        return Spread(
            self.y,
            torch.where(known, none, loose.var),
            torch.where(known, none, loose.lin),
            torch.where(known, low - self.y, self.bias),
        )

    def moved(self, at: Tensor) -> Spread:
        """The same unknown errors around another known position."""
        return Spread(self.y, self.var, self.lin, at - self.y)

    def result(self) -> tuple[Tensor, Tensor]:
        """(rss, total) for the margin rule: min(5 rss, total) is |bias| plus the reach of the unknown errors."""
        known = self.bias.abs()
        rss = self.rss + known / REACH
        return rss, torch.maximum(self.lin + known, rss)


def exact(y: Tensor) -> Spread:
    """A value that comes without error: an input or a parameter."""
    zero = torch.zeros((), dtype=torch.float64, device=y.device)
    return Spread(y, zero, zero, zero)


def to_bf16(value: Tensor) -> Tensor:
    """Rounded to nearest bf16, as float64."""
    return value.to(torch.bfloat16).double()


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


def chain(count: Tensor | float) -> Tensor:
    """Relative error of an fp32 sum of `count` terms, in v times the largest partial sum, as a root of sum of squares.

    sqrt(n) for n independent roundings. The factor (1 + n / 4096) adds what is systematic: tensor cores truncate, about
    once every 16 products and by half an ulp on average, all in one direction, a bias of n / 16; five times n / 64
    covers it with room, and 1 / 64^2 = 1 / 4096. Sums of equal terms, which round alike, are covered by it as well, as
    far as they are split over lanes.
    """
    n = torch.as_tensor(count, dtype=torch.float64)
    return (n * (1 + n / 4096)).sqrt()


def short_sum(terms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(rss amplitude, plain sum) of fp32 errors in a sum of a few products along `dim`, in any order.

    Each of the K products and K - 1 partial sums is rounded once, and none exceeds S = sum |terms|.
    """
    size = terms.shape[dim]
    magnitude = terms.abs().sum(dim)
    return V * size**0.5 * magnitude, V * (size + 1) * magnitude
