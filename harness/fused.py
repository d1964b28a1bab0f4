"""What the oracle says of a fused production stage: values by composition, spreads by propagation.

The oracle judges one stage at a time, on given inputs. A fused stage that covers r1 ... rk is judged by running them in
turn. The value is exact composition. The spread of an intermediate wire reaches later outputs through a map f that has
no short closed form, so it is sampled: with x +- rss (independent signs), f's deviation has to first order the variance
sum (df/dx_i)^2 rss_i^2, which is the propagated RSS squared. ``DRAWS`` samples estimate it to about 18 %, well inside
lambda. A plain sum cannot be had this way and stays infinite: the RSS decides. Scores of picks keep the spread of
their own stage only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.execute import upcast
from harness.types import Judged, Oracle, Stage

DRAWS = 16


def judge(
    oracle: Oracle,
    covers: Sequence[Stage],
    inputs: Mapping[str, Tensor],
    plan: Mapping[str, str],
    given: Mapping[str, Tensor] | None,
) -> dict[str, Judged]:
    """Judged outputs by wire. ``covers`` are oracle stages in order, ``inputs`` the production inputs by wire."""
    if len(covers) == 1:
        stage = covers[0]
        arguments = {name: inputs[wire] for name, wire in stage.inputs.items()}
        judged = oracle.judge(stage.name, arguments, plan=plan, given=given)
        return {o.wire: judged[o.name] for o in stage.outputs if o.name in judged}
    generator = torch.Generator().manual_seed(0)
    centre: dict[str, Tensor] = dict(inputs)
    draws: list[dict[str, Tensor]] = [dict(inputs) for _ in range(DRAWS)]
    found: dict[str, Judged] = {}
    for stage in covers:
        arguments = {name: centre[wire] for name, wire in stage.inputs.items()}
        chosen = given if given and set(given) <= {o.name for o in stage.outputs} else None
        judged = oracle.judge(stage.name, arguments, plan=_own(plan, stage.name), given=chosen)
        touched = any(wire in found for wire in stage.inputs.values())
        samples = [_run(stage, draw, chosen) if touched else None for draw in draws]
        for o in stage.outputs:
            if o.name not in judged:
                continue
            j, wire = judged[o.name], o.wire
            if o.role == "picks":  # the judged value is the score of every candidate; what travels on is the choice
                found[wire] = j
                centre[wire] = chosen[o.name] if chosen else _run(stage, centre, None)[wire]
                draws = [{**draw, wire: centre[wire]} for draw in draws]
                continue
            inherited = _variance(j.value, [s[wire] for s in samples if s is not None and wire in s])
            own = j.rss
            if inherited is not None:
                j = Judged(j.value, (own.square() + inherited).sqrt(), torch.full_like(j.total, math.inf))
            found[wire], centre[wire] = j, j.value
            for draw, sample in zip(draws, samples, strict=True):
                at = j.value if sample is None or wire not in sample else sample[wire]
                draw[wire] = at + own * _signs(own, generator) if at.is_floating_point() else at
    return found


def _own(plan: Mapping[str, str], stage: str) -> dict[str, str]:
    """A fused plan as one covered stage reads it: its own points, with the stage's name taken off, over bare ones."""
    prefix = stage + "."
    bare = {point: dtype for point, dtype in plan.items() if "." not in point}
    return bare | {p.removeprefix(prefix): dtype for p, dtype in plan.items() if p.startswith(prefix)}


@torch.no_grad()
def _run(stage: Stage, wires: Mapping[str, Tensor], given: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    arguments = {name: upcast(wires[wire]) for name, wire in stage.inputs.items()}
    outputs = stage.run(params=None, replay=given, **arguments)
    return {o.wire: outputs[o.name] for o in stage.outputs if o.name in outputs}


def _variance(centre: Tensor, samples: Sequence[Tensor]) -> Tensor | None:
    if not samples or not centre.is_floating_point() or samples[0].shape != centre.shape:
        return None
    deviations = torch.stack([torch.nan_to_num(s.double() - centre, 0.0, 0.0, 0.0) for s in samples])
    return deviations.square().mean(0)


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, like.shape, generator=generator).to(torch.float64) * 2 - 1
