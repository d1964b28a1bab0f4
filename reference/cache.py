"""Hugging Face's own caches, filled from and read into plain tensors in logical order.

Each layer of a ``DynamicCache`` is a ``DeepseekV4HCACache``, a ``DeepseekV4CSACache`` or a plain sliding layer.
What they keep between calls has one name here and on the production side:

    window [B, P, D]                        keys of the last ``P = min(length, sliding_window - 1)`` tokens
    entries [B, T, D]                       compressed keys, ``T = length // m``
    open_kv, open_gate [B, O, C]            projections of the open window, ``O = length % m``, without position bias
    overlap_kv, overlap_gate [B, m or 0, D] CSA: Ca of the last closed window; the gate with its bias, in float32
    index_...                               CSA: the same five of the indexer

Caches are passed by position: 5.20 calls the argument ``past_key_values``, 5.24 ``cache``, and a wrong name is
swallowed without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from reference import hf
from reference import net as nets
from reference.geometry import CSA, SLIDING, Geometry
from reference.net import Net

Tensors = Mapping[str, Tensor]
OPEN = ("open_kv", "open_gate")
OVERLAP = ("overlap_kv", "overlap_gate")
#: prefix of a content's name -> Hugging Face's key for it
PARTS: Mapping[str, str] = {"": "compressor", "index_": "indexer"}


def names(geometry: Geometry, layer: int) -> list[str]:
    """What a layer keeps."""
    kind = geometry.layer_types[layer]
    if kind == SLIDING:
        return ["window"]
    if kind != CSA:
        return ["window", "entries", *OPEN]
    return ["window", *(f"{prefix}{name}" for prefix in PARTS for name in ("entries", *OPEN, *OVERLAP))]


def wire(layer: int, name: str) -> str:
    """The wire on which a content enters a call."""
    return f"case.layers.{layer}.cache.{name}"


def shape(geometry: Geometry, layer: int, name: str, length: int) -> tuple[int, int]:
    """Rows and width of a content after ``length`` tokens."""
    if name == "window":
        return min(length, geometry.sliding_window - 1), geometry.head_dim
    rate, csa = geometry.rate(layer), geometry.layer_types[layer] == CSA
    width = geometry.index_head_dim if name.startswith("index_") else geometry.head_dim
    kind = name.removeprefix("index_")
    if kind == "entries":
        return length // rate, width
    if kind in OPEN:
        return length % rate, 2 * width if csa else width
    return (rate if length >= rate else 0), width


def empty(net: Net, batch: int) -> dict[str, Tensor]:
    """What is kept before the first token, by wire."""
    found = {}
    for layer in range(net.depth):
        for name in names(net.geometry, layer):
            # An open gate is a projection; when its window closes it gets the bias, which is float32.
            dtype = nets.DTYPES[net.wide] if name.endswith("overlap_gate") else net.dtype
            rows = shape(net.geometry, layer, name, 0)
            found[wire(layer, name)] = torch.empty(batch, *rows, dtype=dtype, device=net.device)
    return found


def new(net: Net) -> Any:
    """An empty cache of the model's own kind."""
    return hf.dynamic_cache(net.model.config)


def load(cache: Any, layer: int, length: int, state: Tensors) -> None:
    """Give one layer of an empty cache what it would hold after ``length`` tokens; absent names are left alone."""
    held = cache.layers[layer]
    held.cumulative_length = length
    if "window" in state and length:
        keys = state["window"].unsqueeze(1)  # [B, 1, P, D]
        held.lazy_initialization(keys, keys)
        held.keys = held.values = keys
    for prefix, key in PARTS.items():
        if f"{prefix}entries" in state:
            _load(held, prefix, key, state)


def _load(held: Any, prefix: str, key: str, state: Tensors) -> None:
    entries = state[f"{prefix}entries"]
    held.entry_count[key] = entries.shape[1]
    if entries.shape[1]:
        held.compressed_kv[key] = entries
    if state[f"{prefix}open_kv"].shape[1]:
        held.buffer_kv[key], held.buffer_gate[key] = (state[f"{prefix}{name}"] for name in OPEN)
    if f"{prefix}overlap_kv" in state and state[f"{prefix}overlap_kv"].shape[1]:
        held.overlap_kv[key], held.overlap_gate[key] = (state[f"{prefix}{name}"] for name in OVERLAP)


def dump(net: Net, cache: Any, layer: int, like: Tensors) -> dict[str, Tensor]:
    """What one layer of a cache holds, by name. ``like`` gives the form of contents that it does not hold yet."""
    return dict(_contents(net, cache.layers[layer], layer, like))


def _contents(net: Net, held: Any, layer: int, like: Tensors) -> Iterator[tuple[str, Tensor]]:
    wanted = [name for name in names(net.geometry, layer) if name in like]
    for name in wanted:
        if name == "window":
            own = None if held.keys is None or held.keys.numel() == 0 else held.keys[:, 0]
        else:
            prefix = "index_" if name.startswith("index_") else ""
            store = {"entries": "compressed_kv", "open_kv": "buffer_kv", "open_gate": "buffer_gate"}
            kind = name.removeprefix("index_")
            own = getattr(held, store.get(kind, kind))[PARTS[prefix]]
        yield name, like[name][:, :0] if own is None else own


def state_of(net: Net, cache: Any, batch: int) -> dict[str, Tensor]:
    """Everything a cache holds, by the wire on which it enters the next call."""
    blank = empty(net, batch)
    found: dict[str, Tensor] = {}
    for layer in range(net.depth):
        like = {name: blank[wire(layer, name)] for name in names(net.geometry, layer)}
        found |= {wire(layer, name): value for name, value in dump(net, cache, layer, like).items()}
    return found


def filled(net: Net, state: Tensors, length: int) -> Any:
    """A cache that holds ``state`` (by wire) after ``length`` tokens. Its tensors are copies: a call changes them."""
    cache = new(net)
    for layer in range(net.depth):
        own = {name: state[wire(layer, name)].clone() for name in names(net.geometry, layer)}
        load(cache, layer, length, own)
    return cache
