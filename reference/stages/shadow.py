"""Running a module's own forward while looking at what passes between its children.

A shadow is a second object of the same class that shares the original's parameters and children, except for those
replaced by an observer. The class's forward is the unmodified one, and the original object is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def shadow(module: Any, children: Mapping[str, nn.Module]) -> Any:
    """``module`` with some children replaced; parameters and buffers are the same dicts, so overrides reach both."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = {**module._modules, **children}
    return twin


class Observer(nn.Module):
    """Calls ``inner`` and keeps the last arguments and result."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.arguments: tuple[Tensor, ...] = ()
        self.result: Tensor | None = None

    def forward(self, *arguments: Tensor) -> Tensor:
        self.arguments = arguments
        self.result = self.inner(*arguments)
        return self.result


class NoPicks(nn.Module):
    """Stands in for the indexer where only the pooled keys are wanted: it picks nothing."""

    def forward(self, hidden: Tensor, *_: object) -> Tensor:
        batch, length = hidden.shape[:2]
        return hidden.new_zeros((batch, length, 0), dtype=torch.int64)
