"""Rule 6, *free rows*: on its own inputs all the way, production is about as far from the oracle as the reference.

    RMS(production - oracle) <= max(f RMS(reference - oracle), 2 kappa RMS(h) / sqrt(3)),   f = 1.5 from 32 tokens on

All three start from the same wires and use the reference's picks: discrete choices amplify rounding (own picks: correct
runs of a small model differ by 17 % in the logits, replayed: by 3 %). An equally noisy production then sits at
1.00 +- 0.02, one that accumulates in fp32 at 0.63. The second term is what rule 4 grants a stage on its own: early in a
run the reference may be exact by luck. Below 32 elements an RMS is luck altogether, and the row is skipped.

A single token is one draw for a whole tensor: all its elements share the roundings of a few coefficients in front of
them. Token by token the ratio of the two errors spreads log-normally, sigma 0.19 in the median stage and 0.6 in the
widest (bundled checkpoint, 331 tokens, 130 wires; largest ratio of 43,000: 4.2). The mean over n tokens spreads by
1 / sqrt(n), so f = 1.5 exp(1.5 (1 / sqrt(n) - 1 / sqrt(32))) for n < 32: 5.2 for one decoded token, 2.4 for four.

Free rows show how an error grows; they cannot place a small one. They name the first fault only if no local row does.
"""

from __future__ import annotations

import math

from torch import Tensor

from harness.judge import cost as local
from harness.judge.cost import Cost
from harness.judge.ulp import rms

FACTOR = 1.5
FORMULA = "RMS(production - oracle) <= max(f RMS(reference - oracle), 2 kappa RMS(h) / sqrt(3))"
MANY, SPREAD = 32, 1.5


def factor(tokens: int) -> float:
    """f for a tensor of this many tokens (or entries)."""
    return FACTOR * math.exp(max(0.0, SPREAD * (max(1, tokens) ** -0.5 - MANY**-0.5)))


def free(error: Tensor, reference_error: Tensor, oracle: Tensor, dtype: str, tokens: int = MANY) -> Cost:
    """Errors against the oracle's own free run, at finite elements only."""
    least = local.floor(oracle, dtype)
    mine, theirs = rms(error), rms(reference_error)
    allowed = max(factor(tokens) * theirs, local.FACTOR * least)
    return Cost(mine, theirs, least, allowed, mine / allowed if error.numel() >= local.FEWEST else None)
