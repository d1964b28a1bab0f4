"""Projected tokens that a compressor has seen and may still need: a ring of the last few, by position.

A window of m tokens is pooled when its last token arrives; until then its tokens wait here, as the fp32 products C and
Z (without the position bias). The ring holds ``draft`` tokens more than an open window can have, so that taking back
up to ``draft`` tokens finds the open window of the shorter sequence still there.
"""

from __future__ import annotations

import torch
from torch import Tensor


class OpenWindow:
    """``kv`` and ``gate`` fp32 [capacity, channels]; the token at position p lies at p % capacity."""

    def __init__(self, rate: int, channels: int, draft: int, device: torch.device) -> None:
        self.rate, self.capacity = rate, rate + draft
        self.kv = torch.empty(self.capacity, channels, dtype=torch.float32, device=device)
        self.gate = torch.empty_like(self.kv)

    def pending(self, length: int) -> tuple[Tensor, Tensor]:
        """(C, Z) of the tokens of the open window of a sequence of this length, each [length % m, channels]."""
        if length % self.rate == 0:
            return self.kv[:0], self.gate[:0]
        slots = torch.arange(length - length % self.rate, length, device=self.kv.device) % self.capacity
        return self.kv[slots], self.gate[slots]

    def write(self, first: int, kv: Tensor, gate: Tensor) -> None:
        """Keep tokens [n, channels] at positions first..first+n-1; of more than fit, the last ones."""
        count = min(kv.shape[0], self.capacity)
        last = first + kv.shape[0]
        slots = torch.arange(last - count, last, device=self.kv.device) % self.capacity
        self.kv[slots] = kv[kv.shape[0] - count :]
        self.gate[slots] = gate[gate.shape[0] - count :]

    def join(self, length: int, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """(C, Z) of the windows that close with new tokens [n, channels], each [T', m, channels]; keeps the rest."""
        open_kv, open_gate = self.pending(length)
        closed = (open_kv.shape[0] + kv.shape[0]) // self.rate
        used = closed * self.rate
        windows = [
            torch.cat((before, new))[:used].unflatten(0, (closed, self.rate)) if used else new[:0].unsqueeze(1)
            for before, new in ((open_kv, kv), (open_gate, gate))
        ]
        self.write(length, kv, gate)
        return windows[0], windows[1]

    def fork(self) -> OpenWindow:
        other = object.__new__(OpenWindow)
        other.rate, other.capacity = self.rate, self.capacity
        other.kv, other.gate = self.kv.clone(), self.gate.clone()
        return other

    @property
    def bytes(self) -> int:
        return 2 * self.kv.numel() * self.kv.element_size()
