"""The strip over the steps of a generation: divergence, entropies, agreement, the text, and a token x layer map.

A chart has at most ``COLUMNS`` columns; longer generations put several steps into one, and show the largest of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from markupsafe import Markup

from harness.records import Step, Verdict
from harness.report.heatmap import RELATIVE_EDGES
from harness.report.svg import dots, frame, hit, line
from harness.report.text import num, visible

COLUMNS = 400
#: pieces of text on the page; the record file has them all
TEXT = 5000
Figure = Callable[[Step], float | None]


@dataclass(frozen=True)
class Chart:
    """One strip with its axis, in words."""

    title: str
    note: str
    svg: Markup
    top: str
    bottom: str


@dataclass(frozen=True)
class Piece:
    """What one step said."""

    text: str
    css: str
    title: str


@dataclass(frozen=True)
class Strip:
    """Everything that the page shows of a generation."""

    count: int
    judged: int
    agreed: int
    failed: int
    flips: int
    charts: tuple[Chart, ...]
    layers: tuple[tuple[str, Markup, str], ...]  # (layer, map, its largest figure)
    text: tuple[Piece, ...]
    cut: int  # steps whose text is left out
    differing: tuple[Step, ...]  # the first steps that disagree or fail


def build(steps: Sequence[Step]) -> Strip | None:
    """The strip of a run's steps, or None for a run that generated nothing."""
    if not steps:
        return None
    judged = [s for s in steps if s.agree is not None]
    bad = [s for s in steps if s.agree is False or s.verdict is Verdict.FAIL]
    return Strip(
        count=len(steps),
        judged=len(judged),
        agreed=sum(bool(s.agree) for s in judged),
        failed=sum(s.verdict is Verdict.FAIL for s in steps),
        flips=sum(s.router_flips + s.index_flips for s in steps),
        charts=tuple(filter(None, _charts(steps))),
        layers=tuple(_layers(steps)),
        text=tuple(_piece(s) for s in steps[:TEXT]),
        cut=max(0, len(steps) - TEXT),
        differing=tuple(bad[:50]),
    )


def _charts(steps: Sequence[Step]) -> list[Chart | None]:
    over: Figure = lambda s: s.error / s.allowed if s.error is not None and s.allowed else None  # noqa: E731
    kl: Figure = lambda s: s.kl  # noqa: E731
    spread: tuple[tuple[str, Figure], ...] = (
        ("prod", lambda s: s.entropy_production),
        ("ref", lambda s: s.entropy_reference),
    )
    return [
        _logarithmic(steps, "Error of the logits over what is allowed", "the limit is the line at 1", over, 1.0),
        _logarithmic(steps, "KL(reference || production), nats", "of the next token", kl, None),
        _linear(steps, "Entropy of the next token, nats", "production; the reference dashed", spread),
        _attention(steps),
    ]


def _logarithmic(steps: Sequence[Step], title: str, note: str, figure: Figure, limit: float | None) -> Chart | None:
    """One figure on a log axis of six decades at most, failing and disagreeing steps marked."""
    columns = _columns(steps, figure)
    known = [v for v, _ in columns if v is not None and v > 0]
    if not known:
        return None
    high = max(*known, limit or 0.0)
    low = max(min(known), high * 1e-6) / 1.2

    def y(value: float) -> float:
        return 58 - 56 * math.log(max(value, low) / low) / math.log(max(high / low, 1.01))

    width = 100 / len(columns)
    points = [((i + 0.5) * width, y(v), s) for i, (v, s) in enumerate(columns) if v is not None]
    parts = [line("prod", [(x, at) for x, at, _ in points])]
    bad = [(x, at) for x, at, s in points if any(t.verdict is Verdict.FAIL or t.agree is False for t in s)]
    parts.append(dots("bad", bad))
    if limit is not None:
        parts.append(line("limit", [(0, y(limit)), (100, y(limit))]))
    parts += [hit(i * width, width, 60, f"{_span(s)}: {num(v)}") for i, (v, s) in enumerate(columns)]
    return Chart(title, note + ", log axis", frame(100, 60, title, parts, "lines"), num(high, 3), num(low, 3))


def _linear(steps: Sequence[Step], title: str, note: str, figures: Sequence[tuple[str, Figure]]) -> Chart | None:
    """Figures of both sides from zero, the reference drawn last."""
    drawn = [(css, _columns(steps, figure)) for css, figure in figures]
    known = [v for _, columns in drawn for v, _ in columns if v is not None]
    if not known:
        return None
    high, count = max(known) or 1.0, len(drawn[0][1])
    width = 100 / count
    parts = []
    for css, columns in drawn:
        parts.append(
            line(css, [((i + 0.5) * width, 58 - 56 * v / high) for i, (v, _) in enumerate(columns) if v is not None])
        )
    for i in range(count):
        said = ", ".join(f"{css} {num(columns[i][0])}" for css, columns in drawn)
        parts.append(hit(i * width, width, 60, f"{_span(drawn[0][1][i][1])}: {said}"))
    return Chart(title, note + ", from zero", frame(100, 60, title, parts, "lines"), num(high, 3), "0")


def _attention(steps: Sequence[Step]) -> Chart | None:
    """Attention entropy, mean over layers; every layer's figures stand in the records."""

    def mean(values: Sequence[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return sum(known) / len(known) if known else None

    figures: tuple[tuple[str, Figure], ...] = (
        ("prod", lambda s: mean(s.attention_production)),
        ("ref", lambda s: mean(s.attention_reference)),
    )
    return _linear(steps, "Entropy of attention, nats", "mean over heads and layers; the reference dashed", figures)


def _layers(steps: Sequence[Step]) -> list[tuple[str, Markup, str]]:
    """Per layer, how far apart the streams of both sides are at each token, relative."""
    depth = max((len(s.divergence) for s in steps), default=0)
    made = []
    for layer in range(depth):
        columns = _columns(steps, partial(_distance, layer))
        known = [v for v, _ in columns if v is not None]
        if not known:
            continue
        parts, at = [], 0
        for css, group in groupby(columns, lambda c: "" if c[0] is None else f"r{bisect_left(RELATIVE_EDGES, c[0])}"):
            length = len(list(group))
            if css:
                cell = '<rect class="{}" x="{}" y="0" width="{}" height="1"/>'
                parts.append(Markup(cell).format(css, at, length))
            at += length
        label = f"Layer {layer}: distance of the streams by token, at most {num(max(known), 3)}"
        parts += [hit(i, 1, 1, f"layer {layer}, {_span(s)}: {num(v, 3)}") for i, (v, s) in enumerate(columns) if v]
        made.append((str(layer), frame(len(columns), 1, label, parts, "strip-map"), num(max(known), 3)))
    return made


def _distance(layer: int, step: Step) -> float | None:
    return step.divergence[layer] if layer < len(step.divergence) else None


def _columns(steps: Sequence[Step], figure: Figure) -> list[tuple[float | None, Sequence[Step]]]:
    """The largest figure of each column, with the column's steps."""
    width = -(-len(steps) // COLUMNS)
    found: list[tuple[float | None, Sequence[Step]]] = []
    for start in range(0, len(steps), width):
        part = steps[start : start + width]
        known = [v for s in part if (v := figure(s)) is not None]
        found.append((max(known) if known else None, part))
    return found


def _span(steps: Sequence[Step]) -> str:
    """``step 3 “is”`` or ``steps 3–9``."""
    if len(steps) > 1:
        return f"steps {steps[0].step}–{steps[-1].step}"
    return f"step {steps[0].step} “{visible((steps[0].token or steps[0].reference or '').strip())}”"


def _piece(step: Step) -> Piece:
    said = step.token or step.reference or step.production or ""
    css = "fail" if step.verdict is Verdict.FAIL else "differs" if step.agree is False else ""
    figures = [f"KL {num(step.kl)}"] if step.kl is not None else []
    if step.error is not None and step.allowed:
        figures.append(f"error {num(step.error / step.allowed, 3)} × the allowed")
    if step.agree is False:
        figures.append(f"production says “{visible((step.production or '').strip())}”")
    if step.reason:
        figures.append(visible(step.reason))
    return Piece(said, css, f"step {step.step}: " + ", ".join(figures))
