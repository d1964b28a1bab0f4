"""The reference as stages of one call that continues sequences: the same model, with its caches as wires.

Differences from the graph of one whole prompt (docs/stages.md): ``kv_cache`` stands between ``kv_rope`` and
``attn_core``; it, the compressors and the indexer read ``case.layers.N.cache.<name>`` and return what is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from harness.types import Check, one_line
from reference import cache as caches
from reference import certify as checks
from reference.capture import capture, forward
from reference.net import Net
from reference.oracle import HFOracle
from reference.stages.base import HFStage
from reference.stages.graph import stages


def carried(stages: Iterable[HFStage]) -> dict[str, str]:
    """Wire on which a cache content enters a call -> wire on which it leaves, for the next call."""
    found = {}
    for stage in stages:
        for name, wire in stage.inputs.items():
            if ".cache." in wire:
                found[wire] = f"{stage.name}.{'keys' if name == 'entries' else name}"
    return found


class StepOracle(HFOracle):
    """The oracle of a call that continues sequences."""

    def __init__(self, net: Net, provenance: Mapping[str, str]) -> None:
        super().__init__(net, provenance, cached=True)
        self.net = net
        self.state: Mapping[str, str] = carried(stage.inner for stage in self.stages)

    def empty(self, batch: int) -> dict[str, Tensor]:
        """The caches before the first token, by the wire on which they enter."""
        return caches.empty(self.net, batch)


class HFSteps:
    """The reference side of a call that continues sequences (``harness.types.StepReference``)."""

    def __init__(self, net: Net, provenance: Mapping[str, str], wide: Net) -> None:
        self.net, self.wide, self.provenance = net, wide, provenance
        self.stages: Sequence[HFStage] = stages(net, cached=True)
        self.state: Mapping[str, str] = carried(self.stages)

    @cached_property
    def _oracle(self) -> StepOracle:
        return StepOracle(self.wide, self.provenance)

    def oracle(self) -> StepOracle:
        """The same stages in float64."""
        return self._oracle

    def logical_dtype(self) -> str:
        return self.net.word

    def empty(self, batch: int) -> dict[str, Tensor]:
        """The caches before the first token, by the wire on which they enter."""
        return caches.empty(self.net, batch)

    def certify(self, case: Mapping[str, Tensor], wires: Mapping[str, Tensor]) -> Iterable[Check]:
        """One call of the untouched model on a cache that holds the case's caches, compared bit for bit."""
        return list(self._certify(case, wires))

    def certify_history(self, calls: Sequence[Tensor], state: Mapping[str, Tensor]) -> Iterable[Check]:
        """Feed the untouched model call after call (ids ``[B, S]`` each); its cache must hold ``state``."""
        net = self.net.cut(checks.reach(self.net, [wire.removeprefix("case.") for wire in state]))
        cache, batch, length = caches.new(net), calls[0].shape[0], 0
        for ids in calls:
            forward(net, ids, self._positions(ids, length), cache)
            length += ids.shape[1]
        own = caches.state_of(net, cache, batch)
        for wire, tensor in state.items():
            difference = checks.first_difference(tensor, own[wire])
            if difference is not None:
                return [Check("history", False, f"{wire}: composed and Hugging Face differ at {difference}")]
        return [Check("history", True)]

    def _positions(self, ids: Tensor, length: int) -> Tensor:
        return torch.arange(length, length + ids.shape[1], device=ids.device).expand_as(ids)

    def _certify(self, case: Mapping[str, Tensor], wires: Mapping[str, Tensor]) -> Iterator[Check]:
        ids, positions = case["input_ids"], case["positions"]
        length = int(positions[0, 0])
        state = {f"case.{name}": t for name, t in case.items() if ".cache." in name}
        yield checks.settings(self.net)
        yield checks.sources(self.net)
        net = self.net.cut(checks.reach(self.net, wires))
        cache = caches.filled(net, state, length)
        try:
            plain = forward(net, ids, positions, caches.filled(net, state, length))
            seen = capture(net, ids, positions, cache)
        except Exception as error:  # patched code may fail in any way
            yield Check("the model runs", False, f"its forward raised {one_line(error)}")
            return
        assert seen.logits is not None
        difference = checks.first_difference(plain, seen.logits)
        detail = "" if difference is None else f"logits: untapped and tapped differ at {difference}"
        yield Check("taps change nothing", difference is None, detail)
        yield checks.masks(seen)
        after = caches.state_of(net, cache, ids.shape[0])
        seen.wires |= {out: after[into] for into, out in self.state.items() if into in after}
        yield from checks.compared(seen, wires)
