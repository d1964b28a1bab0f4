"""From records to a verdict: counts, the first fault, the exit code and the console's last line."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.records import Cause, Certification, Comparison, FirstFault, Record, Skip, Summary, Verdict, Weights

#: exit codes (any INVALID, then any FAIL, then a local INCONCLUSIVE)
OK, FAULT, USAGE, INVALID = 0, 1, 2, 3


@dataclass
class Tally:
    """Takes records as they are made; ``summary`` may be asked for at any time."""

    counts: Counter[str] = field(default_factory=Counter)
    stages: set[str] = field(default_factory=set)
    faults: dict[str, FirstFault] = field(default_factory=dict)  # by mode: the first local, weights, free FAIL
    invalid: list[str] = field(default_factory=list)
    undecided: FirstFault | None = None  # the first local INCONCLUSIVE

    def add(self, record: Record) -> None:
        """Count one record."""
        if isinstance(record, Certification):
            if not record.ok:
                self.counts[Verdict.INVALID] += 1
                self.invalid.append(f"certification: {record.name}: {record.detail}")
        elif isinstance(record, Weights):
            self.counts[f"weights {record.verdict}"] += 1
            where = f"{record.stage}.{record.parameter}"
            self._note(record.stage, "weights", record.verdict, f"{where}: {record.reason}", tensor=record.parameter)
        elif isinstance(record, Comparison):
            self.counts[record.verdict] += 1
            if record.verdict != Verdict.SKIPPED:
                self.stages.add(record.stage)
            fault = self._note(
                record.stage,
                record.mode,
                record.verdict,
                record.reason,
                record.margin,
                record.cost,
                record.tensor,
                next(iter(record.causes), None),
            )
            if record.verdict == Verdict.INCONCLUSIVE and record.mode == "local" and not self.undecided:
                self.undecided = fault

        elif isinstance(record, Skip):
            self.counts[Verdict.SKIPPED] += 1

    def _note(
        self,
        stage: str,
        mode: str,
        verdict: Verdict,
        reason: str | None,
        margin: float | None = None,
        cost: float | None = None,
        tensor: str | None = None,
        cause: Cause | None = None,
    ) -> FirstFault:
        fault = FirstFault(stage, mode, verdict, margin, cost, tensor, reason, cause)
        if verdict == Verdict.INVALID:
            self.invalid.append(f"{stage} ({mode}): {reason}")
        elif verdict == Verdict.FAIL:
            self.faults.setdefault(mode, fault)
        return fault

    @property
    def first_fault(self) -> FirstFault | None:
        """The first local FAIL in execution order; else the weights audit's; else the first free FAIL."""
        return self.faults.get("local") or self.faults.get("weights") or self.faults.get("free")

    def summary(
        self, seconds: Mapping[str, float], *, interrupted: bool = False, error: str | None = None, usage: bool = False
    ) -> Summary:
        """The last record. ``error`` says why the run ended early (``usage``: because of bad input)."""
        fault, reason = self.first_fault, error
        if interrupted:
            verdict, code, reason = Verdict.INVALID, INVALID, "interrupted"
        elif usage:
            verdict, code = Verdict.INVALID, USAGE
        elif error or self.invalid or not self.stages:
            verdict, code = Verdict.INVALID, INVALID
            reason = error or (self.invalid[0] if self.invalid else "nothing was compared")
        elif fault:
            verdict, code, reason = Verdict.FAIL, FAULT, fault.reason
        elif self.undecided:
            verdict, code, reason = Verdict.INCONCLUSIVE, INVALID, self.undecided.reason
        else:
            verdict, code = Verdict.PASS, OK
        return Summary(
            verdict=verdict,
            counts={str(k): v for k, v in self.counts.items()},
            first_fault=fault,
            exit_code=code,
            interrupted=interrupted,
            reason=reason,
            seconds=dict(seconds),
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            line=self._line(verdict, fault, reason),
        )

    def _line(self, verdict: Verdict, fault: FirstFault | None, reason: str | None) -> str:
        tail = f"{self.counts[Verdict.SKIPPED]} rows skipped" if self.counts[Verdict.SKIPPED] else ""
        if verdict == Verdict.PASS:
            rows = self.counts[Verdict.PASS]
            extra = [f"{rows} rows compared", tail]
            if self.counts[Verdict.INCONCLUSIVE]:
                extra.append(f"{self.counts[Verdict.INCONCLUSIVE]} free rows inconclusive")
            return f"PASS {len(self.stages)} stages ({', '.join(filter(None, extra))})"
        if verdict == Verdict.INCONCLUSIVE and self.undecided:
            return f"INCONCLUSIVE: {self.undecided.stage} (local): {reason}"
        if verdict == Verdict.FAIL and fault:
            cause = f": {fault.cause.line}" if fault.cause else ""
            return f"FIRST FAULT: {fault.stage} ({fault.mode}, {describe(fault)}){cause}"
        return f"INVALID: {reason}"


def describe(fault: FirstFault) -> str:
    """How bad a fault is, in a few words: multiples of the margin, else of the allowed error, else its reason."""
    if fault.margin is not None and fault.margin > 1:
        return f"{fault.margin:.3g} × margin"
    if fault.cost is not None and fault.cost > 1:
        return f"{fault.cost:.3g} × allowed error"
    return (fault.reason or "no figure").split(";")[0]
