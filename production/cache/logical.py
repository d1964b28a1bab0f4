"""Cache contents in logical order: what a layer keeps, as plain tensors without pages, rings or slack.

Names and shapes (one sequence; P = min(length, window - 1), O = length % m, T = length // m):

    window [P, D]                            keys of the last tokens, oldest first
    entries [T, D]                           compressed keys
    open_kv, open_gate [O, C] fp32           products C, Z of the open window (no position bias); C = 2 D, HCA: D
    overlap_kv, overlap_gate [m or 0, D]     CSA: Ca and its gate, bias included, of the last closed window, fp32
    index_...                                CSA: the same five of the indexer, D being its own head dim

``load`` writes such tensors into the caches of an empty sequence, ``dump`` reads them back.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from production.cache.csa import CsaState
from production.cache.hca import HcaState
from production.cache.pages import Paged
from production.cache.sequence import Layout, Sequence
from production.errors import ProductionError


def expected(layout: Layout, kind: str, length: int) -> dict[str, tuple[int, int]]:
    """Shapes by name for a layer of this kind."""
    shapes = {"window": (min(length, layout.window - 1), layout.head_dim)}
    if kind == "hca":
        shapes |= _compressed(length, layout.hca_rate, layout.head_dim, overlap=False)
    if kind == "csa":
        shapes |= _compressed(length, layout.csa_rate, layout.head_dim, overlap=True)
        inner = _compressed(length, layout.csa_rate, layout.index_dim, overlap=True)
        shapes |= {f"index_{name}": shape for name, shape in inner.items()}
    return shapes


def _compressed(length: int, rate: int, width: int, *, overlap: bool) -> dict[str, tuple[int, int]]:
    channels = 2 * width if overlap else width
    shapes = {"entries": (length // rate, width)}
    shapes |= dict.fromkeys(("open_kv", "open_gate"), (length % rate, channels))
    if overlap:
        shapes |= dict.fromkeys(("overlap_kv", "overlap_gate"), (rate if length >= rate else 0, width))
    return shapes


def load(sequence: Sequence, layer: int, length: int, state: Mapping[str, Tensor]) -> None:
    """Write what is given of a layer's state; ``length`` tokens are in it. Dtypes are widened, never narrowed."""
    layout = sequence.store.layout
    shapes = expected(layout, layout.kinds[layer], length)
    for name, tensor in state.items():
        if tuple(tensor.shape) != shapes.get(name):
            raise ProductionError(
                f"layers.{layer} cache: {name}",
                expected=f"{list(shapes.get(name, ()))} for {length} tokens",
                came=str(list(tensor.shape)),
            )
    cache = sequence.layers[layer]
    if "window" in state:
        _fill(cache.keys, length - state["window"].shape[0], state["window"])
    if cache.compressor is not None and cache.entries is not None:
        _load(cache.compressor, cache.entries, length, state, "")
    if cache.indexer is not None and cache.index is not None:
        _load(cache.indexer, cache.index, length, state, "index_")


def _fill(paged: Paged, first: int, rows: Tensor) -> None:
    paged.put(first, rows.to(paged.flat.dtype))


def _load(to: CsaState | HcaState, entries: Paged, length: int, state: Mapping[str, Tensor], prefix: str) -> None:
    if f"{prefix}entries" in state:
        _fill(entries, 0, state[f"{prefix}entries"])
    if f"{prefix}open_kv" in state:
        kv, gate = state[f"{prefix}open_kv"], state[f"{prefix}open_gate"]
        to.open.write(length - kv.shape[0], kv.float(), gate.float())
    if isinstance(to, CsaState) and f"{prefix}overlap_kv" in state:
        kv, gate = state[f"{prefix}overlap_kv"], state[f"{prefix}overlap_gate"]
        if kv.shape[0]:
            to.keep_overlap(length // to.rate - 1, kv.float().unsqueeze(0), gate.float().unsqueeze(0))


def dump(sequence: Sequence, layer: int, length: int) -> dict[str, Tensor]:
    """Everything a layer keeps, as copies. ``length`` may be that of a call whose layers have all been run."""
    cache, window = sequence.layers[layer], sequence.store.layout.window
    state = {"window": cache.keys.span(max(0, length - window + 1), length)}
    if cache.compressor is not None and cache.entries is not None:
        state |= _dump(cache.compressor, cache.entries, length, "")
    if cache.indexer is not None and cache.index is not None:
        state |= _dump(cache.indexer, cache.index, length, "index_")
    return state


def _dump(of: CsaState | HcaState, entries: Paged, length: int, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}entries": entries.span(0, length // of.rate), **dump_state(of, length, prefix)}


def dump_state(of: CsaState | HcaState, length: int, prefix: str = "") -> dict[str, Tensor]:
    """The open window and the overlap, as copies."""
    kv, gate = of.open.pending(length)
    state = {f"{prefix}open_kv": kv.clone(), f"{prefix}open_gate": gate.clone()}
    if isinstance(of, CsaState):
        overlap = of.overlap(length)
        kv, gate = (of.overlap_kv[0, :0], of.overlap_gate[0, :0]) if overlap is None else overlap
        state |= {f"{prefix}overlap_kv": kv.clone(), f"{prefix}overlap_gate": gate.clone()}
    return state
