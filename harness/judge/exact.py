"""Rule 2, *exact*: integers, quantised bytes, masks, layouts and copied values are equal, element by element.

No rounding stands between the three witnesses here (an embedding row is copied, a mask is a set of comparisons), so
equality is the derivation. The oracle is the truth; a reference that differs from it makes the comparison INVALID.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.judge.valid import first


@dataclass(frozen=True)
class Exact:
    """How many elements differ, and the first of them."""

    mismatches: int
    first: tuple[int, ...] | None


def exact(production: Tensor, truth: Tensor) -> Exact:
    """Compare two tensors of one shape by value; dtypes may differ (a bf16 copy against its float64 upcast)."""
    if production.is_floating_point() or truth.is_floating_point():
        differs = production.double() != truth.double()
    else:
        differs = production.to(torch.int64) != truth.to(torch.int64)
    count = int(differs.sum())
    return Exact(count, first(differs) if count else None)
