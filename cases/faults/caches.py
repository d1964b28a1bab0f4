"""Faults that exist only across calls: production's caches are changed while a stage of the last call runs.

The stage is fed the reference's caches and continues them by production's own code (``production.cache``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cases.faults.catalogue import Scenario, fault, swapped
from production.cache import components
from production.cache.csa import CsaState
from production.cache.open_window import OpenWindow
from production.cache.pages import PAGE_ROWS, BlockTable, Paged

RING, CSA, HCA, INDEXER = "layers.2.kv_cache", "layers.2.compressor", "layers.3.compressor", "layers.2.indexer"
CLOSING, CHUNKS, DECODE = Scenario("decode_closing"), Scenario("chunks"), Scenario("decode")


def _run(stage: Any, inputs: dict[str, Tensor], owner: Any, **attributes: Any) -> dict[str, Tensor]:
    with swapped(owner, **attributes):
        return stage.run(**inputs)  # type: ignore[no-any-return]


def _forgetful(stage: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    push = CsaState.push

    def forget(self: Any, length: int, kv: Any, gate: Any, bias: Any) -> Any:
        window = length // self.rate - 1
        if kv.shape[0] == 1 and window >= 0:
            self.overlap_gate[window % self.kept] = -torch.inf
        return push(self, length, kv, gate, bias)

    return _run(stage, inputs, CsaState, push=forget)


@fault(
    "overlap-lost-in-decode",
    CSA,
    "the window before is looked for in the same call; with one window a call there is none",
    "https://github.com/jundot/omlx/pull/2271",
    scenario=CLOSING,
)
def overlap_lost(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _forgetful(stage, inputs)


@fault("overlap-lost-in-the-indexer", INDEXER, "the window before is not found in decode",
       "https://github.com/jundot/omlx/pull/2271", scenario=CLOSING, cause_id="overlap-lost-in-decode")  # fmt: skip
def overlap_lost_indexer(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _forgetful(stage, inputs)


@fault(
    "position-bias-by-chunk-offset",
    CSA,
    "the bias is indexed by the place in the call, not in the window",
    "https://github.com/ROCm/ATOM/issues/664",
    scenario=CHUNKS,
)
def chunk_offset(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    push = CsaState.push

    def moved(self: Any, length: int, kv: Any, gate: Any, bias: Any) -> Any:
        return push(self, length, kv, gate, bias.roll(-(length % self.rate), 0))

    return _run(stage, inputs, CsaState, push=moved)


@fault("compressed-rope-relative-to-the-call", HCA, "entries of a later call are rotated from position zero",
       scenario=CHUNKS)  # fmt: skip
def relative(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    finish = components.finish
    return _run(stage, inputs, components, finish=lambda *a: finish(*a[:5]))


@fault(
    "compressed-entries-not-appended-in-decode",
    CSA,
    "the pool is frozen after prefill: a new entry repeats the last one",
    "https://github.com/Avarok-Cybersecurity/atlas/pull/275",
    scenario=CLOSING,
)
def frozen(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    put = Paged.put

    def stale(self: Any, first: int, rows: Any) -> None:
        if self.table.ring or rows.shape[0] != 1 or first == 0:
            put(self, first, rows)
        else:
            self.table.prepare(first, first + 1)
            put(self, first, self.span(first - 1, first))

    return _run(stage, inputs, Paged, put=stale)


@fault(
    "swa-ring-prewrite-leaks-future",
    RING,
    "the chunk is written into the ring before its past is read",
    "https://github.com/hw-native-sys/pypto-lib/pull/459",
    scenario=CHUNKS,
)
def prewrite(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def step(self: Any, p: Any, call: Any, cache: Any, length: int, *, kv: Any) -> Any:
        cache.keys.put(length, kv[0])
        past = cache.keys.span(max(0, length - self.sliding_window + 1), length)
        return {"keys": torch.cat((past, kv[0])).unsqueeze(0)}

    return _run(stage, inputs, components.KvCache, step=step)


@fault(
    "prefix-hit-reads-stale-window",
    RING,
    "some slots of the ring keep what was there a ring before",
    "https://github.com/ROCm/ATOM/issues/1417",
    scenario=DECODE,
)
def stale_window(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    window = inputs["window"].clone()
    window[:, 3::7] = window[:, 2::7][:, : window[:, 3::7].shape[1]]
    return stage.run(**(inputs | {"window": window}))  # type: ignore[no-any-return]


@fault(
    "high-block-id-operator",
    RING,
    "addresses wrap around in the upper half of the pool",
    "https://github.com/GDzhu01/vllm-ascend-deepseekv4/issues/90",
    scenario=DECODE,
)
def high_block(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    slots = BlockTable.slots

    def wrapped(self: Any, rows: Any) -> Any:
        found, limit = slots(self, rows), max(1, self.group.count // 2) * PAGE_ROWS
        return torch.where(found >= limit, found - limit, found)

    return _run(stage, inputs, BlockTable, slots=wrapped)


@fault(
    "open-window-dropped",
    CSA,
    "tokens of an open window do not outlive the call",
    "https://github.com/vllm-project/vllm-ascend/issues/9111",
    scenario=DECODE,
)
def dropped(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    write = OpenWindow.write
    return _run(stage, inputs, OpenWindow, write=lambda self, first, kv, gate: write(self, first, kv * 0, gate))


@fault(
    "spec-rollback-keeps-rejected-state",
    RING,
    "a rejected token's key stays in the window",
    "https://github.com/antirez/ds4/issues/750",
    scenario=DECODE,
)
def rejected(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    window = inputs["window"].clone()
    window[:, -1] = window[:, -2]
    return stage.run(**(inputs | {"window": window}))  # type: ignore[no-any-return]
