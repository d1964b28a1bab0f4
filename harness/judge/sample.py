"""How much two RMS errors may differ by luck, if both sides are equally noisy.

What the elements of a token have in common (the reciprocal RMS of a norm, a coefficient of the stage before) moves them
together: one coefficient that is off moves a whole comb matrix. So a token counts as one draw, however wide the tensor.
With n draws a side, the sums of squares X and Y are independent Gammas of shape n/2, and by Chernoff's bound

    P(X > f^2 Y) <= min over t of E exp(t X) E exp(-t f^2 Y) = (2 f / (1 + f^2))^n

f(n) makes this ``ALARM`` = 1e-6, one false alarm in a million rows: f = 11 at n = 8, 2.7 at 32, 2.0 at 62, 1.5 at 170.
Rules 4 and 6 use their own factor or f(n), whichever is larger: over a few hundred tokens their own.

n is the number of tokens that carry the *reference's* error, (sum a)^2 / sum a^2 for its squares a by token: all of
them if it is spread evenly, one if a single token holds it. Production's error does not enter: a fault cannot widen its
bound.
"""

from __future__ import annotations

import math

from torch import Tensor

ALARM = 1e-6


def carriers(error: Tensor) -> float:
    """n of an error [B, S, ...] (or [B, T, ...]); the number of tokens where there is no error at all."""
    tokens = math.prod(error.shape[:2])
    a = error.double().reshape(tokens, -1).square().sum(1)
    fourth = float(a.square().sum())
    return float(a.sum()) ** 2 / fourth if fourth > 0 else float(tokens)


def luck(n: float) -> float:
    """f(n): the larger root of 2 f / (1 + f^2) = ALARM^(1/n)."""
    q = math.exp(math.log(ALARM) / max(n, 1.0))
    return (1.0 + math.sqrt(1.0 - q * q)) / q
