"""How well a suspect accounts for what production returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.judge import margin
from harness.judge.ulp import rms
from harness.records import TensorComparison
from harness.types import Judged, Suspect


@dataclass(frozen=True)
class Failing:
    """An output that fails: its record, production's tensor and the oracle's word, float64 or exact."""

    record: TensorComparison
    produced: Tensor
    judged: Judged


@dataclass(frozen=True)
class Score:
    """``explains`` is 1 - the RMS error left, all failing outputs alike; ``inside``: none of them fails."""

    suspect: Suspect
    explains: float
    inside: bool


def score(suspect: Suspect, failing: Sequence[Failing]) -> Score:
    """One suspect against all failing outputs; an output that it does not reach keeps its error."""
    left, inside = [], True
    for f in failing:
        judged = suspect.outputs.get(f.record.tensor)
        if judged is None or judged.value.shape != f.produced.shape:
            left.append(1.0)
            inside = False
            continue
        share, fits = _one(f, judged)
        left.append(share**2)
        inside = inside and fits
    return Score(suspect, 1 - (sum(left) / len(left)) ** 0.5, inside)


def _one(f: Failing, judged: Judged) -> tuple[float, bool]:
    before, after = f.judged.value, judged.value
    produced = f.produced.double()
    if f.record.role == "exact":
        wrong = int((produced != after).sum())
        return (wrong / max(int((produced != before).sum()), 1)) ** 0.5, wrong == 0
    finite = torch.isfinite(before)
    if not bool((finite == torch.isfinite(after)).all()):
        return 1.0, False
    was, now = (rms(torch.where(finite, produced - y, 0.0)) for y in (before, after))
    if was == 0:
        return 1.0, False
    fits = margin.margin(f.produced, judged, f.record.production_dtype).worst <= 1
    if f.record.cost and f.record.rms_error is not None:  # rule 4 allowed rms_error / cost; larger values, more
        larger = max(rms(torch.where(finite, after, 0.0)) / (f.record.rms_oracle or 1.0), 1.0)
        fits = fits and now <= f.record.rms_error / f.record.cost * larger
    return now / was, fits


def same(a: Suspect, b: Suspect, failing: Sequence[Failing]) -> bool:
    """Whether two suspects say the same of every failing output, up to float64's own noise."""
    for f in failing:
        x, y = (_value(s.outputs, f.record.tensor) for s in (a, b))
        if x is None or y is None or x.shape != y.shape or not torch.allclose(x, y, rtol=1e-9, atol=1e-12):
            return False
    return True


def _value(outputs: Mapping[str, Judged], name: str) -> Tensor | None:
    return outputs[name].value if name in outputs else None
