"""The two optimisers, written so that a whole step can be captured in one CUDA graph.

Muon (momentum, then the nearest orthogonal matrix by Newton-Schulz) for the 2-D weights, Adam for everything else.
AdamW alone did not form recall in 1,600 steps; Muon forms it in a few hundred.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonalise(g: Tensor) -> Tensor:
    """g [n, r, c] -> the same shape with singular values near 1 (five quintic Newton-Schulz steps in bf16)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).bfloat16() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if wide else x).float()


class Muon:
    """Muon over matrices; parameters of one shape are stacked, so a step costs a few launches a shape."""

    def __init__(
        self, parameters: list[tuple[nn.Parameter, tuple[int, int]]], momentum: float = 0.95, decay: float = 0.1
    ) -> None:
        """`parameters` come with the (rows, columns) of the matrices they consist of."""
        groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for parameter, shape in parameters:
            groups[shape].append(parameter)
        self.groups = dict(groups)
        self.momentum, self.decay = momentum, decay
        self.buffers = {
            shape: torch.zeros(sum(p.numel() for p in ps) // (shape[0] * shape[1]), *shape, device=ps[0].device)
            for shape, ps in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: Tensor) -> None:
        """One update; `rate` is a 0-dim tensor. The factor gives the update the RMS that Adam's would have."""
        for shape, parameters in self.groups.items():
            grad = torch.cat([p.grad.reshape(-1, *shape) for p in parameters])
            buffer = self.buffers[shape]
            buffer.lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp(buffer, self.momentum)) * (rate * (0.2 * max(shape) ** 0.5))
            parts = update.split([p.numel() // (shape[0] * shape[1]) for p in parameters])
            torch._foreach_mul_(parameters, 1 - rate * self.decay)
            torch._foreach_sub_(parameters, [u.reshape(p.shape) for u, p in zip(parts, parameters, strict=True)])


class Adam:
    """Adam with tensor-valued rate and step count; `slow` parameters move at a tenth of the rate."""

    def __init__(self, fast: list[nn.Parameter], slow: list[nn.Parameter]) -> None:
        self.parameters = fast + slow
        self.split = len(fast)
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        self.count = torch.zeros((), device=self.parameters[0].device)

    @torch.no_grad()
    def step(self, rate: Tensor, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8) -> None:
        """One update; `rate` is a 0-dim tensor."""
        grads = [p.grad for p in self.parameters]
        self.count += 1
        torch._foreach_lerp_(self.first, grads, 1 - betas[0])
        torch._foreach_mul_(self.second, betas[1])
        torch._foreach_addcmul_(self.second, grads, grads, 1 - betas[1])
        correct = (1 - betas[1] ** self.count).sqrt() / (1 - betas[0] ** self.count)
        root = torch._foreach_sqrt(self.second)
        torch._foreach_add_(root, eps)
        update = torch._foreach_div(self.first, root)
        torch._foreach_mul_(update[: self.split], rate * correct)
        torch._foreach_mul_(update[self.split :], rate * correct * 0.1)
        torch._foreach_sub_(self.parameters, update)
