"""What a call continues from: both sides and the oracle, taken through the calls before the compared one.

Local rows give production the reference's caches, so the reference's history enters the case. Free rows give every side
its own: production follows the same calls in a session with its real caches, the oracle in float64. Picks are the
reference's everywhere. In exact arithmetic the cut into calls means nothing, so the oracle takes the past in one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness import replay
from harness.execute import Way, Wires, run_production, run_trusted
from harness.types import Check, Compute, InvalidRun, Stage, StepProduction, StepReference, Steps, UsageError, one_line


def stepped(side: object, which: str) -> Steps:
    """The side as stages of one call; one that has no such form cannot be followed through several."""
    steps = getattr(side, "steps", None)
    if not callable(steps):
        raise UsageError(
            f"{which}: expected a side with steps() for --phase or generate, came one of whole prompts only"
        )
    made: Steps = steps()
    return made


@dataclass
class Walk:
    """A side run stage by stage through one call after the other; what it keeps travels along."""

    side: Steps
    names: Collection[str] | None = None  # stages to run, all by default
    direct: Collection[str] = ()
    batch: int = 1
    length: int = 0
    state: Wires = field(default_factory=dict)
    picks: list[Wires] = field(default_factory=list)  # by call, by wire

    def __post_init__(self) -> None:
        self.state = self.side.empty(self.batch)
        if self.names is not None:
            made = {o.wire for s in self.side.stages if s.name in self.names for o in s.outputs}
            self.state = {into: t for into, t in self.state.items() if self.side.state[into] in made}

    def inputs(self, ids: Tensor) -> Wires:
        """The case of the next call, by bare name; caches among it."""
        count = ids.shape[1]
        positions = torch.arange(self.length, self.length + count, device=ids.device).expand_as(ids).contiguous()
        lengths = torch.full((ids.shape[0],), self.length + count, dtype=torch.int64, device=ids.device)
        caches = {wire.removeprefix("case."): tensor for wire, tensor in self.state.items()}
        return {"input_ids": ids, "positions": positions, "lengths": lengths, **caches}

    def call(self, ids: Tensor, given: Mapping[str, Tensor] | None = None) -> Wires:
        """Run a call of ids ``[B, S]`` and return every wire. ``given`` picks are replayed."""
        wires: Wires = {f"case.{name}": tensor for name, tensor in self.inputs(ids).items()}
        for stage in self.side.stages:
            if self.names is None or stage.name in self.names:
                direct = stage.name in self.direct
                wires.update(run_trusted(stage, wires, None if direct else replay.of(stage, given or {}), direct))
        self.state = {into: wires[self.side.state[into]] for into in self.state}
        self.length += ids.shape[1]
        found = [o.wire for s in self.side.stages for o in s.outputs if o.role == "picks" and o.wire in wires]
        self.picks.append({wire: wires[wire] for wire in found})
        return wires


def joined_picks(calls: Sequence[Mapping[str, Tensor]]) -> Wires:
    """The picks of several calls as those of one: tokens behind each other, short rows filled with -1 (absent)."""
    made: Wires = {}
    for wire in calls[0] if calls else ():
        parts = [call[wire] for call in calls]
        width = max(part.shape[-1] for part in parts)
        padded = [torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=-1) for part in parts]
        made[wire] = torch.cat(padded, dim=1)
    return made


def prefix(stages: Sequence[Stage], composed: Collection[str]) -> set[str]:
    """Composed stages and the rest of the last layer among them: caches are kept by whole layers."""
    last = max((s.layer for s in stages if s.name in composed and s.layer is not None), default=None)
    end = max(i for i, s in enumerate(stages) if s.name in composed or (last is not None and s.layer == last))
    return {s.name for s in stages[: end + 1]}


@dataclass
class Start:
    """Where the compared call begins, for each side."""

    inputs: Wires  # the reference's case, by bare name
    calls: list[Tensor]  # ids of the calls before
    picks: list[Wires]  # the reference's, of those calls
    mine: Wires = field(default_factory=dict)  # production's own caches, by wire
    truth: Wires = field(default_factory=dict)  # the oracle's
    failure: str | None = None  # why production has no caches of its own


def cut(ids: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Ids ``[B, S]`` by calls."""
    yield from torch.split(ids, list(sizes), dim=1)


def begin(
    reference: Steps, names: Collection[str], ids: Tensor, sizes: Sequence[int], direct: Collection[str]
) -> Start:
    """Take the reference through all calls but the last; ids ``[B, S]``."""
    walk = Walk(reference, prefix(reference.stages, names), direct, ids.shape[0])
    *calls, last = cut(ids, sizes)
    for part in calls:
        walk.call(part)
    return Start(walk.inputs(last), calls, walk.picks)


def follow(start: Start, oracle: Steps, production: Steps, ways: Mapping[str, Way], direct: Collection[str]) -> None:
    """Take the oracle and production through the same calls, with the reference's picks."""
    if not start.calls:
        return
    batch = start.calls[0].shape[0]
    made = {wire.rpartition(".")[0] for wire in start.picks[0]}
    known = {f"case.{name}" for name in start.inputs if ".cache." in name}
    whole = prefix(oracle.stages, {oracle.state[wire].rpartition(".")[0] for wire in known} | made)
    walk = Walk(oracle, whole, direct, batch)
    walk.call(torch.cat(start.calls, dim=1), joined_picks(start.picks))
    start.truth = walk.state
    try:
        if isinstance(production, StepProduction):
            tokens = sum(part.shape[1] for part in start.calls)
            session = production.session(rows=batch, tokens=tokens, ways={n: computed(w) for n, w in ways.items()})
            for part, picks in zip(start.calls, start.picks, strict=True):
                session.feed(part, replay=picks)
            start.mine = session.state()
        else:
            own = Walk(production, None, direct, batch)
            for part, picks in zip(start.calls, start.picks, strict=True):
                own.call(part, picks)
            start.mine = own.state
    except UsageError:
        raise
    except Exception as error:  # whatever production raises is the finding
        start.failure = f"the calls before this one raised {one_line(error)}"


def computed(way: Way) -> Compute:
    """A way as a session calls it: same arithmetic, picks and errors as in a row."""

    def compute(stage: Stage, inputs: dict[str, Tensor], picks: Tensor | None) -> Mapping[str, Tensor]:
        wires = {stage.inputs[name]: tensor for name, tensor in inputs.items()}
        chosen = next((o.name for o in stage.outputs if o.role == "picks"), None)
        given = {chosen: picks} if picks is not None and chosen is not None and not way.direct else None
        outcome = run_production(way, wires, given)
        if outcome.error:
            raise InvalidRun(f"{stage.name} {outcome.error}")
        outputs = outcome.outputs
        if given and way.function is not None:
            own = Way(way.stage)
            outputs, _ = replay.align(stage, outputs, given, lambda: run_production(own, wires, given).outputs)
        return {name: t for name, t in outputs.items() if isinstance(t, Tensor)}

    return compute


def plain(ways: Mapping[str, Way]) -> dict[str, Way]:
    """The ways that are not simply production's own."""
    return {name: way for name, way in ways.items() if way.direct or way.reference or way.function is not None}


def certified(reference: StepReference, start: Start) -> list[Check]:
    """Whether the untouched model keeps the same after the calls before the compared one."""
    if not start.calls:
        return []
    state = {f"case.{name}": t for name, t in start.inputs.items() if ".cache." in name}
    return list(reference.certify_history(start.calls, state))
