"""One offline page from one JSONL file: no request leaves it, and nothing in it was computed here."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from harness.records import Comparison, Verdict
from harness.report import coverage, headline, heatmap, pack, svg, text
from harness.report.load import Run, read
from harness.types import UsageError

LIMIT = 5_000_000
SCRIPTS = ("dom.js", "charts.js", "panel.js", "tokens.js", "app.js")
STYLES = ("page.css", "data.css", "print.css")
#: rows of the table that are laid out at once; failures always are
CAP = 400
RANK = {v: i for i, v in enumerate(("INVALID", "FAIL", "INCONCLUSIVE", "SKIPPED", "PASS"))}


@cache
def _environment() -> Environment:
    env = Environment(
        loader=PackageLoader("harness.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {
        "num": text.num,
        "ratio": text.ratio,
        "times": text.times,
        "plural": text.plural,
        "seconds": text.seconds,
        "size": text.size,
        "visible": text.visible,
    }
    env.globals |= {
        "svg": svg,
        "slug": text.slug,
        "EDGES": heatmap.EDGES,
        "RELATIVE_EDGES": heatmap.RELATIVE_EDGES,
        "CAP": CAP,
    }
    return env


@cache
def _asset(names: tuple[str, ...]) -> str:
    loader = _environment().loader
    assert loader is not None
    return "\n".join(loader.get_source(_environment(), name)[0] for name in names)


def _digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def ordered(comparisons: list[Comparison]) -> list[tuple[int, Comparison]]:
    """Failures first, local before free among them; then execution order. Each with its index in the file."""

    def key(item: tuple[int, Comparison]) -> tuple[int, bool]:
        rank = RANK[item[1].verdict]
        return rank, rank < RANK["PASS"] and item[1].mode != "local"

    return sorted(enumerate(comparisons), key=key)


def _icon(verdict: str) -> str:
    """A tab icon by verdict: a tick, a cross or a bar, so that it does not rest on colour alone."""
    colour, path = {
        "PASS": ("#1d7a4f", "M4 9l3 3 5-7"),
        "FAIL": ("#c2310b", "M4 4l8 8M12 4l-8 8"),
    }.get(verdict, ("#8a5a00", "M8 3v6M8 12v1"))
    shape = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" fill="{colour}"/>'
        f'<path d="{path}" stroke="#fff" stroke-width="2" fill="none"/></svg>'
    )
    return "data:image/svg+xml," + quote(shape, safe="")


def page(run: Run, limit: int = LIMIT) -> str:
    """The page as text, under ``limit`` bytes."""
    script = "(() => {\n'use strict';\n" + _asset(SCRIPTS) + "\n})();"
    style = _asset(STYLES)
    head = headline.build(run)
    context: dict[str, Any] = {
        "run": run,
        "config": run.config,
        "summary": run.summary,
        "head": head,
        "heat": heatmap.build(run),
        "cover": coverage.build(run),
        "rows": [(i, c, text.slug(c.stage, c.mode), *heatmap.level(c)) for i, c in ordered(run.comparisons)],
        "fault": _fault_comparison(run),
        "also": [record for record in run.others if head.stage and record.get("stage") == head.stage],
        "streams": {mode: svg.streams([c for c in run.comparisons if c.mode == mode]) for mode in heatmap.MODES},
        "entropies": [c for c in run.comparisons if c.entropy],
        "counts": _counts(run),
        "routing": sorted(run.routing, key=lambda r: (r.mode != "local", -r.outside)),
        "icon": _icon(head.verdict),
        "script": Markup(script),
        "style": Markup(style),
        "script_hash": _digest(script),
        "style_hash": _digest(style),
    }
    template = _environment().get_template("page.html.j2")
    # The shell first, then whatever detail still fits beside it; the margin is for the words about what does not.
    shell = len(template.render(context, packed=pack.Packed((), "", ())).encode())
    packed = pack.pack(run, limit - shell - 4096)
    return template.render(context, packed=packed)


def _counts(run: Run) -> dict[str, int]:
    counts: dict[str, int] = {str(v): sum(c.verdict is v for c in run.comparisons) for v in Verdict}
    counts["SKIPPED"] += len(run.skips)
    return counts


def _fault_comparison(run: Run) -> Comparison | None:
    fault = headline.first_fault(run)
    return run.of(fault.stage, fault.mode) if fault else None


def render(records: Path, out: Path) -> Path:
    """Write the page of a run's records to ``out``."""
    content = page(read(records))
    try:
        out.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {out}: {error.strerror}; name a file in an existing, writable folder"
        ) from error
    return out
