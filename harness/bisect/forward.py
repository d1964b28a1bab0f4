"""One free forward with some stages in production and the others swapped for the reference, judged at the logits.

A swapped stage is the reference's callables on what production computed upstream (``--bypass STAGE=reference``). The
reference's wires and the oracle's logits are computed once. What a stage returned is kept by where its inputs came
from, so that a forward runs only what lies below its first difference from earlier ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness import free, replay, select
from harness.case import Declared
from harness.execute import Way, Wires, run_trusted, upcast, widen
from harness.judge import rows, valid
from harness.records import Verdict
from harness.types import Output, Stage

KEPT_BYTES = 1 << 30  # of stages' outputs


@dataclass(frozen=True)
class Unit:
    """A stage of a forward: production's way to compute it and the reference's stages that stand for it."""

    name: str
    layer: int | None
    way: Way | None  # None: production cannot compute it, and ``fault`` says why
    reference: tuple[Stage, ...]
    reads: tuple[str, ...]  # wires, on either side
    wires: Mapping[str, str]  # what it must leave behind, by wire: the dtype in which production exchanges it
    fault: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of the logits."""

    verdict: Verdict
    ratio: float | None  # RMS error over the allowed one
    error: float | None
    allowed: float | None
    reason: str | None

    @property
    def breaks(self) -> bool:
        """Whether the logits are wrong."""
        return self.verdict == Verdict.FAIL

    @property
    def fine(self) -> bool:
        """Whether they are right; neither is what cannot be judged."""
        return self.verdict == Verdict.PASS


Kept = dict[str, Tensor | str]  # by wire: a tensor, or why there is none


@dataclass
class Forward:
    """Judges sets of production stages; every set is run once."""

    units: Sequence[Unit]
    logits: Output  # as the side that makes them declares it
    reference: Wires
    truth: Tensor  # the oracle's logits
    dtypes: Mapping[str, str]  # the reference's, by wire
    declared: Sequence[Declared] = ()
    watch: Callable[[frozenset[str], Outcome], None] = lambda production, outcome: None
    forwards: int = field(init=False, default=0)
    stages_run: int = field(init=False, default=0)
    _known: dict[frozenset[str], Outcome] = field(init=False, default_factory=dict)
    _kept: OrderedDict[tuple[object, ...], Kept] = field(init=False, default_factory=OrderedDict)
    _bytes: int = field(init=False, default=0)
    _origins: dict[tuple[object, ...], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._read = {wire for unit in self.units for wire in unit.reads} | {self.logits.wire}

    def outcome(self, production: Iterable[str]) -> Outcome:
        """The logits with these stages in production and all others swapped."""
        chosen = frozenset(production)
        if chosen not in self._known:
            self._known[chosen] = self._run(chosen)
            self.forwards += 1
            self.watch(chosen, self._known[chosen])
        return self._known[chosen]

    @torch.no_grad()
    def _run(self, chosen: frozenset[str]) -> Outcome:
        wires: Kept = {}
        origins: dict[str, int] = {}  # wire -> which computation it comes from
        last = {wire: i for i, unit in enumerate(self.units) for wire in unit.reads}
        for i, unit in enumerate(self.units):
            swapped = unit.name not in chosen
            key = (unit.name, swapped, *(origins.get(w, w) for w in unit.reads))
            made = self._kept.get(key)
            if made is None:
                made = self._make(unit, swapped, wires)
                self._keep(key, made)
            else:
                self._kept.move_to_end(key)
            origin = self._origins.setdefault(key, len(self._origins))
            wires.update(made)
            origins.update(dict.fromkeys(made, origin))
            for wire in [w for w in wires if last.get(w, -1) <= i and w != self.logits.wire]:
                del wires[wire]
        return self._judge(wires[self.logits.wire])

    def _make(self, unit: Unit, swapped: bool, wires: Kept) -> Kept:
        reads = unit.reads if swapped or unit.way is None else tuple(unit.way.stage.inputs.values())
        if broken := next((t for w in reads if isinstance(t := wires.get(w), str)), None):
            return dict.fromkeys(unit.wires, broken)
        self.stages_run += 1
        inputs = {w: t.clone() for w in reads if isinstance(t := wires.get(w), Tensor)}
        if swapped:
            made = swap(unit, inputs | self._entering(reads, inputs, self.dtypes), self.dtypes, self.reference)
            return {w: t for w, t in made.items() if w in self._read}
        if unit.way is None:
            return dict.fromkeys(unit.wires, f"{unit.name}: {unit.fault}")
        inputs |= self._entering(reads, inputs, self.exchanged)
        outcome, _ = free.produced(unit.way, inputs, self.reference)
        if outcome.error:
            return dict.fromkeys(unit.wires, f"{unit.name} {outcome.error}")
        found: Kept = {}
        for output in unit.way.stage.outputs:
            if output.wire not in self.reference or output.wire not in self._read:
                continue
            tensor = outcome.outputs.get(output.name)
            reason = valid.unusable(tensor, output, tuple(self.reference[output.wire].shape))
            found[output.wire] = f"{unit.name}.{output.name}: {reason}" if reason else tensor  # type: ignore[assignment]
        return found

    @property
    def exchanged(self) -> dict[str, str]:
        """The dtypes in which production's stages exchange wires."""
        return {wire: dtype for unit in self.units for wire, dtype in unit.wires.items()}

    def _entering(self, reads: Iterable[str], there: Wires, dtypes: Mapping[str, str]) -> Wires:
        """Copies of the reference's wires that no unit makes."""
        absent = [w for w in reads if w not in there and w in self.reference]
        return {w: widen(self.reference[w], dtypes.get(w, "")).clone() for w in absent}

    def _keep(self, key: tuple[object, ...], made: Kept) -> None:
        self._kept[key] = made
        self._bytes += _size(made)
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])

    def _judge(self, produced: Tensor | str) -> Outcome:
        """The free row of the logits (rule 6)."""
        if isinstance(produced, str):
            return Outcome(Verdict.FAIL, None, None, None, produced)
        stage = self.logits.wire.rpartition(".")[0]
        declared = next((d for d in self.declared if select.matches(d.stage, stage)), None)
        allowed = (declared.reason, declared.floor) if declared else None
        found = rows.free(
            rows.Pair(self.logits, produced, self.reference[self.logits.wire], declared=allowed), self.truth
        )
        limit = found.threshold.get("allowed RMS")
        return Outcome(
            found.verdict, found.cost, found.rms_error, limit if isinstance(limit, float) else None, found.reason
        )


def swap(unit: Unit, wires: Wires, dtypes: Mapping[str, str], reference: Wires) -> Wires:
    """The reference's stages of a unit on ``wires``, in the reference's dtypes and with its picks."""
    local = {w: widen(t, dtypes.get(w, "")) for w, t in wires.items()}
    for stage in unit.reference:
        local.update(run_trusted(stage, local, replay.of(stage, reference), False))
    return {w: widen(local[w], dtype).clone() for w, dtype in unit.wires.items() if w in local}


def truth(units: Sequence[Unit], oracle: Mapping[str, Stage], reference: Wires, wire: str) -> Tensor:
    """One wire of the oracle's run over all units, from the reference's wires that enter the first of them."""
    made = {o.wire for unit in units for stage in unit.reference for o in stage.outputs}
    wires: Wires = {}
    for unit in units:
        for stage in (oracle[s.name] for s in unit.reference):
            for w in stage.inputs.values():
                if w not in wires and w not in made and w in reference:
                    wires[w] = upcast(reference[w])
            wires.update(run_trusted(stage, wires, replay.of(stage, reference), False))
    return wires[wire]


def _size(made: Kept) -> int:
    return sum(t.numel() * t.element_size() for t in made.values() if isinstance(t, Tensor))
