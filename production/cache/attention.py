"""The attention core of a sequence that goes on: window keys, and compressed entries read through the block table.

A CSA query reads the entries that it picked and no others, so a step costs the window and the top k whatever the
length; an HCA query reads every finished entry. Queries go in blocks, and a block reads the keys that its own window
reaches, so a long prompt costs its length times the window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from production.attention import Attended, SinkAttention, attend_block
from production.cache.components import rows_of, stacked
from production.cache.pages import Paged
from production.cache.sequence import LayerCache, Layout
from production.component import Call, Params
from production.errors import ProductionError
from production.indexer import ready_entries

QUERY_BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class CachedAttention(SinkAttention):
    """``kv`` holds the window's keys before this call, then the call's own; ``lengths`` count from position 0."""

    @property
    def step_takes(self) -> tuple[str, ...]:
        return ("q", "kv", "picks", "positions") if self.layer_kind == "csa" else ("q", "kv", "positions")

    def compute(  # type: ignore[override]
        self,
        p: Params,
        call: Call,
        *,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        lengths: Tensor,
        compressed: Tensor | None = None,
        picks: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if not torch.equal(lengths, positions[:, -1] + 1):
            came = f"{lengths.tolist()} for last positions {positions[:, -1].tolist()}"
            raise ProductionError("attn_core: lengths", expected="the last position + 1", came=came)
        self._check(q, kv, torch.zeros_like(lengths), 0 if compressed is None else compressed.shape[1], picks)
        rate = self.compress_rate or 1
        layout = Layout({0: self.layer_kind}, 1, rate, rate, kv.shape[-1], 1, self.act)
        done = []
        after = positions + q.shape[1]  # the entries are those after the call
        state = {} if compressed is None else {"entries": compressed}
        for row, (sequence, _) in enumerate(rows_of(layout, after, state)):
            here = slice(row, row + 1)
            chosen = None if picks is None else picks[here]
            inputs = {"q": q[here], "kv": kv[here], "positions": positions[here]}
            length = int(positions[row, 0])
            done.append(self.step(p, Call(detail=call.detail), sequence.layers[0], length, **inputs, picks=chosen))
        return stacked(done)

    def step(
        self,
        p: Params,
        call: Call,
        cache: LayerCache,
        length: int,
        *,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        picks: Tensor | None = None,
    ) -> dict[str, Tensor]:
        queries, keys = q.shape[1], kv.shape[1]
        count = (length + queries) // self.compress_rate if self.compress_rate else 0
        visible = torch.zeros(1, queries, keys + count, dtype=torch.bool, device=q.device) if call.detail else None
        sinks, parts = p["sinks"].float(), []
        for start in range(0, queries, QUERY_BLOCK):
            block = slice(start, min(queries, start + QUERY_BLOCK))
            low, high, seen = self._window(keys - queries, block, q.device)
            values = kv[:, low:high].float()
            if cache.entries is not None and count:
                ids, chosen = self._entries(positions[:, block], None if picks is None else picks[:, block], count)
                values = torch.cat((values, _rows(cache.entries, ids, count).float().unsqueeze(0)), dim=1)
                if visible is not None:
                    visible[:, block, keys:] = _spread(chosen, ids, count)
            else:
                chosen = seen[:, :0]
            if visible is not None:
                visible[0, block, low:high] = seen
            mask = torch.cat((seen.unsqueeze(0), chosen.view(1, seen.shape[0], -1)), dim=-1)
            parts.append(attend_block(q[:, block], values, mask, sinks, call.detail))
        done = parts[0] if len(parts) == 1 else Attended(*(_joined(column) for column in zip(*parts, strict=True)))  # type: ignore[arg-type]
        result = {"out": done.out.to(self.act)}
        if visible is not None:
            result |= {"visible": visible, "lse": done.lse, "entropy": done.entropy, "sink_mass": done.sink_mass}  # type: ignore[dict-item]
        return result

    def _window(self, past: int, block: slice, device: torch.device) -> tuple[int, int, Tensor]:
        """The keys low..high-1 that a block of queries reaches, and bool [queries, high - low]: which each sees."""
        low, high = max(0, past + block.start - self.sliding_window + 1), past + block.stop
        at = torch.arange(past + block.start, past + block.stop, device=device).unsqueeze(-1)
        distance = at - torch.arange(low, high, device=device)
        return low, high, (distance >= 0) & (distance < self.sliding_window)

    def _entries(self, positions: Tensor, picks: Tensor | None, count: int) -> tuple[Tensor | None, Tensor]:
        """The entries that a block of queries reads (None: all), and bool [queries, read]: which each sees."""
        if picks is None:
            return None, ready_entries(positions, self.compress_rate, count)[0]
        ids = torch.unique(picks[picks >= 0])
        slots = torch.zeros(positions.shape[1], len(ids) + 1, dtype=torch.bool, device=picks.device)
        column = torch.where(picks[0] < 0, len(ids), torch.searchsorted(ids, picks[0]))
        return ids, slots.scatter_(-1, column, True)[:, : len(ids)]


def _rows(entries: Paged, ids: Tensor | None, count: int) -> Tensor:
    return torch.cat(entries.views(count)) if ids is None else entries.take(ids)


def _spread(chosen: Tensor, ids: Tensor | None, count: int) -> Tensor:
    """bool [queries, count] from what was chosen among the entries that were read."""
    if ids is None:
        return chosen
    return torch.zeros(chosen.shape[0], count, dtype=torch.bool, device=chosen.device).index_copy_(1, ids, chosen)


def _joined(column: tuple[Tensor | None, ...]) -> Tensor | None:
    parts = [part for part in column if part is not None]
    return torch.cat(parts, dim=1) if parts else None
