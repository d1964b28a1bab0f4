"""The stages that keep something between calls: the window of keys, the compressors, the indexer.

Each is the component of a whole prompt with a second way to run. ``step`` continues one sequence in its real caches and
is what a session calls. ``compute`` is the same step with the caches as plain tensors on both ends, in logical order
(``production.cache.logical``): they are loaded into pages handed out in a scattered order, over poisoned memory, and
read back. So whoever compares this stage compares the code that decodes, and sees what it leaves behind.

Shapes as in docs/stages.md; the first position of a row is the number of tokens in its caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

from production.cache.csa import CsaState
from production.cache.hca import HcaState
from production.cache.logical import dump_state, load
from production.cache.pages import Paged
from production.cache.sequence import LayerCache, Layout, Sequence, Store, scattered
from production.component import Call, Component, Params, Port, port, ports, rounding
from production.compressor import CsaCompressor, HcaCompressor, finish
from production.errors import ProductionError
from production.indexer import LightningIndexer, choose, ready_entries, relu_scores
from production.linear import product

C = TypeVar("C", bound=Component)
SCATTER_SEED = 4


def cached(kind: type[C], op: Component) -> C:
    """A component of this kind with the configuration of ``op``, which it extends."""
    return kind(**{f.name: getattr(op, f.name) for f in fields(op)})


def state_ports(names: str, dims: Mapping[str, str], dtype: str = "fp32") -> dict[str, Port]:
    """Ports of cache contents by name; what comes in may be in the model's dtype, what goes out is promised."""
    return {name: port(dims[name], dtype) for name in names.split()}


DIMS = {
    "window": "B P D",
    "entries": "B T D",
    "open_kv": "B O C",
    "open_gate": "B O C",
    "overlap_kv": "B W D",
    "overlap_gate": "B W D",
}
OPEN = "open_kv open_gate"
OVERLAP = "open_kv open_gate overlap_kv overlap_gate"


def rows_of(
    layout: Layout, positions: Tensor, state: Mapping[str, Tensor], generator_seed: int = SCATTER_SEED
) -> list[tuple[Sequence, int]]:
    """A sequence per row, with its caches filled from logical tensors, and the length that they stand for."""
    batch, count = positions.shape
    lengths = positions[:, 0].tolist() if count else [0] * batch
    steps = torch.arange(count, device=positions.device)
    if not torch.equal(positions, positions[:, :1] + steps):
        raise ProductionError(
            "cache: positions", expected="consecutive positions in a row", came=str(positions.tolist())
        )
    store = Store(layout, tokens=max(lengths) + count, rows=batch, draft=0, device=positions.device)
    scattered(store, torch.Generator().manual_seed(generator_seed))
    found = []
    for row, length in enumerate(lengths):
        sequence = store.sequence()
        for layer in layout.kinds:
            load(sequence, layer, length, {name: tensor[row] for name, tensor in state.items()})
        found.append((sequence, length))
    return found


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Row results with a leading 1 as one batch."""
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


@dataclass(frozen=True, kw_only=True)
class KvCache(Component):
    """The keys that a call's queries may reach: those of the window before it, then its own. K = V.

    kv [B, S, D], window [B, P, D] -> keys [B, P + S, D] and the window after the call. Copies, nothing is rounded.
    """

    plan = rounding(out="bf16")
    takes = ports(kv=port("B S D"), window=port("B P D"), positions=port("B S", "int64"))
    gives = ports(keys=port("B L D"), window=port("B P D"))
    step_takes = ("kv",)

    sliding_window: int

    def compute(  # type: ignore[override]
        self, p: Params, call: Call, *, kv: Tensor, window: Tensor, positions: Tensor
    ) -> dict[str, Tensor]:
        layout = Layout({0: "sliding"}, self.sliding_window, 1, 1, kv.shape[-1], 0, self.act)
        done = []
        for row, (sequence, length) in enumerate(rows_of(layout, positions, {"window": window})):
            cache, end = sequence.layers[0], length + kv.shape[1]
            out = self.step(p, call, cache, length, kv=kv[row : row + 1])
            done.append({**out, "window": cache.keys.span(max(0, end - self.sliding_window + 1), end).unsqueeze(0)})
        return stacked(done)

    def step(self, p: Params, call: Call, cache: LayerCache, length: int, *, kv: Tensor) -> dict[str, Tensor]:
        # The past is read before the new keys are written: they take the places of keys that early queries still see.
        past = cache.keys.span(max(0, length - self.sliding_window + 1), length)
        cache.keys.put(length, kv[0])
        return {"keys": torch.cat((past, kv[0])).unsqueeze(0)}


def _layout(op: CsaCompressor | HcaCompressor, kind: str, width: int) -> Layout:
    return Layout({0: kind}, 1, op.compress_rate, op.compress_rate, width, 1, op.act)


@dataclass(frozen=True, kw_only=True)
class CachedCsaCompressor(CsaCompressor):
    """A CSA compressor that continues a sequence. keys: all entries so far; pooled: those that this call emits."""

    takes = ports(**CsaCompressor.takes, entries=port("B T D"), **state_ports(OVERLAP, DIMS, "bf16/fp32"))
    gives = ports(**CsaCompressor.gives, **state_ports(OVERLAP, DIMS))
    step_takes = ("x",)

    def compute(self, p: Params, call: Call, *, x: Tensor, positions: Tensor, **state: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return _recompute(self, "csa", p, call, x, positions, state)

    def step(self, p: Params, call: Call, cache: LayerCache, length: int, *, x: Tensor) -> dict[str, Tensor]:
        return _compress(self, p, call, cache, length, x)


@dataclass(frozen=True, kw_only=True)
class CachedHcaCompressor(HcaCompressor):
    """An HCA compressor that continues a sequence; outputs as those of CSA."""

    takes = ports(**HcaCompressor.takes, entries=port("B T D"), **state_ports(OPEN, DIMS, "bf16/fp32"))
    gives = ports(**HcaCompressor.gives, **state_ports(OPEN, DIMS))
    step_takes = ("x",)

    def compute(self, p: Params, call: Call, *, x: Tensor, positions: Tensor, **state: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return _recompute(self, "hca", p, call, x, positions, state)

    def step(self, p: Params, call: Call, cache: LayerCache, length: int, *, x: Tensor) -> dict[str, Tensor]:
        return _compress(self, p, call, cache, length, x)


def _recompute(
    op: CachedCsaCompressor | CachedHcaCompressor,
    kind: str,
    p: Params,
    call: Call,
    x: Tensor,
    positions: Tensor,
    state: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    done = []
    layout = _layout(op, kind, state["entries"].shape[-1])
    for row, (sequence, length) in enumerate(rows_of(layout, positions, state)):
        cache, end = sequence.layers[0], length + x.shape[1]
        out = op.step(p, Call(detail=True), cache, length, x=x[row : row + 1])
        assert cache.compressor is not None
        done.append(out | {name: t.unsqueeze(0) for name, t in dump_state(cache.compressor, end).items()})
    return stacked(done)


def emit(
    state: CsaState | HcaState, entries: Paged, length: int, x: Tensor, p: Params, eps: float, rope: object
) -> Tensor:
    """Pool the windows that close with tokens x [1, n, d] and store their keys; returns the pooled entries, fp32."""
    x = x.float()  # once for both products
    pooled = state.push(length, product(x, p, "kv_proj.")[0], product(x, p, "gate_proj.")[0], p["position_bias"])
    if pooled.shape[0]:
        first = length // state.rate
        keys = finish(pooled.unsqueeze(0), p["kv_norm.weight"], eps, rope, state.rate, first)  # type: ignore[arg-type]
        entries.put(first, keys[0].to(entries.flat.dtype))
    return pooled


def _compress(
    op: CachedCsaCompressor | CachedHcaCompressor, p: Params, call: Call, cache: LayerCache, length: int, x: Tensor
) -> dict[str, Tensor]:
    assert cache.compressor is not None
    assert cache.entries is not None
    pooled = emit(cache.compressor, cache.entries, length, x, p, op.rms_norm_eps, op.rope)
    if not call.detail:
        return {}
    keys = cache.entries.span(0, (length + x.shape[1]) // op.compress_rate)
    return {"pooled": pooled.unsqueeze(0), "keys": keys.unsqueeze(0)}


@dataclass(frozen=True, kw_only=True)
class CachedIndexer(LightningIndexer):
    """The indexer of a sequence that goes on. Its keys are read where they lie: one product per stretch of pages."""

    takes = ports(
        **LightningIndexer.takes,
        entries=port("B T DI"),
        **state_ports(OVERLAP, {**DIMS, "overlap_kv": "B W DI", "overlap_gate": "B W DI"}, "bf16/fp32"),
    )
    gives = ports(
        **LightningIndexer.gives, **state_ports(OVERLAP, {**DIMS, "overlap_kv": "B W DI", "overlap_gate": "B W DI"})
    )
    step_takes = ("x", "q_residual", "positions")

    def compute(  # type: ignore[override]
        self, p: Params, call: Call, *, x: Tensor, q_residual: Tensor, positions: Tensor, **state: Tensor
    ) -> dict[str, Tensor]:
        rate, done = self.compress_rate, []
        layout = Layout({0: "csa"}, 1, rate, rate, 1, self.index_head_dim, self.act)
        renamed = {f"index_{name}": tensor for name, tensor in state.items()}
        for row, (sequence, length) in enumerate(rows_of(layout, positions, renamed)):
            cache, here, end = sequence.layers[0], slice(row, row + 1), length + x.shape[1]
            asked = Call(picks=None if call.picks is None else call.picks[here])
            inputs = {"x": x[here], "q_residual": q_residual[here], "positions": positions[here]}
            out = self.step(p, asked, cache, length, **inputs)
            assert cache.indexer is not None
            done.append(out | {name: t.unsqueeze(0) for name, t in dump_state(cache.indexer, end).items()})
        return stacked(done)

    def step(
        self,
        p: Params,
        call: Call,
        cache: LayerCache,
        length: int,
        *,
        x: Tensor,
        q_residual: Tensor,
        positions: Tensor,
    ) -> dict[str, Tensor]:
        assert cache.indexer is not None
        assert cache.index is not None
        x = x.float()  # once for three products
        emit(cache.indexer, cache.index, length, x, p, self.rms_norm_eps, self.rope)
        count = (length + x.shape[1]) // self.compress_rate
        if call.picks is not None and not call.detail:
            return {"picks": call.picks}
        q, weight = self.queries(p, q_residual, positions), self.head_weight(p, x)
        parts = [relu_scores(q, view.unsqueeze(0), weight) for view in cache.index.views(count)]
        scores = torch.cat(parts, dim=-1) if parts else weight.new_empty(1, x.shape[1], 0)
        scores.masked_fill_(~ready_entries(positions, self.compress_rate, count), -torch.inf)
        picks = choose(scores, min(self.index_topk, count)) if call.picks is None else call.picks
        if not call.detail:
            return {"picks": picks}
        result = {"keys": cache.index.span(0, count).unsqueeze(0), "scores": scores, "picks": picks}
        if call.choice and call.picks is not None:
            result["chosen"] = choose(scores, min(self.index_topk, count))
        return result
