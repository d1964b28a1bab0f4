"""Faults that exist only across calls, planted in production: each is found, in its stage, and a prefill sees none.

Sources of the faults: docs and issue trackers of the engines in which they were found; the names are those under which
they are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from production.cache import components
from production.cache.csa import CsaState
from production.cache.hca import HcaState
from production.cache.open_window import OpenWindow
from production.cache.pages import PAGE_ROWS, BlockTable, Paged
from tests.decode.conftest import Run, failures, summary

Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[Plant, str, set[str]]] = {}


def fault(phase: str, *stages: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = (plant, phase, set(stages))
        return plant

    return register


@fault("decode:12", "compressor", "indexer")
def overlap_lost_in_decode(patch: pytest.MonkeyPatch) -> None:
    """The window before is looked for in the same call; with one window a call there is none."""
    push = CsaState.push

    def forgetful(self: CsaState, length: int, kv: Any, gate: Any, bias: Any) -> Any:
        window = length // self.rate - 1
        if kv.shape[0] == 1 and window >= 0:
            self.overlap_gate[window % self.kept] = -torch.inf
        return push(self, length, kv, gate, bias)

    patch.setattr(CsaState, "push", forgetful)


@fault("chunk:33,1,41", "compressor", "indexer")
def first_window_zero_instead_of_minus_inf(patch: pytest.MonkeyPatch) -> None:
    overlap = CsaState.overlap

    def zeros(self: CsaState, length: int) -> Any:
        return overlap(self, length) or (torch.zeros(self.rate, self.half), torch.zeros(self.rate, self.half))

    patch.setattr(CsaState, "overlap", zeros)


@fault("chunk:33,42", "compressor", "indexer")
def position_bias_by_chunk_offset(patch: pytest.MonkeyPatch) -> None:
    for state in (CsaState, HcaState):
        push = state.push

        def shifted(self: Any, length: int, kv: Any, gate: Any, bias: Any, push: Any = push) -> Any:
            return push(self, length, kv, gate, bias.roll(-(length % self.rate), 0))

        patch.setattr(state, "push", shifted)


@fault("decode:20", "compressor", "indexer")
def chunk_relative_rope(patch: pytest.MonkeyPatch) -> None:
    finish = components.finish
    patch.setattr(components, "finish", lambda *a: finish(*a[:5]))


@fault("decode:12", "compressor", "indexer")
def compressed_entries_not_appended_in_decode(patch: pytest.MonkeyPatch) -> None:
    put = Paged.put

    def frozen(self: Paged, first: int, rows: Any) -> None:
        if self.table.ring or rows.shape[0] != 1 or first == 0:
            put(self, first, rows)
        else:
            self.table.prepare(first, first + 1)
            put(self, first, self.span(first - 1, first))

    patch.setattr(Paged, "put", frozen)


@fault("chunk:40,35", "kv_cache")
def ring_prewrite_leaks_future(patch: pytest.MonkeyPatch) -> None:
    def step(self: Any, p: Any, call: Any, cache: Any, length: int, *, kv: Any) -> Any:
        cache.keys.put(length, kv[0])
        past = cache.keys.span(max(0, length - self.sliding_window + 1), length)
        return {"keys": torch.cat((past, kv[0])).unsqueeze(0)}

    patch.setattr(components.KvCache, "step", step)


@fault("decode:20", "kv_cache")
def stale_window(patch: pytest.MonkeyPatch) -> None:
    """Every seventh key of decode is not written: its slot keeps what was there a ring before."""
    put = Paged.put

    def lossy(self: Paged, first: int, rows: Any) -> None:
        if not (self.table.ring and rows.shape[0] == 1 and first % 7 == 0 and first > self.table.ring):
            put(self, first, rows)

    patch.setattr(Paged, "put", lossy)


@fault("decode:3", "kv_cache", "compressor", "indexer", "attn_core")
def high_block_id_operator(patch: pytest.MonkeyPatch) -> None:
    """Addresses wrap around in the upper half of the pool."""
    slots = BlockTable.slots

    def wrapped(self: BlockTable, rows: Any) -> Any:
        found, limit = slots(self, rows), max(1, self.group.count // 2) * PAGE_ROWS
        return torch.where(found >= limit, found - limit, found)

    patch.setattr(BlockTable, "slots", wrapped)


@fault("decode:6", "compressor")
def open_window_dropped(patch: pytest.MonkeyPatch) -> None:
    """Tokens of an open window do not outlive a call of one token in every third position."""
    write = OpenWindow.write

    def lossy(self: OpenWindow, first: int, kv: Any, gate: Any) -> None:
        write(self, first, kv * 0 if kv.shape[0] == 1 and first % 3 == 0 else kv, gate)

    patch.setattr(OpenWindow, "write", lossy)


@pytest.mark.parametrize("name", FAULTS)
def test_found(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, phase, stages = FAULTS[name]
    plant(monkeypatch)
    records = run(phase)
    assert summary(records).exit_code == 1
    fault = summary(records).first_fault
    assert fault is not None
    assert fault.stage.rpartition(".")[2] in stages, fault
    assert {s.rpartition(".")[2] for s in failures(records, "local")} <= stages


@pytest.mark.parametrize("name", [n for n in FAULTS if "decode" in FAULTS[n][1] and "high_block" not in n])
def test_a_whole_prompt_does_not_see_it(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name][0](monkeypatch)
    assert summary(run("")).exit_code == 0
