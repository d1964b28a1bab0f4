"""What every row of a run needs: both sides by name, the plan, the reference's wires, and how records are made."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from harness import select
from harness.case import Declared
from harness.dump import Keeper
from harness.execute import Way, Wires
from harness.judge import entropy as entropy_rule
from harness.judge.rows import Pair, combine
from harness.plan import Plan, Step
from harness.records import Comparison, Skip, TensorComparison, Verdict
from harness.types import Mode, Oracle, Output, Stage

#: names of what the last axis of picks counts (docs/stages.md)
LEGEND = {"k": "expert", "K": "entry"}


@dataclass
class Bench:
    """Both sides laid out for comparison."""

    plan: Plan
    reference: Mapping[str, Stage]
    oracle: Oracle
    oracle_stages: Mapping[str, Stage]
    production: Mapping[str, Stage]
    ways: Mapping[str, Way]
    wires: Wires  # the reference's, by wire
    command: str  # what reproduces the run, without layer, stage and mode
    declared: Sequence[Declared] = ()
    keeper: Keeper | None = None  # what --dump may write
    diagnose: str = "none"  # first, all or none: which local FAILs are explained
    diagnosed: int = field(init=False, default=0)  # local FAILs so far
    outputs: Mapping[str, Output] = field(init=False)  # the reference's, by wire
    promised: Mapping[str, Output] = field(init=False)  # production's, by wire

    def __post_init__(self) -> None:
        self.outputs = {o.wire: o for s in self.reference.values() for o in s.outputs}
        self.promised = {o.wire: o for s in self.production.values() for o in s.outputs}

    def dtype_for_production(self, wire: str) -> str:
        """The dtype in which production's stages exchange a wire, empty where production does not say."""
        return self.promised[wire].dtype if wire in self.promised else ""

    def pair(self, step: Step, output: Output, produced: object, reference: Mapping[str, Tensor]) -> Pair:
        """One output of a step as both sides returned it; ``reference`` is by wire."""
        declared = next(
            (
                (d.reason, d.floor)
                for d in self.declared
                if select.matches(d.stage, step.stage) and d.output in ("*", output.name)
            ),
            None,
        )
        stage = self.production[step.stage]
        groups = self._groups(stage, output)
        return Pair(output, produced, reference.get(output.wire), groups, stage.plan, declared)

    def _groups(self, stage: Stage, output: Output) -> dict[str, Tensor]:
        """Ids of the leading axes of an output: the picks that the stage reads, where the axes are the same."""
        found = {}
        for wire in stage.inputs.values():
            o, ids = self.outputs.get(wire), self.wires.get(wire)
            if o is None or ids is None or ids.is_floating_point() or o.role not in ("picks", "exact"):
                continue
            if tuple(output.dims[: len(o.dims)]) == tuple(o.dims) and o.dims[-1] in LEGEND:
                found[LEGEND[o.dims[-1]]] = ids
        return found

    def reproduce(self, step: Step, mode: str) -> str:
        """The command that repeats one row."""
        layer = "all" if step.layer is None else str(step.layer)
        return f"{self.command} --layer {layer} --stage {shlex.quote(step.stage)} --mode {mode}"

    def comparison(
        self,
        step: Step,
        mode: Mode,
        tensors: Sequence[TensorComparison],
        produced: Mapping[str, object],
        seconds: float,
        note: str | None = None,
    ) -> Comparison:
        """The row of a step from its tensors."""
        verdict, deciding = combine(tensors)
        reason = None if deciding is None or (verdict == Verdict.PASS and not deciding.reason) else deciding.reason
        usable = {n: t for n, t in produced.items() if isinstance(t, Tensor)}
        theirs = self._named(step)
        return self._row(
            step,
            mode,
            verdict,
            "; ".join(filter(None, [reason, note])) or None,
            deciding,
            tuple(tensors),
            seconds,
            entropy=entropy_rule.attention(usable, theirs, theirs.get("visible")),
            stream_rms=entropy_rule.stream_rms({"production": usable["streams"], "reference": theirs.get("streams")})
            if "streams" in usable
            else {},
        )

    def verdict(self, step: Step, mode: Mode, verdict: Verdict, reason: str, seconds: float = 0.0) -> Comparison:
        """A row without tensors: the stage was never produced, raised, or could not be judged."""
        return self._row(step, mode, verdict, reason, None, (), seconds)

    def skip(self, step: Step, mode: Mode, reason: str) -> Skip:
        """A row that was not compared."""
        return Skip(step.stage, step.layer, mode, reason)

    def _named(self, step: Step) -> dict[str, Tensor]:
        stage = self.production.get(step.stage)
        return {o.name: self.wires[o.wire] for o in stage.outputs if o.wire in self.wires} if stage else {}

    def _row(
        self,
        step: Step,
        mode: Mode,
        verdict: Verdict,
        reason: str | None,
        deciding: TensorComparison | None,
        tensors: tuple[TensorComparison, ...],
        seconds: float,
        **extra: object,
    ) -> Comparison:
        stage = self.production.get(step.stage)
        return Comparison(
            stage=step.stage,
            layer=step.layer,
            mode=mode,
            verdict=verdict,
            reason=reason,
            tensor=deciding.tensor if deciding else None,
            margin=deciding.margin if deciding else None,
            cost=deciding.cost if deciding else None,
            worst=deciding.worst[0] if deciding and deciding.worst else None,
            covers=step.covers,
            component=stage.component if stage else "none",
            plan=dict(stage.plan) if stage else {},
            bypass=step.bypass,
            replaced=step.replace,
            tensors=tensors,
            seconds=seconds,
            reproduce=self.reproduce(step, mode),
            **extra,  # type: ignore[arg-type]
        )
