"""Smallest sets, from a test that says whether a set of stages breaks the logits. Knows no stage and no tensor.

``minimal`` is delta debugging (ddmin; Zeller & Hildebrandt 2002): it returns a set that breaks and stops breaking
whatever single element is taken out. ``hitting`` turns several such sets into the smallest set that meets them all.
Between them (the implicit hitting set scheme of MARCO-like solvers): every set that restores the logits must take
something out of every breaking set, so a smallest hitting set that restores them is a smallest set that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

Names = tuple[str, ...]
Test = Callable[[Iterable[str]], bool]


def minimal(breaks: Test, groups: Sequence[Sequence[str]]) -> Names:
    """A 1-minimal breaking set among the elements of ``groups``, coarse first; together they must break."""
    parts = [tuple(g) for g in groups if g]
    while True:
        if (alone := next((p for p in parts if len(parts) > 1 and breaks(p)), None)) is not None:
            parts = _halves(alone)
            continue
        if len(parts) > 2 and (rest := _without_one(breaks, parts)) is not None:
            parts = rest
            continue
        if all(len(p) == 1 for p in parts):
            return tuple(e for p in parts for e in p)
        parts = [half for p in parts for half in _halves(p)]


def _halves(part: Names) -> list[Names]:
    middle = (len(part) + 1) // 2
    return [half for half in (part[:middle], part[middle:]) if half]


def _without_one(breaks: Test, parts: Sequence[Names]) -> list[Names] | None:
    """The parts that are left when one is taken out and the others still break."""
    for i in range(len(parts)):
        rest = [*parts[:i], *parts[i + 1 :]]
        if breaks([e for p in rest for e in p]):
            return rest
    return None


def hitting(sets: Sequence[Names]) -> Names:
    """A smallest set that has an element of every one of ``sets``; the earliest elements where there is a choice."""
    for size in range(len(sets) + 1):
        if (found := _hit(list(sets), size)) is not None:
            return found
    raise AssertionError("an empty set cannot be hit")


def _hit(sets: list[Names], size: int) -> Names | None:
    if not sets:
        return ()
    if not size:
        return None
    for element in sets[0]:
        if (found := _hit([s for s in sets if element not in s], size - 1)) is not None:
            return (element, *found)
    return None


def smaller(restores: Test, names: Names, most: int = 4) -> Names | None:
    """A proper subset that restores, too, smallest first; above ``most`` elements only one is left out at a time."""
    sizes = range(1, len(names)) if len(names) <= most else (len(names) - 1,)
    return next((c for size in sizes for c in combinations(names, size) if restores(c)), None)
