"""Rows of unequal lengths: production feeds them together without padding, Hugging Face one at a time.

Hugging Face's compressors pool padding tokens into their entries, so a padded batch of it is no reference.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from production.build import model
from production.session import Session
from reference import build, hf
from reference.capture import forward


def alone(net: build.nets.Net, calls: list[Tensor]) -> Tensor:
    """Hugging Face's logits of one row, call after call, in its own cache."""
    cache, length, made = hf.dynamic_cache(net.model.config), 0, []
    for ids in calls:
        positions = torch.arange(length, length + len(ids)).unsqueeze(0)
        made.append(forward(net, ids.unsqueeze(0), positions, cache)[0])
        length += len(ids)
    return torch.cat(made)


def test_a_ragged_batch_is_hugging_face_row_by_row(folder: Path) -> None:
    net = build.model(folder, dtype="fp32").net
    draw = torch.Generator().manual_seed(2)
    lengths, steps = [41, 7, 64, 1], 24
    rows = [torch.randint(0, 50, (n + steps,), generator=draw) for n in lengths]
    session = Session(model(folder, dtype="fp32"), tokens=128, rows=len(rows))
    got = [session.feed([row[:n] for row, n in zip(rows, lengths, strict=True)])]
    for step in range(steps):
        got.append(session.feed([row[n + step : n + step + 1] for row, n in zip(rows, lengths, strict=True)]))
    for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        mine = torch.cat([call[i] for call in got])  # type: ignore[misc]
        theirs = alone(net, [row[:n], *row[n:].split(1)])
        error = (mine - theirs).abs().max() / theirs.square().mean().sqrt()
        assert error < 1e-3, f"row {i}: off by {float(error):.3g} of the RMS"
