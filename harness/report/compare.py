"""Two runs side by side: what got worse, by stage. Nothing is judged again; the recorded figures are compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.records import Comparison, Verdict
from harness.report import headline
from harness.report.heatmap import layer_of
from harness.report.load import Run, read
from harness.report.text import num, plural, visible

#: RMS errors of equally noisy correct runs lie within a few percent of each other: half as much again is a change of
#: the arithmetic, not of the noise. The worst of millions of elements is an extreme value and moves more.
COST_GROWTH = 1.5
MARGIN_GROWTH = 2.0
#: A figure that uses less than a quarter of what is allowed cannot matter yet, however much it grew.
FLOOR = 0.25

NOTHING = "NOTHING TO COMPARE: the runs share no comparison"

SEVERITY = {Verdict.PASS: 0, Verdict.SKIPPED: 1, Verdict.INCONCLUSIVE: 2, Verdict.FAIL: 3, Verdict.INVALID: 4}


@dataclass(frozen=True)
class Regression:
    """One thing that got worse; ``stage`` is empty where it concerns the whole run."""

    stage: str
    mode: str
    what: str
    before: str
    after: str
    reason: str = ""

    def line(self) -> str:
        where = f"{visible(self.stage)} ({visible(self.mode)})" if self.stage else "run"
        why = f": {visible(self.reason)}" if self.reason else ""
        return f"{where}  {visible(self.what)} {visible(self.before)} -> {visible(self.after)}{why}"


def compare(a: Path, b: Path) -> list[Regression]:
    """What is worse in ``b`` than in ``a``: the run, then local stages, then free ones, as ``a`` ran them."""
    return _regressions(read(a), read(b))


def console(a: Path, b: Path) -> tuple[str, list[Regression]]:
    """The text to print, and the regressions it lists."""
    before, after = read(a), read(b)
    worse = _regressions(before, after)
    better = _regressions(after, before)
    lines = [f"A  {visible(before.name)}: {_line(before)}", f"B  {visible(after.name)}: {_line(after)}"]
    lines += [f"note: {note}" for note in notes(before, after)]
    lines += ["", *(f"worse   {r.line()}" for r in worse)] if worse else []
    mended = [r for r in better if r.stage and r.what == "verdict"]
    lines += (
        ["", *(f"better  {visible(r.stage)} ({r.mode})  verdict {r.after} -> {r.before}" for r in mended)]
        if mended
        else []
    )
    shared = len({(c.stage, c.mode) for c in before.comparisons} & {(c.stage, c.mode) for c in after.comparisons})
    if worse:
        first = next((r for r in worse if r.stage), worse[0])
        lines += ["", f"WORSE: {plural(len(worse), 'regression')}, first {visible(first.stage or first.what)}"]
    elif shared:
        lines += ["", f"NO REGRESSION in {plural(shared, 'shared comparison')}"]
    else:
        lines += ["", NOTHING]
    return "\n".join(lines), worse


def _line(run: Run) -> str:
    return visible(run.summary.line) if run.summary and run.complete else headline.INTERRUPTED


def notes(a: Run, b: Run) -> list[str]:
    """Differences in what was asked for: they make figures move without anybody's fault."""
    if a.config is None or b.config is None:
        return ["a run without a config record: what it ran on is unknown"]
    out = []
    for name in ("case", "checkpoint", "dtype", "batch", "length", "layers", "modes", "direct_residual"):
        left, right = getattr(a.config, name), getattr(b.config, name)
        if left != right:
            out.append(f"{name} differs: {visible(str(left))} and {visible(str(right))}")
    return out


def _regressions(a: Run, b: Run) -> list[Regression]:
    stages = sorted(_by_stage(a, b), key=lambda r: r.mode != "local")
    return [*_whole(a, b), *stages]


def _by_stage(a: Run, b: Run) -> Iterator[Regression]:
    theirs = {(c.stage, c.mode): c for c in b.comparisons}
    skipped = {(s.stage, s.mode): s.reason for s in b.skips}
    for c in a.comparisons:
        other = theirs.get((c.stage, c.mode))
        if other is not None:
            yield from _stage(c, other)
        elif (c.stage, c.mode) in skipped:
            if c.verdict is not Verdict.SKIPPED:
                yield Regression(c.stage, c.mode, "verdict", c.verdict, "SKIPPED", skipped[c.stage, c.mode])
        elif c.verdict is not Verdict.SKIPPED and _asked(b, c):
            reason = "" if b.complete else "the run did not finish"
            yield Regression(c.stage, c.mode, "verdict", c.verdict, "no record", reason)


def _asked(run: Run, c: Comparison) -> bool:
    """Whether the run was to compare this at all: a run of other layers or modes is no regression."""
    if run.config is None:
        return True
    layer = layer_of(c.stage)
    return c.mode in run.config.modes and (layer is None or layer in run.config.layers)


def _whole(a: Run, b: Run) -> Iterator[Regression]:
    if a.complete and not b.complete:
        yield Regression(
            "", "", "end", "finished", "interrupted", b.summary.reason or "" if b.summary else "no summary"
        )
    verdicts = headline.verdict_of(a), headline.verdict_of(b)
    if verdicts[1] == Verdict.INVALID and verdicts[0] != Verdict.INVALID:
        yield Regression("", "", "verdict", *verdicts, b.summary.reason or "" if b.summary else "")
    failed = [c for c in b.certifications if not c.ok]
    if failed and all(c.ok for c in a.certifications):
        yield Regression("", "", "certification", "ok", "failed", f"{failed[0].name}: {failed[0].detail}")
    before = {(w.stage, w.parameter): w for w in a.weights}
    for w in b.weights:
        was = before.get((w.stage, w.parameter))
        if was and SEVERITY[w.verdict] > SEVERITY[was.verdict]:
            reason = f"{w.parameter}: {w.reason or plural(w.mismatches, 'mismatch')}"
            yield Regression(w.stage, "weights", "verdict", was.verdict, w.verdict, reason)


def _stage(a: Comparison, b: Comparison) -> Iterator[Regression]:
    if SEVERITY[b.verdict] > SEVERITY[a.verdict]:
        yield Regression(a.stage, a.mode, "verdict", a.verdict, b.verdict, b.reason or "")
        return
    if a.bypass == "production" and b.bypass != "production":
        yield Regression(
            a.stage, a.mode, "ran as", "production", b.bypass, "its verdict no longer speaks for production"
        )
        return
    figures = (("margin", a.margin, b.margin, MARGIN_GROWTH), ("cost", a.cost, b.cost, COST_GROWTH))
    for name, was, now, growth in figures:
        if was is not None and now is not None and now > FLOOR and now > growth * was:
            reason = f"more than {growth:g} times what it was"
            yield Regression(a.stage, a.mode, name, num(was, 3), num(now, 3), reason)
            return
