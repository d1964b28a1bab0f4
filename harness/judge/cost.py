"""Rule 4, *cost*: in a local row production is not much worse than the reference is on the same inputs.

    RMS(production - oracle) <= F max(RMS(reference - oracle), kappa RMS(h) / sqrt(3)),  F = max(2, f(n))

A uniform rounding of half-width h has RMS h / sqrt(3), so the second term is the error of the output rounding alone
(kappa = 1), or for fp32 outputs that of a few roundings in another summation order (kappa = 4). It keeps a reference
that happens to be exact from raising alarms. Two: one rounding is at most sqrt(3) times its RMS, and two equal
pipelines differ by sampling noise only (clean maxima 1.27 for bf16 and 1.80 for fp32 outputs; faults from 21 up).

An RMS over few draws is a matter of luck: f(n) allows for it (``sample``), and below 32 elements the margin alone
decides. The rule sees what the margin cannot, many elements that are each a little wrong; the margin sees what this
rule cannot, one element that is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from harness.judge.sample import luck
from harness.judge.ulp import half_ulp, kappa, rms

FACTOR = 2.0
FEWEST = 32
FORMULA = "RMS(production - oracle) <= F max(RMS(reference - oracle), kappa RMS(h) / sqrt(3)), F = max(2, f(n))"


@dataclass(frozen=True)
class Cost:
    """Errors as RMS and their ratio to what the rule allows (None: too few elements)."""

    error: float
    reference_error: float
    floor: float  # kappa RMS(h) / sqrt(3)
    allowed: float
    ratio: float | None
    tokens: float  # n: tokens that carry the reference's error
    factor: float  # F


def floor(oracle: Tensor, dtype: str) -> float:
    """kappa RMS(h) / sqrt(3) over the finite elements of an oracle tensor."""
    return kappa(dtype) * rms(half_ulp(oracle, dtype)) / math.sqrt(3.0)


def cost(error: Tensor, reference_error: Tensor, oracle: Tensor, dtype: str, tokens: float) -> Cost:
    """Errors against the oracle (each witness against the oracle of its own picks), at finite elements only.

    ``tokens`` is n.
    """
    least = floor(oracle, dtype)
    mine, theirs = rms(error), rms(reference_error)
    factor = max(FACTOR, luck(tokens))
    allowed = factor * max(theirs, least)
    return Cost(mine, theirs, least, allowed, mine / allowed if error.numel() >= FEWEST else None, tokens, factor)
