"""Rule 7, *entropy*: how spread out attention, routing and the output are, on both sides.

Attention entropy is that of the visible-key probabilities renormalised without the sink, so its ceiling is ln(visible
keys) whatever the sink takes; the sink's mass stands beside it. A stage returns both per head (role ``stat``) and they
are judged by the cost rule: a production whose entropies are no farther from the oracle's than twice the reference's
is as good a softmax as the reference's. A head within 1 % of the ceiling in production but not in the reference has
*collapsed to uniform*: it attends to everything alike, which a wrong scale or a dead query looks like. Positions with
one visible key have entropy 0 and ceiling 0: they are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from harness.judge.figures import number, tidy
from harness.records import Entropy, Logits

COLLAPSED = 0.99


def attention(
    production: Mapping[str, Tensor], reference: Mapping[str, Tensor], visible: Tensor | None
) -> Entropy | None:
    """Mean entropy and sink mass per head, of a stage that returns ``entropy`` [..., H] and perhaps ``sink_mass``."""
    if "entropy" not in production or "entropy" not in reference:
        return None
    p, r = (side["entropy"].double() for side in (production, reference))
    if p.shape != r.shape or not p.numel():
        return None
    keys = None if visible is None else visible.sum(-1)
    keep = torch.ones(p.shape[:-1], dtype=torch.bool)
    ceiling = None
    if keys is not None and keys.shape == p.shape[:-1]:
        keep = keys > 1
        ceiling = float(keys[keep].double().log().mean()) if keep.any() else None
    if not keep.any():
        return None
    mine, theirs = (x[keep].mean(0) for x in (p, r))
    collapsed: tuple[int, ...] = ()
    if ceiling:
        flat = (mine >= COLLAPSED * ceiling) & (theirs < COLLAPSED * ceiling)
        collapsed = tuple(flat.nonzero().flatten().tolist())
    sinks = [
        tidy(side["sink_mass"].double()[keep].mean(0)) if "sink_mass" in side else ()
        for side in (production, reference)
    ]
    return Entropy(tidy(mine), tidy(theirs), number(ceiling), sinks[0], sinks[1], collapsed)


def of_weights(weights: Tensor) -> float | None:
    """Mean entropy (nats) of the last axis, normalised to sum 1: how evenly a token's experts share."""
    w = weights.double().clamp_min(0)
    total = w.sum(-1, keepdim=True)
    p = (w / total)[(total > 0).squeeze(-1)]
    return number(float(torch.special.entr(p).sum(-1).mean())) if p.numel() else None


def logits(production: Tensor, reference: Tensor) -> Logits:
    """Entropy, KL(reference || production) and top-1 agreement of the model's output, means over positions."""
    p, r = (x.double().log_softmax(-1).reshape(-1, x.shape[-1]) for x in (production, reference))
    kl = float((r.exp() * (r - p)).sum(-1).mean())
    entropies = [number(float(-(x.exp() * x).sum(-1).mean())) for x in (p, r)]
    top1 = float((p.argmax(-1) == r.argmax(-1)).double().mean())
    return Logits(entropies[0], entropies[1], number(max(kl, 0.0)), number(top1), p.shape[0])


def stream_rms(tensors: Mapping[str, Tensor | None]) -> dict[str, float | None]:
    """RMS of one tensor as every witness has it (an unbounded residual shows here)."""
    return {
        name: None if x is None or not x.numel() else number(math.sqrt(float(x.double().square().mean())))
        for name, x in tensors.items()
    }
