"""The detail behind every row, compressed into the page and unpacked by the browser only when a panel opens.

A page has a size budget. Where the detail does not fit, passing comparisons lose theirs first, and the page says what
was left out: the JSONL has all of it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.records import Comparison, Coordinate, TensorComparison, Verdict
from harness.report.load import Run
from harness.report.text import plural

FULL, NO_DENSITY, NO_AXES, FIGURES_AND_WORST, FIGURES = range(5)
SAID = {
    NO_DENSITY: "densities",
    NO_AXES: "densities, slices and token strips",
    FIGURES_AND_WORST: "charts and all but the worst coordinate",
    FIGURES: "charts and coordinates",
}


@dataclass(frozen=True)
class Packed:
    blobs: tuple[str, ...]  # one per comparison, deflated and base64
    meta: str
    omitted: tuple[str, ...]  # what was left out to stay within the budget, in words


def squeeze(value: Any) -> str:
    """JSON, raw deflate, base64: an alphabet that needs no escaping anywhere in a page."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return base64.b64encode(packer.compress(text.encode("utf-8", "replace")) + packer.flush()).decode("ascii")


def _few(values: Sequence[float | None]) -> str:
    """A list of numbers as text, empty where there is none. Three digits are more than a chart resolves."""
    return ",".join(["" if v is None else "%.3g" % _off_limit(v) for v in values])  # noqa: UP031  (half the time)


def _off_limit(v: float) -> float:
    """Three digits must not round a figure onto the limit, 1, from either side."""
    return v if not 0.9995 <= v < 1.005 or v == 1 else 0.999 if v < 1 else 1.01


def _whole(values: Sequence[int]) -> str:
    return ("%d," * len(values) % tuple(values))[:-1]


def _coordinate(c: Coordinate) -> list[Any]:
    return [c.index, c.production, c.reference, c.oracle, c.bound, c.ratio]


def _tensor(t: TensorComparison, detail: int) -> dict[str, Any]:
    kept: dict[str, Any] = {
        "name": t.tensor,
        "wire": t.wire,
        "dims": t.dims,
        "shape": t.shape,
        "role": t.role,
        "dtypes": [t.production_dtype, t.reference_dtype],
        "verdict": t.verdict,
        "reason": t.reason,
        "margin": t.margin,
        "cost": t.cost,
        "rms": [t.rms_oracle, t.rms_error, t.rms_reference_error],
        "slope": t.slope,
        "mismatches": t.mismatches,
        "flips": t.flips,
        "formula": t.formula,
        "threshold": dict(t.threshold),
        "worst": [_coordinate(c) for c in t.worst[: (8, 8, 8, 1, 0)[detail]]],
    }
    if detail < FIGURES_AND_WORST and t.errors:
        kept["errors"] = [t.errors.low, t.errors.high, _whole(t.errors.counts)]
    if detail < NO_AXES:
        kept["slices"] = [[s.dim, s.width, _few(s.worst), _few(s.relative)] for s in t.slices]
        kept["tokens"] = _few(t.tokens)
        kept["tokenWidth"] = t.token_width
    if detail < NO_DENSITY and t.density:
        kept["density"] = [t.density.low, t.density.high, [_whole(row) for row in t.density.rows]]
    return kept


def detail_of(c: Comparison, detail: int = FULL) -> dict[str, Any]:
    """What a panel shows of a comparison."""
    return {
        "stage": c.stage,
        "layer": c.layer,
        "mode": c.mode,
        "verdict": c.verdict,
        "reason": c.reason,
        "tensor": c.tensor,
        "margin": c.margin,
        "cost": c.cost,
        "covers": c.covers,
        "component": c.component,
        "plan": dict(c.plan),
        "bypass": c.bypass,
        "replaced": c.replaced,
        "seconds": c.seconds,
        "reproduce": c.reproduce,
        "streamRms": dict(c.stream_rms),
        "tensors": [_tensor(t, detail) for t in c.tensors],
        "cut": SAID.get(detail),
    }


Which = Callable[[Comparison], bool]
PASSING_FREE: Which = lambda c: c.verdict is Verdict.PASS and c.mode == "free"  # noqa: E731
PASSING: Which = lambda c: c.verdict is Verdict.PASS  # noqa: E731
ANY: Which = lambda c: True  # noqa: E731
STEPS: tuple[tuple[Which, int], ...] = (
    (PASSING_FREE, NO_DENSITY),
    (PASSING, NO_DENSITY),
    (PASSING_FREE, NO_AXES),
    (PASSING, NO_AXES),
    (PASSING, FIGURES_AND_WORST),
    (PASSING, FIGURES),
    *((ANY, detail) for detail in (NO_DENSITY, NO_AXES, FIGURES_AND_WORST, FIGURES)),
)


def pack(run: Run, budget: int) -> Packed:
    """Every comparison's detail in at most ``budget`` bytes, if figures alone can fit."""
    detail = [FULL] * len(run.comparisons)
    blobs = [squeeze(detail_of(c)) for c in run.comparisons]
    meta = squeeze(_meta(run))
    for which, cut in STEPS:
        if sum(map(len, blobs)) + len(meta) <= budget:
            break
        for i, c in enumerate(run.comparisons):
            if which(c) and detail[i] < cut:
                detail[i] = cut
                blobs[i] = squeeze(detail_of(c, cut))
    omitted = []
    for cut, what in SAID.items():
        passing = sum(d == cut and c.verdict is Verdict.PASS for c, d in zip(run.comparisons, detail, strict=True))
        other = detail.count(cut) - passing
        omitted += [f"{what} of {plural(passing, 'passing comparison')}"] if passing else []
        omitted += [f"{what} of {plural(other, 'comparison')} that did not pass"] if other else []
    return Packed(tuple(blobs), meta, tuple(omitted))


def _meta(run: Run) -> dict[str, Any]:
    config = run.config
    return {
        "tokens": config.tokens if config else (),
        "batch": config.batch if config else 1,
        "length": config.length if config else 0,
        "map": {mode: _token_map(run, mode) for mode in ("local", "free")},
    }


def _token_map(run: Run, mode: str) -> dict[str, Any]:
    """Per layer, the worst of all stages at every token: [label, figures]."""
    rows: dict[int | None, list[float | None]] = {}
    tensors = [(c.layer, t) for c in run.comparisons if c.mode == mode for t in c.tensors if t.tokens]
    # Tensors over another token axis (compressed entries) cannot be laid over the others.
    count = max((len(t.tokens) for _, t in tensors), default=0)
    width = next((t.token_width for _, t in tensors if len(t.tokens) == count), 1)
    for layer, t in tensors:
        if len(t.tokens) == count:
            row = rows.setdefault(layer, [None] * count)
            rows[layer] = [
                b if a is None else a if b is None or a > b else b for a, b in zip(row, t.tokens, strict=True)
            ]
    order = sorted(rows, key=lambda layer: (layer is None, layer or 0))
    return {"width": width, "rows": [[layer, _few(rows[layer])] for layer in order]}
