"""What a verdict rests on: what was compared, what was not, and why."""

from __future__ import annotations

from dataclasses import dataclass

from harness.records import Verdict, Weights
from harness.report.heatmap import planned
from harness.report.load import Run


@dataclass(frozen=True)
class ModeCoverage:
    """Counts of reference stages in one mode."""

    mode: str
    planned: int
    compared: int
    fused: int  # of these, compared inside a stage that covers them
    skipped: int
    absent: tuple[str, ...]  # no record at all


@dataclass(frozen=True)
class Coverage:
    modes: tuple[ModeCoverage, ...]
    skips: tuple[tuple[str, tuple[str, ...]], ...]  # reason -> "stage (mode)"
    bypassed: tuple[tuple[str, str], ...]  # stage -> how
    replaced: tuple[tuple[str, str], ...]  # stage -> path.py:function
    extra: tuple[str, ...]  # production stages that stand for no reference stage
    weights: tuple[Weights, ...]  # those that are not PASS, failures first
    weights_passed: tuple[Weights, ...]


def build(run: Run) -> Coverage:
    """Coverage as the records state it."""
    stages = [stage for stage, _ in planned(run)]
    reasons: dict[str, list[str]] = {}
    for s in run.skips:
        reasons.setdefault(s.reason, []).append(f"{s.stage} ({s.mode})")
    for c in run.comparisons:
        if c.verdict is Verdict.SKIPPED:
            reasons.setdefault(c.reason or "no reason given", []).append(f"{c.stage} ({c.mode})")
    modes = run.config.modes if run.config else tuple(dict.fromkeys(c.mode for c in run.comparisons))
    covered = {name for c in run.comparisons for name in (c.stage, *c.covers)}
    production = run.config.stages_production if run.config else ()
    return Coverage(
        modes=tuple(_mode(run, mode, stages) for mode in modes),
        skips=tuple((reason, tuple(names)) for reason, names in reasons.items()),
        bypassed=tuple({c.stage: c.bypass for c in run.comparisons if c.bypass != "production"}.items()),
        replaced=tuple({c.stage: c.replaced for c in run.comparisons if c.replaced}.items()),
        extra=tuple(name for name in production if stages and name not in stages and name not in covered),
        weights=tuple(sorted((w for w in run.weights if w.verdict is not Verdict.PASS), key=_weight_order)),
        weights_passed=tuple(w for w in run.weights if w.verdict is Verdict.PASS),
    )


def _weight_order(w: Weights) -> int:
    return (Verdict.INVALID, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.SKIPPED).index(w.verdict)


def _mode(run: Run, mode: str, stages: list[str]) -> ModeCoverage:
    done = [c for c in run.comparisons if c.mode == mode]
    direct = {c.stage for c in done if c.verdict is not Verdict.SKIPPED}
    fused = {name for c in done if c.verdict is not Verdict.SKIPPED for name in c.covers} - direct
    skipped = {s.stage for s in run.skips if s.mode == mode} | {c.stage for c in done if c.verdict is Verdict.SKIPPED}
    known = stages or list(dict.fromkeys([*direct, *skipped]))
    return ModeCoverage(
        mode=mode,
        planned=len(known),
        compared=sum(s in direct or s in fused for s in known),
        fused=sum(s in fused for s in known),
        skipped=sum(s in skipped and s not in fused for s in known),
        absent=tuple(s for s in known if s not in direct and s not in fused and s not in skipped),
    )
