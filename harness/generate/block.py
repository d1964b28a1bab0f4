"""The oracle's word on steps: a block of them at once, in float64, with the reference's picks.

In exact arithmetic the cut of a text into calls means nothing, so the oracle takes many tokens in one call; its own
caches carry it from block to block.

A step fails when its logits are off by more than

    RMS(production - oracle) <= max(STEP RMS(reference - oracle), 2 kappa RMS(h) / sqrt(3))

One token is one draw for a whole tensor: its elements share the roundings of a few coefficients in front of them. Token
by token, the ratio of the two errors spreads log-normally around production's usual 0.6, with sigma 0.35 at the logits
and 0.6 in the widest stage (bundled checkpoint, 331 tokens, 130 wires; the largest of 43,000 ratios was 4.2). STEP is
1.5 exp(1.24): 6 sigma of the logits and 3.6 of the widest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from harness.generate.pair import Pair, Seen
from harness.history import Walk, joined_picks
from harness.judge import cost
from harness.judge.figures import number
from harness.judge.ulp import rms
from harness.records import Step, Verdict

STEPS = 64
STEP = 5.2


class Block:
    """Judges the steps of a pair, in order."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.truth = Walk(pair.oracle, direct=pair.direct)
        self.judged = 0

    def full(self, waiting: Sequence[Seen]) -> bool:
        """Whether it is time to ask."""
        return len(waiting) >= STEPS

    def judge(self, waiting: Sequence[Seen]) -> list[Step]:
        """Records of all waiting steps."""
        assert self.pair.walk is not None
        picks = self.pair.walk.picks[self.judged : self.judged + len(waiting)]
        self.judged += len(waiting)
        ids = torch.tensor([[token for seen in waiting for token in seen.ids]])
        logits = self.truth.call(ids, joined_picks(picks))[self.pair.logits_wire][0]
        ends = [end - 1 for end in accumulate(len(seen.ids) for seen in waiting)]
        self.truth.picks.clear()
        return [self._settled(seen, logits[end]) for seen, end in zip(waiting, ends, strict=True)]

    def _settled(self, seen: Seen, oracle: Tensor) -> Step:
        mine, theirs = seen.logits_mine, seen.logits_theirs
        assert mine is not None
        assert theirs is not None
        gap = None
        if seen.mine is not None and seen.theirs is not None and seen.mine != seen.theirs:
            gap = number(float(oracle[seen.theirs] - oracle[seen.mine]))
        if not bool(torch.isfinite(mine).all()):
            return seen.record(Verdict.FAIL, "production's logits are not finite", {"gap": gap})
        # Promised dtypes differ; the floor is that of production's own.
        dtype = next(o.dtype for s in self.pair.production.stages for o in s.outputs if o.wire == self.pair.logits_wire)
        error, reference = rms(mine.double() - oracle), rms(theirs.double() - oracle)
        allowed = max(STEP * reference, cost.FACTOR * cost.floor(oracle, dtype))
        figures = {
            "error": number(error),
            "error_reference": number(reference),
            "allowed": number(allowed),
            "gap": gap,
        }
        if seen.flips.outside is not None:
            reason = f"{seen.flips.outside} chose as no rounding explains"
            return seen.record(Verdict.FAIL, reason, figures)
        if not error <= allowed:
            reason = f"logits: RMS error {error:.3g}, {error / allowed:.3g} x the allowed {allowed:.3g}"
            return seen.record(Verdict.FAIL, reason, figures)
        if gap is None:
            return seen.record(Verdict.PASS, None, figures)
        reason = f"another token, {abs(gap):.3g} apart in the oracle: inside the reference's own noise"
        return seen.record(Verdict.PASS, reason, figures)
