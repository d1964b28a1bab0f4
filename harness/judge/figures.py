"""What a reader sees of an error besides the verdict: slices, histogram, density, tokens, worst elements.

Nothing here decides anything. Every array is cut to a size that keeps the record file of a whole run small, and rounded
to three digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.records import Coordinate, Density, Histogram, Slice

BUCKETS = 32
TOKENS = 256
BINS = 31
CELLS = 20
SAMPLES = 1 << 15  # elements that a density is counted from


def number(value: float | None) -> float | None:
    """A float that a record may hold: None instead of NaN or an infinity."""
    return float(value) if value is not None and math.isfinite(value) else None


def scalar(tensor: Tensor | None, index: Sequence[int]) -> float | int | bool | None:
    """One element as a Python number, None where there is none or it is not finite."""
    if tensor is None or len(index) != tensor.dim() or any(i >= n for i, n in zip(index, tensor.shape, strict=True)):
        return None
    value: float | int | bool = tensor[tuple(index)].item()
    return number(value) if isinstance(value, float) else value


def coordinate(
    index: Sequence[int],
    production: Tensor | None,
    reference: Tensor | None,
    oracle: Tensor | None,
    bound: float | None = None,
    ratio: float | None = None,
) -> Coordinate:
    """One element with what every witness says of it."""
    p, r, o = (scalar(t, index) for t in (production, reference, oracle))
    return Coordinate(tuple(index), p, r, o, number(bound), number(ratio))


def largest(size: Tensor, count: int) -> list[tuple[int, ...]]:
    """Coordinates of the ``count`` largest elements, largest first."""
    flat = size.flatten().topk(min(count, size.numel())).indices
    return [tuple(int(i) for i in row) for row in torch.stack(torch.unravel_index(flat, size.shape), -1)]


def tidy(values: Tensor) -> tuple[float | None, ...]:
    """Three significant digits, None for what is not finite."""
    return tuple(float(f"{v:.3g}") if math.isfinite(v) else None for v in values.tolist())


def slices(
    dims: Sequence[str],
    size: Tensor | None,
    square_error: Tensor,
    square_value: Tensor,
    groups: Mapping[str, Tensor],
) -> tuple[Slice, ...]:
    """Per axis longer than one, worst ratio and relative RMS; ``groups`` adds axes by an id of the leading dims."""
    found = []
    for axis, dim in enumerate(dims):
        if square_error.shape[axis] < 2:
            continue
        width = math.ceil(square_error.shape[axis] / BUCKETS)
        sums = [_bucket(t, axis, width, total=True) for t in (square_error, square_value)]
        worst = None if size is None else _bucket(size, axis, width, total=False)
        found.append(_slice(dim, worst, sums[0], sums[1], width))
    for dim, ids in groups.items():
        flat = ids.flatten()
        keep = flat >= 0
        if not keep.any():
            continue
        count = int(flat.max()) + 1
        sums = [
            torch.zeros(count, dtype=torch.float64).index_add_(0, flat[keep], t.reshape(flat.numel(), -1).sum(1)[keep])
            for t in (square_error, square_value)
        ]
        worst = None
        if size is not None:
            per_id = size.reshape(flat.numel(), -1).amax(1)[keep]
            worst = torch.zeros(count, dtype=torch.float64).scatter_reduce_(0, flat[keep], per_id, "amax")
        width = math.ceil(count / BUCKETS)
        if width > 1:
            sums = [_bucket(t, 0, width, total=True) for t in sums]
            worst = None if worst is None else _bucket(worst, 0, width, total=False)
        found.append(_slice(dim, worst, sums[0], sums[1], width))
    return tuple(found)


def _slice(dim: str, worst: Tensor | None, error: Tensor, value: Tensor, width: int) -> Slice:
    relative = (error / value).sqrt()  # 0/0 is NaN and becomes null
    return Slice(dim, () if worst is None else tidy(worst), tidy(relative), width)


def _bucket(x: Tensor, axis: int, width: int, *, total: bool) -> Tensor:
    """Reduce all axes but one (sum or max), then that one in buckets of ``width``."""
    others = [a for a in range(x.dim()) if a != axis]
    line = x if not others else x.sum(others) if total else x.amax(others)
    if width == 1:
        return line
    short = -line.numel() % width
    grid = torch.nn.functional.pad(line, (0, short)).reshape(-1, width)  # sums and sizes are >= 0: zeros change nothing
    return grid.sum(1) if total else grid.amax(1)


def per_token(
    dims: Sequence[str], size: Tensor | None, square_error: Tensor, square_value: Tensor
) -> tuple[tuple[float | None, ...], int]:
    """Worst ratio (or relative error, where there is no ratio) of every token, row after row, and the bucket width."""
    if tuple(dims[:2]) != ("B", "S"):
        return (), 1
    rows = square_error.shape[0] * square_error.shape[1]
    width = math.ceil(rows / TOKENS)
    if size is not None:
        line = size.reshape(rows, -1).amax(1)
        return tidy(_bucket(line, 0, width, total=False)), width
    sums = [_bucket(t.reshape(rows, -1).sum(1), 0, width, total=True) for t in (square_error, square_value)]
    return tidy((sums[0] / sums[1]).sqrt()), width


def histogram(signed: Tensor) -> Histogram | None:
    """Counts of signed errors, in multiples of the bound or of their RMS, over a range that holds them all."""
    reach = float(signed.abs().max()) if signed.numel() else 0.0
    if not math.isfinite(reach) or reach == 0.0:
        return None
    reach = float(f"{max(reach, 1e-30) * 1.0005:.4g}")
    counts = torch.histc(signed, BINS, -reach, reach)
    return Histogram(-reach, reach, tuple(int(c) for c in counts.tolist()))


def density(production: Tensor, reference: Tensor) -> Density | None:
    """Counts over (production, reference) on one square grid, from at most ``SAMPLES`` evenly spaced elements."""
    p, r = production.flatten(), reference.flatten()
    step = max(1, p.numel() // SAMPLES)
    p, r = p[::step].double(), r[::step].double()
    finite = torch.isfinite(p) & torch.isfinite(r)
    p, r = p[finite], r[finite]
    if p.numel() < 2:
        return None
    low, high = float(torch.minimum(p.min(), r.min())), float(torch.maximum(p.max(), r.max()))
    scale = CELLS / (high - low) if high > low else math.inf
    if not math.isfinite(scale):
        return None
    cells = [((x - low) * scale).long().clamp(0, CELLS - 1) for x in (p, r)]
    grid = torch.bincount(cells[0] * CELLS + cells[1], minlength=CELLS * CELLS).reshape(CELLS, CELLS)
    return Density(low, high, tuple(tuple(row) for row in grid.tolist()))


def slope(production: Tensor, oracle: Tensor) -> float | None:
    """Least-squares factor of production on the oracle."""
    y = oracle.flatten()
    norm = float(y @ y)
    return number(float(production.flatten() @ y) / norm) if norm > 0 else None
