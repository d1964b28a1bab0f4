"""From the records of a generation to its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.records import FirstFault, Record, Step, Summary, Verdict
from harness.tally import Tally, describe

if TYPE_CHECKING:
    from harness.generate.run import Run


@dataclass
class GenerationTally(Tally):
    """Counts steps beside rows. The verdict is that of the first failing step, named by the stage behind it."""

    steps: list[Step] = field(default_factory=list)
    bad: Step | None = None

    def add(self, record: Record) -> None:
        if not isinstance(record, Step):
            super().add(record)
            return
        self.steps.append(record)
        self.counts[f"steps {record.verdict}"] += 1
        self.stages.add("steps")
        if record.verdict is Verdict.FAIL and self.bad is None:
            self.bad = record

    @property
    def first_fault(self) -> FirstFault | None:
        """The fault that the rows of the bad step name; the step's logits themselves if no row fails."""
        found = super().first_fault
        if found is None and self.bad is not None:
            return FirstFault("logits", "generate", Verdict.FAIL, tensor="logits", reason=self.bad.reason)
        return found

    def notes(self, run: Run) -> list[str]:
        """What is worth a line under the text."""
        lines = []
        judged = [s for s in self.steps if s.agree is not None]
        if judged:
            agreed = sum(bool(s.agree) for s in judged)
            kls = [s.kl for s in judged if s.kl is not None]
            worst = f", KL at most {max(kls):.3g}, mean {sum(kls) / len(kls):.3g}" if kls else ""
            lines.append(f"top-1 agreement {agreed} of {len(judged)} steps{worst}")
        ratios = [s.error / s.allowed for s in judged if s.error is not None and s.allowed]
        if ratios:
            lines.append(f"logits: RMS error at most {max(ratios):.3g} x the allowed")
        flips = sum(s.router_flips for s in self.steps), sum(s.index_flips for s in self.steps)
        if judged and any(flips):
            margins = [s.flip_margin for s in self.steps if s.flip_margin is not None]
            gap = f", at most {max(margins):.3g} x their bound apart" if margins else ""
            lines.append(f"flips: {flips[0]} router picks{gap}; {flips[1]} indexer rows")
        if run.pair is not None:
            for voice, name in ((run.pair.theirs, "reference"), (run.pair.mine, "production")):
                if voice.said and voice.seconds > 0:
                    rate = len(voice.said) / voice.seconds
                    lines.append(f"{name}: {len(voice.said)} tokens, {rate:.3g} a second (prompt included)")
        return lines

    def summary(
        self, seconds: Mapping[str, float], *, interrupted: bool = False, error: str | None = None, usage: bool = False
    ) -> Summary:
        if not self.steps and error is None and not interrupted:
            error = "nothing was generated"
        return super().summary(seconds, interrupted=interrupted, error=error, usage=usage)

    def _line(self, verdict: Verdict, fault: FirstFault | None, reason: str | None) -> str:
        if verdict is Verdict.PASS:
            return f"PASS {len(self.steps)} steps"
        if verdict is Verdict.FAIL and fault is not None:
            step = self.bad.step if self.bad is not None else next((s.step for s in self.steps if s.agree is False), 0)
            return f"FIRST FAULT: step {step}: {fault.stage} ({fault.mode}, {describe(fault)})"
        return super()._line(verdict, fault, reason)
