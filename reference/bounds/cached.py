"""What is kept between calls: copies are exact, projections of the open window have the error of a projection.

A cache content that comes into a call is an input, hence exact. Nothing rounds a key, an entry or a projection when it
is stored in its own dtype, so a content that comes out unchanged has no spread at all: it must be the same number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .algebra import Spread, V, exact
from .compressor import Kept, join, project
from .plan import Plan


def of(inputs: Mapping[str, Tensor]) -> Kept | None:
    """What a stage was given to continue from, if it continues."""
    if "open_kv" not in inputs:
        return None
    return Kept(
        inputs["entries"],
        inputs["open_kv"],
        inputs["open_gate"],
        inputs.get("overlap_kv"),
        inputs.get("overlap_gate"),
    )


def window(kv: Tensor, before: Tensor, kept_after: int) -> dict[str, Spread]:
    """The keys of a call [B, P + S, D], and those that stay."""
    keys = torch.cat((before, kv), 1)
    return {"keys": exact(keys), "window": exact(keys[:, keys.shape[1] - kept_after :])}


def states(x: Tensor, params: Mapping[str, Tensor], plan: Plan, kept: Kept, rate: int) -> dict[str, Spread]:
    """The open window after a call, and the Ca of the last closed window.

    open: projections, their own rounding aside. overlap_gate has the position bias added: one more fp32 rounding.
    """
    kv, gate = project(x, params, plan)
    kv, gate = join(kept.open_kv, kv), join(kept.open_gate, gate)
    used = kv.y.shape[1] // rate * rate
    found = {"open_kv": kv.map(lambda t: t[:, used:]), "open_gate": gate.map(lambda t: t[:, used:])}
    if kept.overlap_kv is None or kept.overlap_gate is None:
        return found
    if not used:
        return found | {"overlap_kv": exact(kept.overlap_kv), "overlap_gate": exact(kept.overlap_gate)}
    half, bias = kv.y.shape[-1] // 2, params["position_bias"]
    last = slice(used - rate, used)
    logits = gate.map(lambda t: t[:, last, :half]).fixed(plan.dtype("proj"))
    y = logits.y + bias[:, :half]
    biased = Spread(y, logits.var, logits.lin, logits.bias).plus(V * y.abs())
    return found | {"overlap_kv": kv.map(lambda t: t[:, last, :half]), "overlap_gate": biased}
