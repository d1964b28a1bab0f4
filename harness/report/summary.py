"""A GitHub step summary: the verdict, the first fault and the failures as markdown that no record can break."""

from __future__ import annotations

import re
from pathlib import Path

from harness.records import Comparison, Verdict
from harness.report import coverage, headline
from harness.report.load import read
from harness.report.text import num, plural, visible

#: failing rows shown; the page has them all
ROWS = 25
MARK = {"PASS": "✅", "FAIL": "❌", "INCONCLUSIVE": "❔", "INVALID": "⛔", headline.INTERRUPTED: "⚠️"}


def plain(text: str) -> str:
    """Text in which neither markdown, HTML, a table nor a mention can start: all punctuation as entities."""
    return re.sub(r"[^\w\s]", lambda m: f"&#{ord(m[0])};", visible(text), flags=re.ASCII).replace("_", "&#95;")


def code(text: str) -> str:
    """The same, set as code, where GitHub links and mentions nothing."""
    return f"<code>{plain(text)}</code>"


def step_summary(records: Path) -> str:
    """Markdown for ``$GITHUB_STEP_SUMMARY``."""
    run = read(records)
    head = headline.build(run)
    verdict = head.verdict
    title = f"{head.title} {code(head.stage)}" if head.stage else plain(head.title)
    out = [f"## {MARK.get(verdict, '')} {verdict}: {title}", ""]
    out += [f"{plain(line)}\n" for line in head.lead]
    for alert in head.alerts:
        out += [f"> **{plain(alert.text)}**", *(f"> - {code(item)}" for item in alert.items), ""]
    commands = [step for step in head.steps if step.command]
    for step in commands:
        out += [plain(step.text), "", f"<pre><code>{plain(step.command or '')}</code></pre>", ""]
    bad = sorted(
        (c for c in run.comparisons if c.verdict not in (Verdict.PASS, Verdict.SKIPPED)),
        key=lambda c: c.mode != "local",
    )
    if bad:
        out += ["| verdict | stage | mode | × margin | × cost | reason |", "| --- | --- | --- | ---: | ---: | --- |"]
        out += [_row(c) for c in bad[:ROWS]]
        out += ["", f"and {len(bad) - ROWS:,} more in the report"] if len(bad) > ROWS else []
        out.append("")
    cover = coverage.build(run)
    out += ["| mode | stages | compared | skipped | no record |", "| --- | ---: | ---: | ---: | ---: |"]
    out += [f"| {code(m.mode)} | {m.planned} | {m.compared} | {m.skipped} | {len(m.absent)} |" for m in cover.modes]
    audit = f"{len(cover.weights_passed)} of {plural(len(run.weights), 'parameter')} pass the weights audit"
    passed = sum(c.ok for c in run.certifications)
    out += ["", f"{audit}; {passed} of {plural(len(run.certifications), 'certification check')} hold.", ""]
    return "\n".join(out)


def _row(c: Comparison) -> str:
    cells = [c.verdict, code(c.stage), code(c.mode), num(c.margin, 3), num(c.cost, 3), plain(c.reason or "")]
    return "| " + " | ".join(cells) + " |"
