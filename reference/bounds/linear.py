"""Matrix products: fp32 accumulation in any order, and weights that the plan rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from .algebra import Spread, V, chain, exact

#: Prefix sums are looked at after at most this many equal blocks of the reduction.
_BLOCKS = 16


def contract(a: Tensor, b: Tensor) -> Spread:
    """a [..., M, K] times b [..., N, K] transposed, with the error of fp32 accumulation.

    A sum of K products rounds each partial sum S_i once, an error of at most v |S_i|, so sum of squares v^2 sum S_i^2.
    The order is not known (SIMD lanes, tiles, split-K, threads), hence

        var = v^2 chain(K)^2 (max_blocks S^2 + sum (ab)^2),       chain(K)^2 = K (1 + K / 4096).

    * max S^2 over the prefixes of the natural order: what blockwise and lane-wise orders see, and what matters under
      structured cancellation (one half of K cancels the other: S is large, y is small);
    * sum (ab)^2: the expected square of a partial sum of a *permuted* order, beyond the share of the total, and the
      rounding of the products themselves where they are not exact;
    * chain(K): independent roundings, and the truncation of tensor cores.

    The plain sum is v K sum |ab| (Higham, section 3.1), taken through Cauchy-Schwarz as v K sqrt(K sum (ab)^2).
    """
    k = a.shape[-1]
    step = max(1, -(-k // _BLOCKS))
    # In place: these tensors are large, and fresh ones cost more in page faults than the arithmetic does.
    y = a[..., :step] @ b[..., :step].mT
    peak, block, size = y.abs(), torch.empty_like(y), torch.empty_like(y)
    for start in range(step, k, step):
        torch.matmul(a[..., start : start + step], b[..., start : start + step].mT, out=block)
        y += block
        torch.maximum(peak, torch.abs(y, out=size), out=peak)
    squares = (a * a) @ (b * b).mT
    return Spread(y, (V * chain(k)) ** 2 * (peak * peak + squares), V * k * (k * squares).sqrt())


def linear(x: Spread, weight: Tensor, weight_dtype: str) -> Spread:
    """x [..., K] times weight [N, K] transposed.

    Errors of x are independent between channels: their squares pass through the squares of the weight, their sizes
    through its sizes, what is known of them through the weight itself. The same holds for a weight that the plan
    rounds. A weight is a known number, so its rounding is known too (:meth:`Spread.fixed`; a decoder that multiplies
    the scales in fp32 first may be 2 v off, which moves the few that lie at a tie). It matters that the error is taken
    as it is: NVFP4 weights of one tensor have about a dozen distinct mantissas, their relative errors are equal in
    whole classes, and a representable weight has none. Two roundings of the result (scales applied after the sum,
    alpha) are added.
    """
    out = contract(x.y, weight)
    out = _through(out.plus(V * out.y.abs(), V * out.y.abs()), x, weight)
    if weight_dtype == "bf16":
        out = _through(out, exact(weight).plus(2 * V * weight.abs()).fixed(weight_dtype), x.at, swap=True)
    return out


def _through(out: Spread, source: Spread, other: Tensor, *, swap: bool = False) -> Spread:
    """Add to `out` the errors of one operand times the values of the other: source @ other^T, or other @ source^T."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return b @ a.mT if swap else a @ b.mT

    var, lin, bias = out.var, out.lin, out.bias
    if bool((source.lin != 0).any()):
        var, lin = var + product(source.var, other * other), lin + product(source.lin, other.abs())
    if bool((source.bias != 0).any()):
        bias = bias + product(source.bias, other)
    return Spread(out.y, var, lin, bias)


def grouped(x: Tensor, weight: Tensor, groups: int, weight_dtype: str) -> Spread:
    """Block-diagonal product: x [..., G * K] and weight [G * N, K] give [..., G, N] (the output projection's o_a)."""
    rows = x.reshape(-1, groups, weight.shape[-1])
    parts = [linear(exact(rows[:, g]), w, weight_dtype) for g, w in enumerate(weight.chunk(groups, 0))]
    return stack(parts, 1).map(lambda t: t.reshape(*x.shape[:-1], groups, -1))


def stack(parts: list[Spread], dim: int) -> Spread:
    """torch.stack for values with spreads."""
    y, var, lin, bias = (torch.stack([getattr(p, name) for p in parts], dim) for name in ("y", "var", "lin", "bias"))
    return Spread(y, var, lin, bias)
