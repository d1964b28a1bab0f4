"""The layer x stage map: one cell a stage, in multiples of what is allowed, coloured on a log scale."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from harness.records import Comparison, Skip, Verdict
from harness.report.load import Run
from harness.report.text import short, slug, visible

MODES = ("local", "free")
#: what the map can show, by name: the mode, and whether cost stands in for the deciding figure. A margin that is one
#: rounding wide sits at its limit by construction, so the cost tells more of a stage that passes.
VIEWS = {"margin": ("local", False), "cost": ("local", True), "free": ("free", True)}
#: upper ends of the colour classes b0 ... b7; the limit, 1, is one of them, so colour never straddles the verdict
EDGES = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0)
#: the same for relative errors, which have no limit of their own: r0 ... r6
RELATIVE_EDGES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0)
MARK = {"reference": "R", "direct": "D"}


def bin_of(value: float) -> int:
    """The colour class of a multiple of the allowed error."""
    return bisect_left(EDGES, value)


def level(c: Comparison) -> tuple[float | None, str]:
    """The figure a cell shows, and what it is a multiple of: the one that decided the verdict."""
    if c.mode != "local" or c.margin is None:
        return c.cost, "cost"
    if c.verdict is Verdict.FAIL and c.margin <= 1 and c.cost is not None and c.cost > 1:
        return c.cost, "cost"
    return c.margin, "margin"


@dataclass(frozen=True)
class Cell:
    """One stage in one mode, ready to print."""

    text: str
    classes: str
    title: str | None  # what no row of the table says
    href: str | None
    mark: str = ""


@dataclass
class Row:
    """A stage over all layers, a cell for each view; a model-scope stage has its cells under ``None``."""

    name: str
    model: bool
    cells: dict[int | None, dict[str, Cell]] = field(default_factory=dict)


@dataclass(frozen=True)
class Heatmap:
    layers: tuple[int, ...]
    rows: tuple[Row, ...]


def layer_of(stage: str) -> int | None:
    """The layer in a full stage name."""
    found = re.search(r"\.(\d+)\.", stage)
    return int(found[1]) if found else None


def short_name(stage: str, layer: int | None) -> str:
    """The stage's name within its layer."""
    return stage.partition(f".{layer}.")[2] or stage if layer is not None else stage


def planned(run: Run) -> list[tuple[str, int | None]]:
    """Reference stages within the layers asked for, in execution order."""
    if run.config is None:
        return []
    stages = [(stage, layer_of(stage)) for stage in run.config.stages_reference]
    return [(stage, layer) for stage, layer in stages if layer is None or layer in run.config.layers]


def _merge(sequences: Iterable[Sequence[str]]) -> list[str]:
    """One order that keeps each layer's own: layers have different stages (no indexer on some)."""
    order: list[str] = []
    for names in sequences:
        at = -1
        for name in names:
            if name in order:
                at = order.index(name)
            else:
                at += 1
                order.insert(at, name)
    return order


def build(run: Run) -> Heatmap:
    """Rows in execution order; rows that nobody reached stay in an unfinished run, where they are the news."""
    recorded: dict[tuple[str, str], Comparison | Skip] = {(s.stage, s.mode): s for s in run.skips}
    recorded |= {(c.stage, c.mode): c for c in run.comparisons}
    stages = dict(planned(run))
    for (stage, _), record in recorded.items():
        stages.setdefault(stage, record.layer)
    fused = {name: c for c in run.comparisons for name in c.covers if name != c.stage}

    by_layer: dict[int, list[str]] = {}
    before: list[str] = []
    after: list[str] = []
    for stage, layer in stages.items():
        if layer is None:
            (after if by_layer else before).append(stage)
        else:
            by_layer.setdefault(layer, []).append(short_name(stage, layer))
    layers = tuple(sorted(by_layer))
    rows = [Row(name, True) for name in before]
    rows += [Row(name, False) for name in _merge(by_layer[layer] for layer in layers)]
    rows += [Row(name, True) for name in after]
    index = {(row.name, row.model): row for row in rows}
    for stage, layer in stages.items():
        row = index[short_name(stage, layer), layer is None]
        row.cells[layer] = {
            view: _cell(stage, mode, recorded.get((stage, mode)), fused.get(stage), by_cost)
            for view, (mode, by_cost) in VIEWS.items()
        }
    if run.complete:
        alive = {stage for stage, _ in recorded} | fused.keys()
        names = {(short_name(s, layer), layer is None) for s, layer in stages.items() if s in alive}
        rows = [row for row in rows if (row.name, row.model) in names]
    return Heatmap(layers, tuple(rows))


def _cell(stage: str, mode: str, record: Comparison | Skip | None, fused: Comparison | None, by_cost: bool) -> Cell:
    name = f"{visible(stage)} · {mode}"
    if record is None and fused is not None:
        return Cell("↑", "fused", f"{name} · compared inside {visible(fused.stage)}", "#" + slug(fused.stage, mode))
    if record is None:
        return Cell("", "none", f"{name} · no record", None)
    if isinstance(record, Skip):
        return Cell("–", "skip", f"{name} · SKIPPED · {visible(record.reason)}", "#skipped")
    return _compared(record, by_cost)


def _compared(c: Comparison, by_cost: bool) -> Cell:
    value = c.cost if by_cost and c.cost is not None else level(c)[0]
    mismatches = max((t.mismatches or 0 for t in c.tensors), default=0)
    if c.verdict is Verdict.SKIPPED:
        text, kind = "–", "skip"
    elif c.verdict is Verdict.INVALID:
        text, kind = "inv", "inv"
    elif value is None:
        text, kind = (f"≠{short(mismatches)}", "b6") if c.verdict is Verdict.FAIL else ("=", "exact")
    else:
        text, kind = short(value), f"b{bin_of(value)}"
    if c.verdict is Verdict.INCONCLUSIVE:
        text, kind = text + "?", kind + " inc"
    if c.verdict is Verdict.FAIL:
        kind += " fail"
    mark = "U" if c.replaced else MARK.get(c.bypass, "")
    return Cell(text, kind, None, "#" + slug(c.stage, c.mode), mark)
