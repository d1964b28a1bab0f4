"""Compressor state of a CSA layer: the open window, and the Ca half of windows that closed before it.

Entry w pools the Ca of window w - 1 with the Cb of window w. Window w - 1 may have closed in an earlier call, so its
Ca (C and Z, bias included) is kept; window -1 does not exist, and its slots get no weight. ``draft`` tokens may be
taken back, so the Ca of the windows that may become the last one again is kept as well.

The lightning indexer has a state of the same kind at its own width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from production.cache.open_window import OpenWindow
from production.compressor import pool_overlapping


class CsaState:
    """One sequence, one layer. ``half``: width of Ca (and of an entry); a token's products have twice that."""

    def __init__(self, rate: int, half: int, draft: int, device: torch.device) -> None:
        self.rate, self.half = rate, half
        self.open = OpenWindow(rate, 2 * half, draft, device)
        self.kept = 1 + -(-draft // rate)
        self.overlap_kv = torch.empty(self.kept, rate, half, dtype=torch.float32, device=device)
        self.overlap_gate = torch.empty_like(self.overlap_kv)

    def overlap(self, length: int) -> tuple[Tensor, Tensor] | None:
        """(C, Z) of the Ca of the last closed window, each [m, half]; None before the first window has closed."""
        window = length // self.rate - 1
        if window < 0:
            return None
        return self.overlap_kv[window % self.kept], self.overlap_gate[window % self.kept]

    def keep_overlap(self, first: int, kv: Tensor, gate: Tensor) -> None:
        """Keep Ca [n, m, half] of windows first..first+n-1; of more than fit, the last ones."""
        for index in range(max(0, kv.shape[0] - self.kept), kv.shape[0]):
            self.overlap_kv[(first + index) % self.kept] = kv[index]
            self.overlap_gate[(first + index) % self.kept] = gate[index]

    def push(self, length: int, kv: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        """Take the products of new tokens [n, 2 half] and pool what closes: fp32 [T', half]."""
        prior = self.overlap(length)
        kv, gate = self.open.join(length, kv, gate)
        if not kv.shape[0]:
            return kv.new_empty(0, self.half)
        gate = gate + bias.float()
        batched = None if prior is None else (prior[0].unsqueeze(0), prior[1].unsqueeze(0))
        pooled = pool_overlapping(kv.unsqueeze(0), gate.unsqueeze(0), batched).squeeze(0)
        self.keep_overlap(length // self.rate, kv[..., : self.half], gate[..., : self.half])
        return pooled

    def fork(self) -> CsaState:
        other = object.__new__(CsaState)
        other.rate, other.half, other.kept = self.rate, self.half, self.kept
        other.open = self.open.fork()
        other.overlap_kv, other.overlap_gate = self.overlap_kv.clone(), self.overlap_gate.clone()
        return other

    @property
    def bytes(self) -> int:
        return self.open.bytes + 2 * self.overlap_kv.numel() * self.overlap_kv.element_size()
