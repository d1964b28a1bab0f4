"""Forms of error that the tensors alone show: a factor, a permutation, a shift, parts that were never written.

A form that was fitted describes a fault and does not name it, so none of these is ever *confirmed*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from harness.types import Judged, Suspect

#: half a step of bfloat16, relative: two factors nearer than this are one
NEAR = 2.0**-9
#: a fit with more numbers than this share of the elements explains anything
MOST_NUMBERS = 1 / 16
WORDS = {"B": "row", "S": "token", "H": "head", "N": "stream", "k": "slot", "E": "expert", "G": "group"}


def forms(
    name: str,
    dims: tuple[str, ...],
    produced: Tensor,
    judged: Judged,
    inputs: Mapping[str, Tensor],
    constants: Mapping[str, float],
) -> Iterator[Suspect]:
    """Suspects for one failing output (float64 ``produced``, finite)."""

    def suspect(id: str, text: str, value: Tensor) -> Suspect:
        return Suspect(id, text, {name: Judged(value, judged.rss, judged.total)})

    y = judged.value
    for argument, x in inputs.items():
        if x.is_floating_point() and x.shape == y.shape:
            yield suspect("output-equals-input", f"the output is its input {argument}: the operation is skipped", x)
    zero = (produced == 0) & (y != 0)
    if bool(zero.any()):
        share = 100 * float(zero.double().mean())
        yield suspect("partly-unwritten", f"{share:.3g} % of the output is zero", torch.where(zero, 0.0, y))
    slope = float((produced * y).sum() / y.square().sum())
    if abs(slope - 1) > NEAR:
        known = _constant(slope, constants)
        yield suspect("scalar-factor", f"one factor of {slope:.4g}{known}", slope * y)
    yield from (suspect(*found) for found in _along(dims, produced, y))
    yield from (suspect(*found) for found in _moved(dims, produced, y))


def _constant(slope: float, constants: Mapping[str, float]) -> str:
    for word, value in constants.items():
        if value and abs(slope / value - 1) < NEAR:
            return f", which is {word}"
    return ""


def known(config: Mapping[str, object], params: Mapping[str, Tensor]) -> dict[str, float]:
    """Factors that have a name: of the configuration, of single-valued parameters, and small numbers."""
    found = {str(v): float(v) for v in (2, 0.5, 4, 0.25, -1)}
    numbers = {n: float(v) for n, v in config.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    numbers |= {n: float(t) for n, t in params.items() if t.numel() == 1}
    for n, v in numbers.items():
        if v > 0 and v != 1:
            found |= {n: v, f"1 / {n}": 1 / v, f"sqrt({n})": math.sqrt(v), f"1 / sqrt({n})": 1 / math.sqrt(v)}
    return found


def _along(dims: tuple[str, ...], produced: Tensor, y: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """One factor for each index of an axis, or of two."""
    leading = [(i,) for i in range(y.dim())] + [(i, j) for i in range(y.dim()) for j in range(i + 1, y.dim())]
    for axes in leading:
        count = math.prod(y.shape[i] for i in axes)
        if not 1 < count <= y.numel() * MOST_NUMBERS or all(y.shape[i] == 1 for i in axes):
            continue
        rest = [i for i in range(y.dim()) if i not in axes]
        size = y.square().sum(rest, keepdim=True)
        slopes = torch.where(size > 0, (produced * y).sum(rest, keepdim=True) / size, 1.0)
        where = " and ".join(WORDS.get(dims[i], dims[i]) for i in axes)
        low, high = float(slopes.min()), float(slopes.max())
        if high - low <= 2 * NEAR * max(abs(low), abs(high)):
            continue  # one factor, up to rounding: said already
        yield f"factor-per-{where.replace(' and ', '-')}", f"a factor per {where}, {low:.4g} to {high:.4g}", slopes * y


def _moved(dims: tuple[str, ...], produced: Tensor, y: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Swapped halves, shifts, a transposition, a permuted axis."""
    width = y.shape[-1]
    if width % 2 == 0:
        yield "halves-swapped", f"the halves of {dims[-1]} are swapped", y.roll(width // 2, -1)
    if y.dim() > 1 and y.shape[-1] == y.shape[-2]:
        yield "axes-transposed", f"{dims[-2]} and {dims[-1]} are transposed", y.transpose(-1, -2)
    for axis, dim in enumerate(dims):
        for step in (1, -1) if y.shape[axis] > 2 else ():
            word = WORDS.get(dim, dim)
            yield "shift-by-one", f"{word} indices are shifted by {step:+d}", y.roll(step, axis)
        if 1 < y.shape[axis] <= 1024:
            order = _order(produced, y, axis)
            if order is not None:
                text = f"the {WORDS.get(dim, dim)} axis is permuted"
                yield "axis-permuted", text, y.index_select(axis, order)


def _order(produced: Tensor, y: Tensor, axis: int) -> Tensor | None:
    """Which index of the oracle each index of production is nearest to, if that is another order."""
    a, b = (t.movedim(axis, 0).flatten(1) for t in (produced, y))
    a, b = (t / t.norm(dim=1, keepdim=True).clamp(min=1e-300) for t in (a, b))
    order = (a @ b.T).argmax(1)
    identity = torch.arange(len(order))
    return order if torch.equal(order.sort().values, identity) and not torch.equal(order, identity) else None
