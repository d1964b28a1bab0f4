"""Rule 5, *picks*: a choice of the k best is a set, judged against the oracle's scores within production's own bound.

Let s be the oracle's score of every candidate and B its bound (rule 3, with production's plan). Production prefers p to
o when its own scores say s'(p) >= s'(o). As |s' - s| <= B, that is possible for a correct production only if

    s(o) - s(p) <= B(o) + B(p)

for every p that it picked and the oracle did not, and every o that the oracle picked and it did not. The condition
splits, so one comparison a row decides: max over missing o of (s - B) <= min over extra p of (s + B). A pick inside the
bound is a *flip*, counted and shown; one outside is a FAIL, as is a duplicate, an id out of range, an ineligible
candidate (score -inf) or a wrong number of picks: k, or all eligible ones where there are fewer (the rest is -1).

Production is judged against the *oracle's* picks: the reference's own score bound is so wide that judging against its
picks would leave up to 65 % of an indexer's choices undecided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.judge.margin import bound
from harness.types import Judged

FORMULA = "s(missing) - s(extra) <= B(missing) + B(extra), B = h(|s| + d) + d of production's scores"


@dataclass(frozen=True)
class Picks:
    """Counts over all rows and what a reader wants to see of them."""

    rows: int
    flips: int  # differing picks inside the bound
    outside: int  # picks (or rows) that no rounding explains
    worst: float | None  # largest gap over its bound; None where every set is equal
    first: tuple[int, ...] | None  # leading coordinates of the first row outside
    reason: str | None
    examples: tuple[tuple[int, float, float], ...]  # (row, gap, bound) of differing rows, worst first
    usable: bool  # ids are in range and distinct, so that weights can be computed for them


def picks(chosen: Tensor, judged: Judged, dtype: str = "fp32") -> Picks:
    """Judge ``chosen`` [..., K] against scores [..., C]."""
    lead = tuple(chosen.shape[:-1])
    candidates = judged.value.shape[-1]
    count_rows = math.prod(lead)
    p = chosen.reshape(count_rows, chosen.shape[-1]).to(torch.int64)
    score = judged.value.reshape(count_rows, candidates)
    eligible = score > -math.inf
    b = torch.where(eligible, bound(judged, dtype).reshape(count_rows, candidates), 0.0)

    stray = (p < -1) | (p >= candidates)
    valid = (p >= 0) & ~stray
    count = torch.zeros(p.shape[0], candidates, dtype=torch.int64)
    if candidates:
        count.scatter_add_(1, torch.where(valid, p, 0), valid.to(torch.int64))
    mine = count > 0
    need = eligible.sum(1).clamp_max(p.shape[1])
    best = torch.zeros_like(mine)
    if candidates:
        best.scatter_(1, score.topk(min(p.shape[1], candidates), dim=1).indices, True)
    best &= eligible
    extra, missing = mine & ~best, best & ~mine

    low = torch.where(missing, score - b, -math.inf)
    high = torch.where(extra, score + b, math.inf)
    lowest, highest = _reduce(low, math.inf, largest=True), _reduce(high, -math.inf, largest=False)
    wrong = {
        "an id out of range": stray.any(1),
        "the same id twice": (count > 1).any(1),
        "an ineligible candidate": (mine & ~eligible).any(1),
        "a wrong number of picks": valid.sum(1) != need,
        "a pick that no rounding explains": lowest > highest,
    }
    outside = torch.stack(list(wrong.values())).any(0)
    differs = extra.any(1) & missing.any(1) & ~(mine & ~eligible).any(1)
    examples = _examples(differs, score, b, extra, missing)
    bad = int(outside.sum())
    at = int(outside.to(torch.uint8).argmax()) if bad else None
    return Picks(
        rows=p.shape[0],
        flips=int((extra & ~outside[:, None]).sum()),
        outside=bad,
        worst=max((gap / max(room, math.ulp(0.0)) for _, gap, room in examples), default=None),
        first=None if at is None else tuple(int(i) for i in torch.unravel_index(torch.tensor(at), lead)),
        reason=None if at is None else next(text for text, rows in wrong.items() if rows[at]),
        examples=examples,
        usable=not bool(stray.any() or (count > 1).any()),
    )


def _reduce(x: Tensor, empty: float, *, largest: bool) -> Tensor:
    """Row-wise max or min that also works without candidates."""
    if not x.shape[1]:
        return torch.full((x.shape[0],), -empty, dtype=x.dtype)
    return x.amax(1) if largest else x.amin(1)


def _examples(
    differs: Tensor, score: Tensor, b: Tensor, extra: Tensor, missing: Tensor
) -> tuple[tuple[int, float, float], ...]:
    """(row, gap, bound) of the worst pair of each differing row, at most 64, largest gap over bound first."""
    found = []
    for row in differs.nonzero().flatten().tolist():
        o, p = missing[row].nonzero().flatten(), extra[row].nonzero().flatten()
        gap = score[row, o][:, None] - score[row, p][None, :]
        room = b[row, o][:, None] + b[row, p][None, :]
        at = int((gap / room.clamp_min(torch.finfo(torch.float64).tiny)).argmax())
        found.append((row, float(gap.flatten()[at]), float(room.flatten()[at])))
    found.sort(key=lambda e: -e[1] / max(e[2], math.ulp(0.0)))
    return tuple(found[:64])
