"""The stage graph of a call that continues sequences: the whole-prompt graph with caches as wires.

Differences from the graph of one whole prompt (docs/stages.md): ``kv_cache`` stands between ``kv_rope`` and
``attn_core``; it, the compressors and the indexer read ``case.layers.N.cache.<name>`` and return what is kept after the
call. Everything else is the very same stage object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from production.attention import SinkAttention
from production.cache.attention import CachedAttention
from production.cache.components import (
    OPEN,
    OVERLAP,
    CachedCsaCompressor,
    CachedHcaCompressor,
    CachedIndexer,
    KvCache,
    cached,
)
from production.cache.logical import expected
from production.cache.sequence import Layout
from production.component import Component
from production.compressor import CsaCompressor, HcaCompressor
from production.indexer import LightningIndexer
from production.stage import Stage

if TYPE_CHECKING:
    from production.build import Model
    from production.session import Lockstep


def state_wire(layer: int, name: str) -> str:
    """The wire on which a layer's cache content enters a call."""
    return f"case.layers.{layer}.cache.{name}"


@dataclass(frozen=True)
class StepSide:
    """Production's stages for one call that continues sequences, and sessions with real caches."""

    model: Model
    stages: list[Stage]
    #: wire on which a cache content enters a call -> wire on which it leaves, for the next call
    state: Mapping[str, str]

    @property
    def provenance(self) -> Mapping[str, str]:
        return self.model.provenance

    def empty(self, batch: int) -> dict[str, Tensor]:
        """The caches before the first token, by the wire on which they enter."""
        layout = Layout.of(self.model.config, self.stages[0].op.act)
        found = {}
        for layer, kind in layout.kinds.items():
            for name, shape in expected(layout, kind, 0).items():
                narrow = name.endswith(("window", "entries"))
                dtype = layout.dtype if narrow else torch.float32
                found[state_wire(layer, name)] = torch.empty(batch, *shape, dtype=dtype, device=self.model.device)
        return found

    def session(self, **settings: Any) -> Lockstep:
        """A ``production.session.Session`` over these stages, its rows fed in lockstep."""
        from production.session import Lockstep, Session

        return Lockstep(Session(self.model, side=self, **settings))


def steps(model: Model) -> StepSide:
    """The step graph of a model."""
    stages: list[Stage] = []
    state: dict[str, str] = {}
    for stage in model.stages:
        made = _stateful(stage, stage.layer, model.config.sliding_window) if stage.layer is not None else [stage]
        for new in made:
            state |= {new.inputs[name]: wire for name, wire in _leaves(new).items()}
        stages += made
    return StepSide(model, stages, state)


def _stateful(stage: Stage, layer: int, window: int) -> list[Stage]:
    """A stage of a layer in the step graph: itself, a cached form of it, or itself with the key cache behind it."""
    op, kind = stage.op, stage.name.rpartition(".")[2]
    if kind == "kv_rope":
        wires = {"kv": stage.outputs[0].wire, "window": state_wire(layer, "window"), "positions": "case.positions"}
        ring = KvCache(dtype=op.dtype, sliding_window=window)
        return [stage, replace(stage, op=ring, inputs=wires, name=f"layers.{layer}.kv_cache", params={}, covers=())]
    if isinstance(op, SinkAttention):
        wires = {**stage.inputs, "kv": f"layers.{layer}.kv_cache.keys"}
        return [replace(stage, op=cached(CachedAttention, op), inputs=wires)]
    cached_kind: type[Component]
    if isinstance(op, CsaCompressor):
        cached_kind, names, prefix = CachedCsaCompressor, OVERLAP, ""
    elif isinstance(op, HcaCompressor):
        cached_kind, names, prefix = CachedHcaCompressor, OPEN, ""
    elif isinstance(op, LightningIndexer):
        cached_kind, names, prefix = CachedIndexer, OVERLAP, "index_"
    else:
        return [stage]
    caches = {name: state_wire(layer, prefix + name) for name in ("entries", *names.split())}
    return [replace(stage, op=cached(cached_kind, op), inputs={**stage.inputs, **caches})]


def _leaves(stage: Stage) -> dict[str, str]:
    """Where each cache content that a stage reads is written again."""
    there = {}
    for name, wire in stage.inputs.items():
        if ".cache." in wire:
            there[name] = f"{stage.name}.{'keys' if name == 'entries' else name}"
    return there
