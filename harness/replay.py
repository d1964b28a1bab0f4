"""The reference's picks in a free run: which ones to replay, and how the outputs line up with them.

A choice amplifies rounding, so a free run fixes every choice to the reference's. A stage that gets ``replay`` returns
those picks in their order. One that returns the same sets in another order is brought into order here (sets, not
orders, are what a stage owes); outputs that share the picks' last axis (routing weights) move along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from harness.types import Output, Stage


def of(stage: Stage, wires: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The picks to replay into a stage, by output name; None where it makes none."""
    found = {o.name: wires[o.wire] for o in stage.outputs if o.role == "picks" and o.wire in wires}
    return found or None


def align(
    stage: Stage,
    outputs: Mapping[str, object],
    replay: Mapping[str, Tensor],
    rerun: Callable[[], Mapping[str, object]] | None = None,
) -> tuple[dict[str, object], str | None]:
    """Outputs in the order of the replayed picks, and a note on what was changed.

    ``rerun`` computes the stage with the replayed picks: tokens whose sets differ are grafted from it. Without it they
    stay, and the free row fails because its picks are not the replayed ones.
    """
    result, notes = dict(outputs), list[str]()
    for name, wanted in replay.items():
        mine = result.get(name)
        if not isinstance(mine, Tensor) or mine.shape != wanted.shape or torch.equal(mine.long(), wanted.long()):
            continue
        declared = next(o for o in stage.outputs if o.name == name)
        along = _along(stage.outputs, declared, result, wanted)
        same = (mine.long().sort(-1).values == wanted.long().sort(-1).values).all(-1)
        where = mine.long().argsort(-1).gather(-1, wanted.long().argsort(-1).argsort(-1))
        for other in along:
            tensor = result[other]
            assert isinstance(tensor, Tensor)
            result[other] = torch.where(same[..., None], tensor.gather(-1, where), tensor)
        if not along:  # nothing else depends on the choice: the replayed picks simply take its place
            result[name] = wanted.to(mine.dtype)
            continue
        result[name] = torch.where(same[..., None], wanted.to(mine.dtype), mine)
        if rerun is not None and not same.all():
            fresh = rerun()
            for other in (name, *along):
                tensor, new = result[other], fresh.get(other)
                if isinstance(tensor, Tensor) and isinstance(new, Tensor) and new.shape == tensor.shape:
                    result[other] = torch.where(same[..., None], tensor, new.to(tensor.dtype))
            notes.append(f"{int((~same).sum())} tokens with other picks were recomputed with the replayed ones")
    return result, "; ".join(notes) or None


def _along(outputs: Sequence[Output], picks: Output, produced: Mapping[str, object], wanted: Tensor) -> list[str]:
    """Names of float outputs whose axes are those of the picks."""
    return [
        o.name
        for o in outputs
        if o.name != picks.name
        and tuple(o.dims) == tuple(picks.dims)
        and isinstance(tensor := produced.get(o.name), Tensor)
        and tensor.shape == wanted.shape
    ]
