"""Small SVG charts that stretch with the page: shapes here, words beside them in HTML, colours in the style sheet.

Strokes do not scale (the style sheet says so), so a zero-length line with round caps stays a round dot at any width.
No ``style`` attribute anywhere: the page's content security policy forbids it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from harness.records import Comparison, Entropy, Routing
from harness.report.text import num, visible

NICE = {"production": "prod", "reference": "ref", "oracle": "oracle"}


def _svg(width: float, height: float, label: str, parts: Iterable[Markup], css: str = "") -> Markup:
    frame = (
        '<svg class="chart {}" viewBox="0 0 {:g} {:g}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    )
    return Markup(frame).format(css, width, height, label, Markup("").join(parts))


def _dots(css: str, points: Iterable[tuple[float, float]]) -> Markup:
    path = "".join(f"M{x:.4g} {y:.4g}h0" for x, y in points)
    return Markup('<path class="dot {}" d="{}"/>').format(css, path) if path else Markup("")


def _line(css: str, points: Sequence[tuple[float, float]]) -> Markup:
    path = "L".join(f"{x:.4g} {y:.4g}" for x, y in points)
    return Markup('<path class="{}" d="M{}"/>').format(css, path) if points else Markup("")


def _hit(x: float, width: float, height: float, title: str) -> Markup:
    shape = '<rect class="hit" x="{:g}" width="{:g}" height="{:g}"><title>{}</title></rect>'
    return Markup(shape).format(x, width, height, title)


def _pairs(production: Sequence[float | None], reference: Sequence[float | None], top: float) -> list[Markup]:
    """Per head: the reference as a tick, production as a dot; where they agree the dot sits on its tick."""
    low, span = 38.0, 35.0
    ticks = [(i * 10, low - span * v / top) for i, v in enumerate(reference) if v is not None]
    path = "".join(f"M{x + 1.5:g} {y:.4g}h7" for x, y in ticks)
    dots = [(i * 10 + 5, low - span * v / top) for i, v in enumerate(production) if v is not None]
    return [Markup('<path class="ref" d="{}"/>').format(path) if path else Markup(""), _dots("prod", dots)]


def entropy(e: Entropy) -> Markup:
    """Entropy by head between 0 and ln(visible keys), which is the dashed line."""
    heads = max(len(e.production), len(e.reference))
    known = [v for v in (*e.production, *e.reference, e.uniform) if v is not None]
    top = max(known, default=1.0) or 1.0
    parts = []
    if e.uniform is not None:
        y = 38 - 35 * e.uniform / top
        parts.append(_line("uniform", [(0, y), (heads * 10, y)]))
    parts += _pairs(e.production, e.reference, top)
    collapsed = [(h * 10 + 5, 38 - 35 * (v or 0) / top) for h, v in enumerate(e.production) if h in e.collapsed_heads]
    parts.append(_dots("bad", collapsed))
    for h in range(heads):
        pair = [num(values[h]) if h < len(values) else "–" for values in (e.production, e.reference)]
        said = f"head {h}: production {pair[0]}, reference {pair[1]}, uniform {num(e.uniform)}"
        parts.append(_hit(h * 10, 10, 40, said))
    return _svg(max(heads, 1) * 10, 40, f"Entropy of {heads} heads against the reference and uniform", parts, "strip")


def sinks(e: Entropy) -> Markup:
    """Sink mass by head, from 0 to the largest."""
    heads = max(len(e.sink_production), len(e.sink_reference))
    if not heads:
        return Markup("")
    known = [v for v in (*e.sink_production, *e.sink_reference) if v is not None]
    parts = _pairs(e.sink_production, e.sink_reference, max(known, default=1.0) or 1.0)
    for h in range(heads):
        pair = [num(values[h]) if h < len(values) else "–" for values in (e.sink_production, e.sink_reference)]
        parts.append(_hit(h * 10, 10, 40, f"head {h}: sink mass {pair[0]}, reference {pair[1]}"))
    return _svg(heads * 10, 40, f"Sink mass of {heads} heads against the reference", parts, "strip")


def furthest(e: Entropy) -> str:
    """The head whose entropy lies furthest from the reference, with both figures."""
    pairs = [(h, p, r) for h, (p, r) in enumerate(zip(e.production, e.reference, strict=False)) if None not in (p, r)]
    if not pairs:
        return "–"
    h, p, r = max(pairs, key=lambda x: abs((x[1] or 0) - (x[2] or 0)))
    if num(p) == num(r):
        return "alike to 4 digits"
    return f"head {h}: {num(p)} against {num(r)}"


def gaps(routing: Routing) -> Markup:
    """Flips on a log axis of score gap over bound, 1/100 to 100: right of the middle, rounding is no excuse."""
    inside: list[tuple[float, float]] = []
    outside: list[tuple[float, float]] = []
    for token, gap, bound in routing.examples:
        ratio = gap / bound if bound > 0 else math.inf
        x = 50 + 25 * math.log10(min(max(ratio, 0.01), 100.0))
        # Spread by token so that equal gaps do not hide each other.
        (outside if ratio > 1 else inside).append((x, 3 + token * 7 % 11))
    parts = [_line("limit", [(50, 0), (50, 16)]), _dots("prod", inside), _dots("bad", outside)]
    return _svg(100, 16, f"{len(inside)} flips inside the bound, {len(outside)} outside", parts, "strip thin")


def load(routing: Routing) -> Markup:
    """How often each candidate was picked."""
    top = max(routing.load, default=0) or 1
    parts = []
    for i, count in enumerate(routing.load):
        height = 16 * count / top
        bar = '<rect class="col" x="{:g}" y="{:.4g}" width="8" height="{:.4g}"/>'
        parts.append(Markup(bar).format(i * 10 + 1, 16 - height, height))
        parts.append(_hit(i * 10, 10, 16, f"{i}: picked {num(count)} times"))
    return _svg(max(len(routing.load), 1) * 10, 16, f"Picks of {len(routing.load)} candidates", parts, "strip thin")


def unused(routing: Routing) -> str:
    """Candidates (experts, keys) that nobody picked: by name while they are few."""
    idle = [str(i) for i, count in enumerate(routing.load) if count == 0]
    return ", ".join(idle) if len(idle) <= 6 else f"{len(idle):,} of {len(routing.load):,}"


@dataclass(frozen=True)
class StreamChart:
    """RMS of the residual streams along the stages that return them."""

    svg: Markup
    top: str
    bottom: str
    first: str
    last: str
    keys: tuple[tuple[str, str], ...]  # name -> css class
    log: bool
    rows: tuple[tuple[str, tuple[str, ...]], ...]  # stage -> figures, as text


def streams(comparisons: Sequence[Comparison]) -> StreamChart | None:
    """A line per witness; a log axis once the streams grow more than thirtyfold."""
    found = [c for c in comparisons if any(v is not None for v in c.stream_rms.values())]
    keys = list(dict.fromkeys(key for c in found for key in c.stream_rms))
    known = [v for c in found for v in c.stream_rms.values() if v is not None]
    if not known:
        return None
    high, low = max(known), min((v for v in known if v > 0), default=1.0)
    log = high > 30 * low
    floor = low / 1.2 if log else 0.0
    step = 100 / max(len(found) - 1, 1)

    def y(value: float) -> float:
        if log:
            return 58 - 56 * math.log(max(value, floor) / floor) / math.log(high / floor)
        return 58 - 56 * value / (high or 1.0)

    # The reference is drawn last, dashed, so that a production line beneath it still shows through.
    drawn = sorted(keys, key=lambda key: key != "production")
    parts = []
    for key in drawn:
        points = [(i * step, y(v)) for i, c in enumerate(found) if (v := c.stream_rms.get(key)) is not None]
        css = NICE.get(key, "oracle")
        parts += [_line(css, points), _dots(css, points)]
    for i, c in enumerate(found):
        said = ", ".join(f"{visible(k)} {num(v)}" for k, v in c.stream_rms.items())
        parts.append(_hit(max(0.0, (i - 0.5) * step), step, 60, f"{visible(c.stage)}: {said}"))
    return StreamChart(
        svg=_svg(100, 60, f"Stream RMS from {num(low)} to {num(high)}", parts, "lines"),
        top=num(high, 3),
        bottom=num(floor, 3),
        first=visible(found[0].stage),
        last=visible(found[-1].stage),
        keys=tuple((key, NICE.get(key, "oracle")) for key in drawn),
        log=log,
        rows=tuple((c.stage, tuple(num(c.stream_rms.get(k)) for k in drawn)) for c in found),
    )
