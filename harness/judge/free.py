"""Rule 6, *free rows*: on its own inputs all the way, production is about as far from the oracle as the reference.

    RMS(production - oracle) <= max(F RMS(reference - oracle), 2 kappa RMS(h) / sqrt(3)),  F = max(1.5, f(n))

All three start from the same wires and use the reference's picks: discrete choices amplify rounding (own picks: correct
runs of a small model differ by 17 % in the logits, replayed: by 3 %). An equally noisy production then sits at
1.00 +- 0.02 over a few hundred tokens, one that accumulates in fp32 at 0.63. The second term is what rule 4 grants a
stage on its own: early in a run the reference may be exact by luck. f(n) is the luck of few tokens (``sample``); where
it makes the bound so wide that zeros would pass, the row says nothing and is skipped.

Free rows show how an error grows; they cannot place a small one. They name the first fault only if no local row does.
"""

from __future__ import annotations

from torch import Tensor

from harness.judge import cost as local
from harness.judge.cost import Cost
from harness.judge.sample import luck
from harness.judge.ulp import rms

FACTOR = 1.5
FORMULA = "RMS(production - oracle) <= max(F RMS(reference - oracle), 2 kappa RMS(h) / sqrt(3)), F = max(1.5, f(n))"


def free(error: Tensor, reference_error: Tensor, oracle: Tensor, dtype: str, tokens: float) -> Cost:
    """Errors against the oracle's own free run, at finite elements only; ``tokens`` is n."""
    least = local.floor(oracle, dtype)
    mine, theirs = rms(error), rms(reference_error)
    factor = max(FACTOR, luck(tokens))
    allowed = max(factor * theirs, max(local.FACTOR, luck(tokens)) * least)
    return Cost(mine, theirs, least, allowed, mine / allowed if error.numel() >= local.FEWEST else None, tokens, factor)
