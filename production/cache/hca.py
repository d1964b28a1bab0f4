"""Compressor state of an HCA layer: the open window. Windows are disjoint, so nothing else outlives a call."""

from __future__ import annotations

import torch
from torch import Tensor

from production.cache.open_window import OpenWindow
from production.compressor import pool_disjoint


class HcaState:
    """One sequence, one layer. ``width``: channels of a token's products, and of an entry."""

    def __init__(self, rate: int, width: int, draft: int, device: torch.device) -> None:
        self.rate, self.width = rate, width
        self.open = OpenWindow(rate, width, draft, device)

    def push(self, length: int, kv: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        """Take the products of new tokens [n, width] and pool what closes: fp32 [T', width]."""
        kv, gate = self.open.join(length, kv, gate)
        if not kv.shape[0]:
            return kv.new_empty(0, self.width)
        return pool_disjoint(kv.unsqueeze(0), (gate + bias.float()).unsqueeze(0)).squeeze(0)

    def fork(self) -> HcaState:
        other = object.__new__(HcaState)
        other.rate, other.width, other.open = self.rate, self.width, self.open.fork()
        return other

    @property
    def bytes(self) -> int:
        return self.open.bytes
