"""The search: breaking sets, the smallest set whose swap restores the logits, and the view from the other side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from harness.bisect import minimal
from harness.bisect.forward import Forward, Outcome
from harness.types import InvalidRun

MOST_SETS = 8  # breaking sets that are looked for
MOST_PROBES = 16  # replaced stages of a clean production that are tried alone


@dataclass(frozen=True)
class Found:
    """What a bisection found. Stages are in execution order."""

    production: Outcome  # all of production
    reference: Outcome  # every stage swapped
    sets: tuple[minimal.Names, ...] = ()  # each breaks, with all other stages the reference's, and no part of it does
    swapped: minimal.Names = ()  # swapping these restores the logits, swapping fewer does not
    restored: Outcome | None = None  # the logits then; None where the search stopped early
    alone: dict[str, Outcome] = field(default_factory=dict)  # stages of the sets, alone in production
    cancels: bool = False  # the first of ``swapped`` breaks alone, but not with the others

    @property
    def line(self) -> str:
        """The console's last line."""
        if not self.swapped:
            return f"BISECT: nothing to bisect, the logits are right ({figure(self.production)})"
        names = " + ".join(self.swapped)
        if self.cancels:
            return f"BISECT: {names} (the first alone breaks the logits, together they cancel)"
        if self.restored is None:
            return f"BISECT: {names} and more (stopped after {len(self.sets)} breaking sets)"
        together = [s for s in self.sets if len(s) > 1]
        if not together:
            return f"BISECT: {names} ({'each breaks' if len(self.sets) > 1 else 'breaks'} the logits alone)"
        first = " + ".join(together[0])
        return f"BISECT: {first} (only together; swapping {names} restores the logits)"


def find(forward: Forward, layers: Sequence[tuple[str, int | None]], replaced: Sequence[str] = ()) -> Found:
    """Search among candidates, given with their layers. InvalidRun where nothing can be concluded."""
    names = [name for name, _ in layers]
    groups = [tuple(n for n, _ in group) for _, group in groupby(layers, key=lambda pair: pair[1])]

    def without(out: Iterable[str]) -> list[str]:
        return [n for n in names if n not in set(out)]

    production, reference = forward.outcome(names), forward.outcome(())
    if reference.breaks:
        raise InvalidRun(f"with every stage swapped for the reference the logits are not right: {figure(reference)}")
    for side, outcome in (("the reference", reference), ("production", production)):
        if not (outcome.fine or outcome.breaks):
            raise InvalidRun(f"the logits of {side} cannot be judged: {figure(outcome)}")
    if production.fine:
        return _masked(forward, production, reference, groups, replaced)

    sets: list[minimal.Names] = []
    out: minimal.Names = ()
    while not (now := forward.outcome(without(out))).fine and len(sets) < MOST_SETS:
        if not now.breaks:
            raise InvalidRun(f"without {' + '.join(out)} the logits cannot be judged: {figure(now)}")
        rest = [[n for n in group if n not in out] for group in groups]
        sets.append(minimal.minimal(lambda s: forward.outcome(s).breaks, rest))
        out = tuple(sorted(minimal.hitting(sets), key=names.index))
    if now.fine and (fewer := minimal.smaller(lambda s: forward.outcome(without(s)).fine, out)):
        out = fewer  # stages that hide each other's errors
    mentioned = sorted({n for s in sets for n in s} | set(out), key=names.index)
    alone = {n: forward.outcome((n,)) for n in mentioned}
    restored = forward.outcome(without(out)) if now.fine else None
    return Found(production, reference, tuple(sets), out, restored, alone)


def _masked(
    forward: Forward,
    production: Outcome,
    reference: Outcome,
    groups: Sequence[Sequence[str]],
    replaced: Sequence[str],
) -> Found:
    """Right logits: does a replaced stage break them alone, and which others make up for it?"""
    if len(replaced) < 2:
        return Found(production, reference)
    alone = {n: forward.outcome((n,)) for n in replaced[:MOST_PROBES]}
    first = next((n for n, outcome in alone.items() if outcome.breaks), None)
    if first is None:
        return Found(production, reference, alone=alone)
    rest = [[n for n in group if n != first] for group in groups]
    partners = minimal.minimal(lambda s: forward.outcome((first, *s)).fine, rest)
    return Found(production, reference, (), (first, *partners), production, alone, cancels=True)


def figure(outcome: Outcome) -> str:
    """An outcome in a few words."""
    if outcome.ratio is None or not (outcome.fine or outcome.breaks):
        return f"{outcome.verdict}: {outcome.reason}"
    return f"{outcome.ratio:.3g} x the allowed error"
