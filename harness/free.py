"""Free rows: production on what it computed itself, beside a float64 run of the oracle from the same start.

Both start from the reference's wires that enter the first stage of the run, and both use the reference's picks. The
two runs go in lockstep with the local rows, and a wire is dropped as soon as no later stage reads it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness import replay
from harness.bench import Bench
from harness.dump import Row
from harness.execute import Outcome, Way, Wires, run_production, run_trusted, upcast, widen
from harness.judge import entropy, rows, valid
from harness.plan import Step
from harness.records import Comparison, Logits, Skip, Verdict


@dataclass
class FreeRun:
    """The state of a free run: both environments and what broke in production's."""

    bench: Bench
    mine: Wires = field(default_factory=dict)
    oracle: Wires = field(default_factory=dict)
    failure: str | None = None  # production broke before this call: nothing of it can be compared
    broken: dict[str, str] = field(default_factory=dict)  # wire -> why there is nothing usable on it
    seconds_oracle: float = 0.0
    _pending: list[str] = field(init=False)
    _inside: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self._pending = list(self.bench.plan.oracle)
        covered = [
            self.bench.reference[c] for s in self.bench.plan.steps for c in s.covers if c in self.bench.reference
        ]
        self._inside = {o.wire for stage in covered for o in stage.outputs}

    @torch.no_grad()
    def row(self, index: int) -> Iterator[Comparison | Skip | Logits]:
        """Advance both runs over one step and compare where the plan says so."""
        step = self.bench.plan.steps[index]
        self._advance_oracle(step)
        start = time.perf_counter()
        compared = "free" in step.compared
        if self.failure is not None and compared:
            yield self._dead(step, self.failure)
        elif step.fault:
            self._break(step, f"{step.stage}: {step.fault}")
            if compared:
                yield self.bench.verdict(step, "free", Verdict.FAIL, step.fault)
        elif step.free_run:
            yield from self._run(step, start, compared)
        self._release(index)

    def _dead(self, step: Step, reason: str) -> Comparison | Skip:
        """The first row says what broke, the others that they have no input."""
        if self.broken:
            return self.bench.skip(step, "free", f"no usable input: {reason}")
        self.broken[step.stage] = reason
        return self.bench.verdict(step, "free", Verdict.FAIL, reason)

    def _run(self, step: Step, start: float, compared: bool) -> Iterator[Comparison | Skip | Logits]:
        bench, stage = self.bench, self.bench.production[step.stage]
        if cause := next((self.broken[w] for w in stage.inputs.values() if w in self.broken), None):
            self._break(step, cause)
            if compared:
                yield bench.skip(step, "free", f"no usable input: {cause}")
            return
        self._enter(stage.inputs.values())
        outcome, note = produced(bench.ways[step.stage], self.mine, bench.wires)
        if outcome.error:
            self._break(step, f"{step.stage} {outcome.error}")
            if compared:
                record = bench.verdict(step, "free", Verdict.FAIL, outcome.error, time.perf_counter() - start)
                self._offer(record, {}, {})
                yield record
            return
        tensors = []
        for output in stage.outputs:
            if output.wire not in self.oracle or output.wire not in bench.wires:
                continue  # the direct-residual arithmetic returns less
            tensor, truth = outcome.outputs.get(output.name), self.oracle[output.wire]
            shape = tuple(bench.wires[output.wire].shape)
            if reason := valid.unusable(tensor, output, shape, None if output.role == "picks" else truth):
                self.broken[output.wire] = f"{step.stage}.{output.name}: {reason}"
            elif isinstance(tensor, Tensor):
                self.mine[output.wire] = tensor
            if compared:
                pair = bench.pair(step, output, tensor, bench.wires)
                tensors.append(rows.free(pair, truth, replayed=True))
        if compared:
            record = bench.comparison(step, "free", tensors, outcome.outputs, time.perf_counter() - start, note)
            self._offer(record, outcome.outputs, self.oracle)
            yield record
            yield from self._logits(step)

    def _offer(self, record: Comparison, produced: Mapping[str, object], oracle: Wires) -> None:
        """Show a row to --dump."""
        if self.bench.keeper:
            stage, wires = self.bench.production[record.stage], self.bench.wires
            mine = {w: self.mine[w] for w in stage.inputs.values() if w in self.mine}
            truth = {o.wire: oracle[o.wire] for o in stage.outputs if o.wire in oracle}
            self.bench.keeper.offer(Row(stage, record, mine, produced, wires, truth))

    def _advance_oracle(self, step: Step) -> None:
        """Run the oracle's stages up to the last one that this step stands for."""
        start = time.perf_counter()
        last = max((self._pending.index(c) for c in step.covers if c in self._pending), default=-1)
        for name in self._pending[: last + 1]:
            stage = self.bench.oracle_stages[name]
            for wire in stage.inputs.values():
                if wire not in self.oracle and wire not in self._inside and wire in self.bench.wires:
                    self.oracle[wire] = upcast(self.bench.wires[wire])
            direct = name in self.bench.plan.direct
            given = None if direct else replay.of(stage, self.bench.wires)
            self.oracle.update(run_trusted(stage, self.oracle, given, direct))
        del self._pending[: last + 1]
        self.seconds_oracle += time.perf_counter() - start

    def _enter(self, wires: Iterable[str]) -> None:
        """Take wires that enter the run from the reference, as copies in production's dtypes."""
        for wire in wires:
            if wire not in self.mine and wire not in self._inside and wire in self.bench.wires:
                tensor = self.bench.wires[wire]
                self.mine[wire] = widen(tensor, self.bench.dtype_for_production(wire)).clone()

    def _break(self, step: Step, reason: str) -> None:
        for name in step.covers:
            if name in self.bench.reference:
                self.broken.update({o.wire: reason for o in self.bench.reference[name].outputs})

    def _release(self, index: int) -> None:
        last = self.bench.plan.last_use
        for wires in (self.mine, self.oracle):
            for wire in [w for w in wires if last.get(w, -1) <= index and not w.startswith("case.")]:
                del wires[wire]

    def _logits(self, step: Step) -> Iterator[Logits]:
        """The model's output, where a model-scope stage returns ``logits``."""
        for output in self.bench.production[step.stage].outputs:
            if step.layer is None and output.name == "logits" and output.wire in self.mine:
                yield entropy.logits(self.mine[output.wire], self.bench.wires[output.wire])


def produced(way: Way, wires: Wires, reference: Wires) -> tuple[Outcome, str | None]:
    """Run production with the reference's picks and put its outputs in their order; a note says what was changed."""
    given = None if way.direct else replay.of(way.stage, reference)
    outcome = run_production(way, wires, given)
    if outcome.error or not given:
        return outcome, None

    def rerun() -> dict[str, object]:
        return dict(run_production(Way(way.stage), wires, given).outputs)

    outputs, note = replay.align(way.stage, outcome.outputs, given, rerun if way.function else None)
    return Outcome(outputs), note
