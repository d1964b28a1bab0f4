"""The stages that keep something between calls: each runs the Hugging Face module with a Hugging Face cache.

Caches come in and go out as plain tensors (``reference.cache``), so a stage stays a function of its inputs. Positions
of a row are consecutive and start at the number of tokens in its caches, the same for all rows of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.types import UsageError
from reference import cache as caches
from reference import hf
from reference.geometry import CSA
from reference.net import Net
from reference.stages.attention import AttnCore
from reference.stages.base import HFStage, Port, Tensors, origin
from reference.stages.compress import Compressor, Indexer
from reference.stages.shadow import NoPicks, Observer, shadow

DIMS = {"entries": "B T", "open_kv": "B O C", "open_gate": "B O C", "overlap_kv": "B W", "overlap_gate": "B W"}


class Keeper:
    """What these stages add to a stage: which cache contents they read and return. ``prefix`` is the indexer's."""

    net: Net
    layer: int | None
    prefix = ""

    @property
    def kept(self) -> list[str]:
        """Names of the contents, without the prefix."""
        assert self.layer is not None
        own = caches.names(self.net.geometry, self.layer)
        return [
            n.removeprefix(self.prefix) for n in own if n != "window" and n.startswith("index_") == bool(self.prefix)
        ]

    def state_wires(self) -> dict[str, str]:
        assert self.layer is not None
        return {name: caches.wire(self.layer, f"{self.prefix}{name}") for name in self.kept}

    def state_ports(self, stage: HFStage, width: str) -> list[Port]:
        """Ports of what is kept, without the entries: those are the stage's ``keys``."""
        ports = []
        for name in self.kept:
            if name != "entries":
                dims = DIMS[name] if name.startswith("open") else f"{DIMS[name]} {width}"
                ports.append(stage.port(name, dims, "fp32" if name == "overlap_gate" else "bf16"))
        return ports

    def cache(self, inputs: Tensors) -> tuple[Any, dict[str, Tensor]]:
        """A Hugging Face cache with this layer filled, and what was put in."""
        assert self.layer is not None
        given = {f"{self.prefix}{name}": inputs[name] for name in self.kept}
        cache = caches.new(self.net)
        caches.load(cache, self.layer, first_position(inputs["positions"]), given)
        return cache, given

    def after(self, cache: Any, given: Tensors) -> dict[str, Tensor]:
        """What is kept now, without the entries."""
        assert self.layer is not None
        found = caches.dump(self.net, cache, self.layer, given)
        return {n.removeprefix(self.prefix): t for n, t in found.items() if not n.endswith("entries")}


class KvCache(HFStage):
    """The keys that the queries of a call may reach. HF: ``update`` of the layer's cache.

    kv ``[B, S, D]``, window ``[B, P, D]``, positions ``[B, S]`` -> keys ``[B, P + S, D]`` and the window that is kept.
    """

    def __init__(self, net: Net, layer: int) -> None:
        super().__init__(net, layer, "kv_cache")

    @property
    def inputs(self) -> Mapping[str, str]:
        assert self.layer is not None
        window = caches.wire(self.layer, "window")
        return {"kv": self.wire("kv_rope", "kv"), "window": window, "positions": "case.positions"}

    @property
    def outputs(self) -> Sequence[Port]:
        return [self.port("keys", "B L D"), self.port("window", "B P D")]

    @property
    def points(self) -> Mapping[str, str]:
        return {"out": "bf16"}

    @property
    def params(self) -> Mapping[str, Tensor]:
        return {}

    def decoded(self) -> Mapping[str, Tensor]:
        return {}

    @property
    def component(self) -> str:
        assert self.layer is not None
        return origin(type(caches.new(self.net).layers[self.layer]).update)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        assert self.layer is not None
        cache, window = caches.new(self.net), {"window": inputs["window"]}
        caches.load(cache, self.layer, first_position(inputs["positions"]), window)
        kv = inputs["kv"].unsqueeze(1)  # [B, 1, S, D]
        keys, _ = cache.update(kv, kv, self.layer)
        return {"keys": keys[:, 0], **caches.dump(self.net, cache, self.layer, window)}


class CachedCompressor(Keeper, Compressor):
    """A compressor that continues: ``keys`` are all entries so far, ``pooled`` those that this call emits."""

    @property
    def inputs(self) -> Mapping[str, str]:
        return {**super().inputs, **self.state_wires()}

    @property
    def outputs(self) -> Sequence[Port]:
        return [*super().outputs, *self.state_ports(self, "D")]

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        module, (cache, given) = self.module, self.cache(inputs)
        norm = Observer(module.kv_norm)
        children: dict[str, torch.nn.Module] = {"kv_norm": norm}
        assert self.layer is not None
        if self.net.geometry.layer_types[self.layer] == CSA:
            children["indexer"] = NoPicks()
        keys, _ = shadow(module, children)(inputs["x"], None, inputs["positions"], cache, self.layer)  # [B, 1, T, D]
        pooled = norm.arguments[0] if norm.arguments else keys[:, 0, :0]
        return {"pooled": pooled, "keys": keys[:, 0], **self.after(cache, given)}


class CachedIndexer(Keeper, Indexer):
    """The indexer that continues: ``keys`` are all of its entries so far."""

    prefix = "index_"

    @property
    def inputs(self) -> Mapping[str, str]:
        return {**super().inputs, **self.state_wires()}

    @property
    def outputs(self) -> Sequence[Port]:
        return [*super().outputs, *self.state_ports(self, "DI")]

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        cache, given = self.cache(inputs)
        return {**self.look(inputs, replay, cache), **self.after(cache, given)}


class CachedAttnCore(AttnCore):
    """Attention over the window's keys before this call, the call's own, and all entries.

    kv is ``[B, L, D]`` with ``L >= S``; ``lengths`` counts from position 0.
    """

    @property
    def inputs(self) -> Mapping[str, str]:
        return {**super().inputs, "kv": self.wire("kv_cache", "keys")}

    def check(self, inputs: Tensors) -> None:
        total = first_position(inputs["positions"]) + inputs["positions"].shape[1]
        if not bool((inputs["lengths"] == total).all()):
            raise UsageError(
                f"case.lengths: expected {total} for every row, came {inputs['lengths'].tolist()}; run rows of one "
                "length together"
            )

    def window(self, inputs: Tensors) -> Tensor:
        cache = caches.new(self.net)
        for held in cache.layers:
            held.cumulative_length = first_position(inputs["positions"])
        own = inputs["kv"][:, -inputs["positions"].shape[1] :]
        build = hf.masking.create_sliding_window_causal_mask
        mask: Tensor = build(self.net.model.config, own, None, cache, position_ids=inputs["positions"])
        return mask


def first_position(positions: Tensor) -> int:
    """The number of tokens in the caches; UsageError unless rows are consecutive and start alike."""
    first = int(positions[0, 0])
    expected = torch.arange(first, first + positions.shape[1], device=positions.device)
    if not bool((positions == expected).all()):
        raise UsageError(
            f"case.positions: expected consecutive positions from {first} in every row, came {positions.tolist()}; "
            "run rows of one length together"
        )
    return first
