"""What is seen of one step on both sides: choices, entropies, how far apart the streams are, flipped picks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.execute import upcast
from harness.judge import picks as picks_rule
from harness.judge.figures import number
from harness.types import Oracle, Stage

#: what a production stage may return beside replayed picks: those that it would have made itself
CHOSEN = "chosen"


@dataclass(frozen=True)
class Flips:
    """Picks that production would have made otherwise."""

    router: int = 0
    index: int = 0
    outside: str | None = None  # the first stage whose choice no rounding explains
    margin: float | None = None  # the largest gap over its bound, where the oracle was asked


def entropies(wires: Mapping[str, Tensor], stages: Iterable[Stage]) -> tuple[float | None, ...]:
    """Attention entropy by layer at the last token, mean over heads, in nats."""
    return _by_layer(
        stages, "entropy", lambda wire: number(float(wires[wire][:, -1].double().mean())) if wire in wires else None
    )


def divergence(
    mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], stages: Iterable[Stage]
) -> tuple[float | None, ...]:
    """RMS distance of the streams that leave each layer, at the last token, over the RMS of the reference's."""

    def distance(wire: str) -> float | None:
        if wire not in mine or wire not in theirs:
            return None
        a, b = mine[wire][:, -1].double(), theirs[wire][:, -1].double()
        size = float(b.square().mean().sqrt())
        return number(float((a - b).square().mean().sqrt()) / size) if size > 0 else None

    return _by_layer(stages, "streams", distance)


def _by_layer(stages: Iterable[Stage], name: str, figure: object) -> tuple[float | None, ...]:
    """One figure a layer, from the layer's last output of this name."""
    last = {s.layer: o.wire for s in stages for o in s.outputs if o.name == name and s.layer is not None}
    assert callable(figure)
    return tuple(figure(last[layer]) for layer in sorted(last))


@dataclass(frozen=True)
class Output:
    """The two distributions over the next token."""

    kl: float | None
    entropy_production: float | None
    entropy_reference: float | None


def output(mine: Tensor | None, theirs: Tensor | None) -> Output:
    """KL(reference || production) and entropies of logits [V], in nats."""
    p, r = (None if x is None else x.double().log_softmax(-1) for x in (mine, theirs))
    spread = [None if x is None else number(float(-(x.exp() * x).sum())) for x in (p, r)]
    kl = None if p is None or r is None else number(max(0.0, float((r.exp() * (r - p)).sum())))
    return Output(kl, spread[0], spread[1])


def flips(
    oracle: Oracle,
    production: Sequence[Stage],
    mine: Mapping[str, Tensor],
) -> Flips:
    """Choices of production that differ from those replayed into it. The oracle judges those of stages without caches.

    ``mine``: production's wires, ``case.input_ids`` among them; a choice of its own is on ``<stage>.chosen``.
    """
    router = index = 0
    outside: str | None = None
    worst: float | None = None
    for stage in production:
        own = mine.get(f"{stage.name}.{CHOSEN}")
        used = next((mine[o.wire] for o in stage.outputs if o.role == "picks" and o.wire in mine), None)
        if own is None or used is None or own.shape != used.shape:
            continue
        same = (own.sort(-1).values == used.sort(-1).values).all(-1)
        if bool(same.all()):
            continue
        cached = any(".cache." in wire for wire in stage.inputs.values())
        if cached:
            index += int((~same).sum())
            continue
        router += int((~same).sum())
        name = next(o.name for o in stage.outputs if o.role == "picks")
        rows = ~same
        inputs = {a: _rows(mine[w], rows) for a, w in stage.inputs.items()}
        judged = oracle.judge(stage.name, {a: upcast(t) for a, t in inputs.items()}, plan=stage.plan)[name]
        found = picks_rule.picks(own[rows].unsqueeze(0), judged)
        if found.outside and outside is None:
            outside = stage.name
        if found.worst is not None and math.isfinite(found.worst):
            worst = max(worst or 0.0, found.worst)
    return Flips(router, index, outside, worst)


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """The tokens of a [B, S, ...] tensor that a mask [B, S] names, as one row."""
    return tensor[rows].unsqueeze(0)


def choose(logits: Tensor, temperature: float, noise: Tensor | None) -> int:
    """The next token: the largest logit, or a sample by Gumbel noise that all sides share."""
    if temperature <= 0 or noise is None:
        return int(logits.argmax())
    return int((logits.double() / temperature + noise).argmax())


def gumbel(size: int, seed: int, step: int) -> Tensor:
    """Noise of one step: equal logits choose equally on every side."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    uniform = torch.rand(size, generator=generator, dtype=torch.float64).clamp(1e-300, 1 - 1e-16)
    return -(-uniform.log()).log()
