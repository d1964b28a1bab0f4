"""Do both sides mean the same by a stage? What they say differently is a fault that needs no tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.types import Output, Stage


@dataclass(frozen=True)
class Graph:
    """The reference's stages, indexed."""

    stages: Mapping[str, Stage]
    order: Mapping[str, int]
    outputs: Mapping[str, Output]  # by wire
    readers: Mapping[str, frozenset[str]]  # wire -> names of the stages that read it

    @classmethod
    def of(cls, stages: Sequence[Stage]) -> Graph:
        """Index a list of stages."""
        readers: dict[str, set[str]] = {}
        for stage in stages:
            for wire in stage.inputs.values():
                readers.setdefault(wire, set()).add(stage.name)
        return cls(
            {s.name: s for s in stages},
            {s.name: i for i, s in enumerate(stages)},
            {o.wire: o for s in stages for o in s.outputs},
            {wire: frozenset(names) for wire, names in readers.items()},
        )

    def covered(self, stage: Stage) -> tuple[str, ...]:
        """What a production stage covers, in this order; names that do not exist are left out."""
        return tuple(sorted((c for c in stage.covers if c in self.stages), key=lambda c: self.order[c]))

    def boundary(self, covers: Iterable[str]) -> list[str]:
        """Wires that a stage which covers these must return: all but those that only the covered stages read."""
        inside = set(covers)
        wires = [o.wire for c in covers for o in self.stages[c].outputs]
        return wires if len(inside) == 1 else [w for w in wires if not (self.readers.get(w) or {""}) <= inside]


def disagreement(stage: Stage, graph: Graph) -> str | None:
    """What the two sides say differently about a production stage, or None."""
    if unknown := [c for c in stage.covers if c not in graph.stages]:
        return f"covers {unknown[0]!r}, which the reference does not have"
    covers = graph.covered(stage)
    if not covers:
        return "covers no reference stage"
    promised = {o.wire: o for o in stage.outputs}
    if missing := [w for w in graph.boundary(covers) if w not in promised]:
        return f"does not return {missing[0]!r}, which the reference does"
    for wire, mine in promised.items():
        theirs = graph.outputs.get(wire)
        if theirs is not None and tuple(mine.dims) != tuple(theirs.dims):
            return f"{wire} has dims [{','.join(mine.dims)}], the reference has [{','.join(theirs.dims)}]"
        if theirs is not None and mine.role != theirs.role:
            return f"{wire} has role {mine.role}, the reference has {theirs.role}"
    strange = [w for w in stage.inputs.values() if w not in graph.outputs and not w.startswith("case.")]
    return f"reads {strange[0]!r}, which no reference stage writes" if strange else None
