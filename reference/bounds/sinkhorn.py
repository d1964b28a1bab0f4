"""The error of a Sinkhorn projection, by reverse mode through every iteration."""

from __future__ import annotations

import torch
from torch import Tensor

from .algebra import TINY, V


def _steps(iterations: int) -> list[int]:
    """Axes of the normalisations: columns first (axis -2), then rows and columns in turn."""
    return [-2] + [-1, -2] * (iterations - 1)


def projection(
    logits: Tensor, own: Tensor, common: Tensor, common_lin: Tensor, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """comb, the sum of its squared errors and their plain sum, each [..., N, M].

    comb_0 = softmax(logits) + eps by rows; then m' = m / (sum m + eps) along columns, rows, columns, ...

    The projection is no longer than a few dozen steps on a 4 x 4 matrix, so its first-order error is computed, not
    estimated: for every output ij the adjoint G = d comb_ij / d m is carried backwards through all steps. With g = G m'
    (the effect of a *relative* error of each entry of a step's result) a step contributes

        sum (3 v g)^2 + sum_groups (4 v sum_group g)^2

    (a division, or a reciprocal and a product; a denominator of N terms and eps that a whole group shares), then
    G <- (G - sum_group g) / den.
    At the start: v m for adding eps, 3 v p for the division and 4 v for the denominator of the softmax, and for each
    logit the sensitivity c = p (G - sum_row G p) times its errors: `own` (independent, one amplitude per logit), 3 v of
    the exponential, 2 v |l - max| of its argument (subtraction, and a product with log2 e), and `common`, one error
    that moves all logits together (the norm in front: entry ij moves by common_ij, with sign), of size 1 in rss units
    and `common_lin` in the plain sum. Entries may start near eps with a logit of minus 100: TINY covers the flushed
    exponential.
    """
    m = torch.softmax(logits, -1)
    p = m
    m = m + eps
    start = m
    results, dens = [], []
    for axis in _steps(iterations):
        den = m.sum(axis, keepdim=True) + eps
        m = m / den
        results.append(m)
        dens.append(den)
    terms = logits.shape[-1]
    size = logits.shape[-2] * terms
    g = torch.eye(size, dtype=torch.float64, device=logits.device).reshape(size, *logits.shape[-2:])
    g = g.expand(*logits.shape[:-2], *g.shape)  # [..., output, N, M]
    var = torch.zeros(g.shape[:-2], dtype=torch.float64, device=logits.device)
    lin = var

    def add(effect: Tensor, scale: float | Tensor) -> None:
        nonlocal var, lin
        moved = (effect * scale).abs()
        var, lin = var + (moved**2).sum((-1, -2)), lin + moved.sum((-1, -2))

    for axis, result, den in zip(reversed(_steps(iterations)), reversed(results), reversed(dens), strict=True):
        moved = g * result.unsqueeze(-3)
        group = moved.sum(axis, keepdim=True)
        add(moved, 3 * V)
        add(group, V * terms)
        g = (g - group) / den.unsqueeze(-3)
    add(g * start.unsqueeze(-3), V)
    moved = g * p.unsqueeze(-3)
    group = moved.sum(-1, keepdim=True)
    add(moved, 3 * V)
    add(group, V * terms)
    add(g, TINY)
    effect = p.unsqueeze(-3) * (g - group)
    away = (logits - logits.max(-1, keepdim=True).values).abs()
    add(effect, (own + 3 * V).unsqueeze(-3))
    add(effect, (2 * V * away).unsqueeze(-3))
    together = (effect * common.unsqueeze(-3)).sum((-1, -2)).abs()
    var, lin = var + together**2, lin + together * common_lin
    return m, var.reshape(logits.shape), lin.reshape(logits.shape)
