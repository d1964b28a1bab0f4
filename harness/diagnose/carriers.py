"""Where an unexplained error sits: the slices that carry most of it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from harness.diagnose.algebra import WORDS

#: a slice is worth a word when it carries this share of the squared error and is at most a quarter of the axis
SHARE, PART = 0.5, 0.25
#: one index of a short axis must carry this much
ALONE = 0.9
BLOCK = 16
CYCLES = (4, 128)


def carriers(dims: tuple[str, ...], error: Tensor) -> str:
    """Words for slices of ``error`` (any sign); says so when no axis singles any out."""
    energy = error.double().square()
    if float(energy.sum()) <= 0:
        return "no single slice"
    found = [text for text in _slices(dims, energy) if text]
    return "carried by " + ", ".join(found) if found else "spread over all axes"


def _slices(dims: tuple[str, ...], energy: Tensor) -> Iterator[str]:
    for axis, dim in enumerate(dims):
        line = energy.sum([i for i in range(energy.dim()) if i != axis])
        yield _heaviest(WORDS.get(dim, dim), line)
        if dim == "S":
            for m in CYCLES:
                if len(line) >= 2 * m:
                    yield _heaviest(f"position mod {m} =", line[: len(line) // m * m].reshape(-1, m).sum(0))
    last = energy.sum(list(range(energy.dim() - 1)))
    if len(last) % BLOCK == 0:
        yield _heaviest(f"{BLOCK}-wide block", last.reshape(-1, BLOCK).sum(1))
    if len(last) % 64 == 0 and len(last) > 64:
        yield _heaviest("64-wide block", last.reshape(-1, 64).sum(1))


def _heaviest(word: str, line: Tensor) -> str:
    """The fewest indices that carry half of the error, if they are few."""
    order = line.argsort(descending=True)
    share = line[order].cumsum(0) / line.sum()
    count = int((share < SHARE).sum()) + 1
    few = count <= PART * len(line) or (count == 1 and float(share[0]) >= ALONE)
    if len(line) < 2 or not few:
        return ""
    at = sorted(order[:count].tolist())
    indices = " ".join(map(str, at[:4])) + (" ..." if count > 4 else "")
    return f"{word} {indices} ({100 * float(share[count - 1]):.0f} %)"
