"""The top of the page: the verdict in one sentence, what it rests on, and what to type next.

Strings of records pass through as they are: whoever shows them makes them visible and escapes them.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from harness.records import Comparison, FirstFault, Verdict
from harness.report.load import Run
from harness.report.text import num, plural, slug, times

INTERRUPTED = "INTERRUPTED"


@dataclass(frozen=True)
class Step:
    """Something to do next; ``command`` is copyable, ``href`` a place in the page."""

    text: str
    command: str | None = None
    href: str | None = None


@dataclass(frozen=True)
class Alert:
    """Something that changes what the verdict means. ``grave`` ones make it worthless or partial."""

    text: str
    items: tuple[str, ...] = ()
    grave: bool = True


@dataclass(frozen=True)
class Headline:
    verdict: str
    title: str
    stage: str | None  # the stage that the title is about
    lead: tuple[str, ...]
    steps: tuple[Step, ...]
    alerts: tuple[Alert, ...]
    closest: tuple[Comparison, ...]  # a clean run's nearest misses


def verdict_of(run: Run) -> str:
    """A run that did not reach its end has no verdict, whatever its records say so far."""
    return run.summary.verdict.value if run.summary and run.complete else INTERRUPTED


def first_fault(run: Run) -> FirstFault | None:
    """The engine's first fault; the stage that left it undecided; without a summary, the first failure on record."""
    if run.summary and run.summary.verdict is Verdict.INCONCLUSIVE:
        bad = [c for c in run.comparisons if c.verdict is Verdict.INCONCLUSIVE and c.mode == "local"]
    elif run.summary:
        return run.summary.first_fault
    else:
        bad = run.failures()
    if not bad:
        return None
    c = bad[0]
    return FirstFault(c.stage, c.mode, c.verdict, c.margin, c.cost, c.tensor, c.reason, next(iter(c.causes), None))


def build(run: Run) -> Headline:
    """Title, lead and next steps for every way a run can end."""
    verdict, fault = verdict_of(run), first_fault(run)
    title, stage, lead = _words(run, verdict, fault)
    return Headline(
        verdict,
        title,
        stage,
        tuple(filter(None, lead)),
        tuple(_steps(run, verdict, fault)),
        tuple(alerts(run)),
        closest(run),
    )


def closest(run: Run, count: int = 5) -> tuple[Comparison, ...]:
    """The passes nearest to a limit, by cost: a margin that is one rounding wide is always nearly used up."""
    near = [c for c in run.comparisons if c.verdict is Verdict.PASS and c.cost is not None]
    return tuple(sorted(near, key=lambda c: -(c.cost or 0.0))[:count])


def _where(fault: FirstFault) -> str:
    """What the mode of a fault says about it."""
    if fault.verdict is Verdict.INCONCLUSIVE:
        return f"The reference itself is ill-conditioned here ({fault.mode})."
    if fault.mode == "local":
        return "Wrong by itself: it was given the reference's own inputs (local)."
    if fault.mode == "free":
        return "Drifts on what production computed upstream (free)."
    if fault.mode == "weights":
        return "Loaded wrongly: a parameter differs from the reference's own decode, though no stage fails on it here."
    return f"Found by: {fault.mode}."


def _figures(fault: FirstFault) -> str:
    said = [f"{times(v)} its {u}" for v, u in ((fault.margin, "margin"), (fault.cost, "cost limit")) if v is not None]
    where = f"tensor {fault.tensor}" if fault.tensor else ""
    return ", ".join(filter(None, [where, *said]))


def _words(run: Run, verdict: str, fault: FirstFault | None) -> tuple[str, str | None, list[str]]:
    reason = run.summary.reason if run.summary else None
    lead = [reason] if reason else []
    total = plural(len(run.comparisons), "comparison")
    if run.steps:
        total = plural(len(run.steps), "step") + (f", {total}" if run.comparisons else "")
    if fault:
        why = fault.reason if fault.reason else _figures(fault)
        lead = [_where(fault), why, *(line for line in lead if line not in why and why not in line)]
        found = run.of(fault.stage, fault.mode)
        causes = found.causes if found and found.causes else (fault.cause,) if fault.cause else ()
        lead += [f"Cause: {cause.id}: {cause.line}" for cause in causes]
    if verdict == INTERRUPTED:
        of = f" of {run.config.planned:,} planned" if run.config and run.config.planned else ""
        lead = [f"{total}{of} on record; nothing here speaks for the rest.", *lead]
        return (
            "The run did not finish" + ("; first fault so far:" if fault else ""),
            fault.stage if fault else None,
            lead,
        )
    if verdict == Verdict.INVALID:
        return "This comparison means nothing", None, lead
    if fault and verdict == Verdict.FAIL:
        return "First fault:", fault.stage, lead
    if verdict == Verdict.INCONCLUSIVE:
        return "The reference cannot decide" + (":" if fault else ""), fault.stage if fault else None, lead
    if verdict == Verdict.PASS:
        near = closest(run, 1)
        if near:
            c = near[0]
            lead.append(f"Closest call: {c.stage} ({c.mode}) at {times(c.cost)} its cost limit.")
        others = sum(c.bypass != "production" or c.replaced is not None for c in run.comparisons)
        undecided = sum(c.verdict is Verdict.INCONCLUSIVE for c in run.comparisons)
        if undecided:
            lead.append(
                f"{plural(undecided, 'comparison')} could not be decided: the reference is ill-conditioned there."
            )
        return f"No fault in {total}" + (f", {others:,} of them not production's own" if others else ""), None, lead
    return verdict, None, lead


def _steps(run: Run, verdict: str, fault: FirstFault | None) -> list[Step]:
    steps: list[Step] = []
    command = run.config.command if run.config else "harness diff"
    lost = [w for w in run.weights if w.verdict is Verdict.FAIL]
    if lost:
        which = f"{lost[0].parameter} of {lost[0].stage}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
        why = f" (one factor explains it: {num(lost[0].slope, 6)})" if lost[0].slope is not None else ""
        steps.append(Step(f"Mend loading first: the weights audit fails for {which}{why}.", href="#weights"))
    if verdict == INTERRUPTED:
        steps.append(Step("Run it to the end.", command))
    if verdict == Verdict.INVALID:
        failed = [c for c in run.certifications if not c.ok]
        if failed:
            text = "Restore the unmodified reference: a certification check failed, so nothing below can be trusted."
            steps.append(Step(text, href="#certification"))
        invalid = next((c for c in run.comparisons if c.verdict is Verdict.INVALID), None)
        if invalid:
            text = f"Look at {invalid.stage}: {invalid.reason or 'invalid'}."
            steps.append(Step(text, href="#" + slug(invalid.stage, invalid.mode)))
        steps.append(Step("Then run again.", command))
    if fault and verdict != Verdict.INVALID:
        steps += _fault_steps(run, fault, command)
    if verdict == Verdict.PASS:
        steps.append(Step("See what was not compared before you rely on this.", href="#coverage"))
    return steps


def _fault_steps(run: Run, fault: FirstFault, command: str) -> list[Step]:
    if fault.mode == "weights":
        return [Step("Run again once it loads.", command)]
    found = run.of(fault.stage, fault.mode)
    again = found.reproduce if found and found.reproduce else command
    look = "See its figures." if fault.verdict is Verdict.INCONCLUSIVE else "See what is wrong with it."
    steps = [Step(look, href="#" + slug(fault.stage, fault.mode))] if found else []
    if fault.verdict is Verdict.INCONCLUSIVE:
        return [*steps, Step("Tell rounding from logic: run it in fp32.", f"{again} --dtype fp32")]
    if fault.mode == "free" and any(c.mode == "local" for c in run.comparisons):
        text = "No stage fails on the reference's inputs: suspect what lies between them (state, cache, layout)."
        steps.append(Step(text, href="#map"))
    steps.append(Step("Reproduce this stage alone.", again))
    steps.append(Step("Write its inputs and the three witnesses' outputs for a colleague.", f"{again} --dump fault/"))
    if fault.mode == "local":
        other = f"{command} --bypass {shlex.quote(fault.stage + '=reference')}"
        steps.append(Step("See whether everything else is right without it.", other))
    return steps


def alerts(run: Run) -> list[Alert]:
    """Everything that limits or changes the meaning of the verdict, gravest first."""
    out: list[Alert] = []
    if run.truncated:
        out.append(Alert("Truncated: the last line of the records is cut off; the writer was killed."))
    if run.summary and run.summary.interrupted:
        out.append(Alert("Interrupted: the run was stopped before its end."))
    elif run.summary is None:
        out.append(Alert("Unfinished: there is no summary record, so the run has no verdict."))
    if run.problems:
        out.append(Alert(f"{plural(len(run.problems), 'problem')} in the record file.", tuple(run.problems[:20])))
    failed = [f"{c.name}: {c.detail}" for c in run.certifications if not c.ok]
    if failed:
        out.append(Alert("Not certified: the reference side is not the unmodified model.", tuple(failed)))
    elif not run.certifications:
        out.append(Alert("Not certified: no check on record says that the reference is the unmodified model."))
    if run.config:
        config = run.config
        if config.direct_residual:
            text = (
                "Direct-residual mode: hyper-connections are replaced by a plain residual (0.1 × output) on both sides."
            )
            out.append(Alert(text, grave=False))
        if config.bypass:
            text = "Bypassed: these stages did not run as production, and their verdicts do not speak for it."
            out.append(Alert(text, tuple(f"{stage} = {how}" for stage, how in config.bypass.items()), grave=False))
        if config.replace:
            text = "Replaced: a user's function stands in these stages."
            out.append(Alert(text, tuple(f"{stage} = {where}" for stage, where in config.replace.items()), grave=False))
        if config.dtype != "native":
            text = f"Runs in {config.dtype}, not in the checkpoint's precision: this is not what production serves."
            out.append(Alert(text, grave=False))
    return out
