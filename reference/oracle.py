"""The reference in float64: the same unmodified modules and stages, on a model of exactly decoded weights.

Nothing is rounded before float64: weights are decoded into it, rope frequencies are computed in it, inputs are raised
to it exactly. The spread that a rounding plan allows around a value comes from ``reference.bounds``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.types import InvalidRun, Judged, Suspect, UsageError
from reference import rope
from reference.bounds import spread
from reference.lift import float64, upcast
from reference.net import Net
from reference.stages.base import HFStage, Port
from reference.stages.graph import stages
from reference.stages.hyper import Hyper, Mix

if TYPE_CHECKING:
    from reference.hypotheses import Variant

#: inputs that index or count
INTEGERS = frozenset({"input_ids", "positions", "lengths", "picks"})
#: stages that choose, but whose judged outputs (keys, scores) do not depend on the choice
INDEPENDENT = frozenset({"indexer"})


class OracleStage:
    """A reference stage whose every tensor is float64 (integers stay). ``plan`` is empty: nothing is rounded.

    ``kind`` is the name without its layer. ``config`` is the reference stage's, with the float64 frequencies
    ``inv_freq_main`` and ``inv_freq_compress`` ``[R2]``; ``params`` are float64 by canonical leaf.
    """

    def __init__(self, inner: HFStage, frequencies: Mapping[str, Tensor]) -> None:
        self.inner = inner
        self.name = inner.name
        self.kind = inner.kind
        self.layer = inner.layer
        self.inputs: Mapping[str, str] = inner.inputs
        self.outputs: Sequence[Port] = inner.outputs
        self.covers = inner.covers
        self.component = inner.component
        self.plan: Mapping[str, str] = {}
        table = {f"inv_freq_{name}": value for name, value in frequencies.items()}
        self.config: Mapping[str, object] = {**inner.config, **table}

    @property
    def params(self) -> Mapping[str, Tensor]:
        return self.inner.params

    def decoded(self) -> Mapping[str, Tensor]:
        return self.inner.decoded()

    def run(
        self,
        *,
        params: Mapping[str, Tensor] | None = None,
        replay: Mapping[str, Tensor] | None = None,
        **inputs: Tensor,
    ) -> dict[str, Tensor]:
        """As the reference stage's ``run``, in float64; InvalidRun if an operator met a narrower float."""
        return self.evaluate({name: upcast(value) for name, value in inputs.items()}, params, replay)

    def evaluate(
        self, inputs: Mapping[str, Tensor], params: Mapping[str, Tensor] | None, replay: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        """``run`` on inputs that are float64 already."""
        # Judged values are float64 throughout, so ids may come back as such.
        inputs = {name: t.long() if name in INTEGERS else t for name, t in inputs.items()}
        given = {name: upcast(value) for name, value in (params or {}).items()}
        with float64():
            return self.inner.run(params=given, replay=replay, **inputs)

    def selection(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scores of every candidate by the name of the picks they decide, ``-inf`` where not eligible."""
        with float64():
            return self.inner.selection(outputs)


class DirectOracleStage(OracleStage):
    """``X_hc`` or ``X_mix``, which also know the direct-residual arithmetic."""

    def __init__(self, inner: Hyper | Mix, frequencies: Mapping[str, Tensor]) -> None:
        super().__init__(inner, frequencies)
        self._direct = inner.direct
        self.direct_with = inner.direct_with

    def direct(self, **inputs: Tensor) -> dict[str, Tensor]:
        wide = {name: upcast(value) for name, value in inputs.items()}
        with float64():
            return self._direct(**wide)


@dataclass(frozen=True)
class _Made:
    """A judgement and what it was made from; the tensors are held, so that ``is`` means the same contents."""

    stage: OracleStage
    inputs: Mapping[str, Tensor]
    plan: Mapping[str, str]
    judged: Mapping[str, Judged]


class HFOracle:
    """The oracle side (``harness.types.Oracle``)."""

    def __init__(self, net: Net, provenance: Mapping[str, str], *, cached: bool = False) -> None:
        frequencies = {name: value.to(net.device) for name, value in rope.frequencies(net.geometry).items()}
        self.stages: Sequence[OracleStage] = [
            DirectOracleStage(stage, frequencies) if isinstance(stage, Hyper | Mix) else OracleStage(stage, frequencies)
            for stage in stages(net, cached=cached)
        ]
        self.provenance = {**provenance, "dtype": "float64"}
        self._by_name = {stage.name: stage for stage in self.stages}
        self._last: _Made | None = None

    def judge(
        self,
        stage: str,
        inputs: Mapping[str, Tensor],
        *,
        plan: Mapping[str, str],
        given: Mapping[str, Tensor] | None = None,
    ) -> Mapping[str, Judged]:
        """The stage's outputs on ``inputs``, raised exactly to float64, with the spread of ``plan`` around them.

        An output of role picks has as value the selection score of every candidate (``[B, S, E]`` or ``[B, S, T]``);
        integers and booleans come as float64. With ``given`` picks the outputs that depend on the choice are computed
        for those, in their order. UsageError for an unknown stage.
        """
        node = self._by_name.get(stage)
        if node is None:
            raise UsageError(
                f"{stage}: expected a stage of this checkpoint, came none; `harness list stages` names them"
            )
        if node.kind in INDEPENDENT:
            return self._once(node, inputs, plan)
        return self._judge(node, inputs, plan, given)

    def suspects(
        self,
        stage: str,
        inputs: Mapping[str, Tensor],
        produced: Mapping[str, Tensor],
        *,
        plan: Mapping[str, str],
        given: Mapping[str, Tensor] | None = None,
    ) -> Iterator[Suspect]:
        """The stage with each known mistake in it, one variant after the other (``reference.hypotheses``).

        Where a mistake lies in parameters or inputs, the spread is that of the stage with them; elsewhere the right
        stage's, enlarged as the values are. Outputs of role picks are left out.
        """
        from reference.hypotheses import CATALOGUE, Scene, Variant  # built on this module

        node = self._by_name[stage]
        wide = {name: upcast(value) for name, value in inputs.items()}
        outputs = node.evaluate(wide, None, given)
        right = self.judge(stage, inputs, plan=plan, given=given)
        scene = Scene(node, wide, outputs, produced, given)
        values = [port.name for port in node.outputs if port.role != "picks"]
        for known in CATALOGUE:
            if node.kind not in known.kinds:
                continue
            for made in known.mutate(scene):
                variant = made if isinstance(made, Variant) else Variant(made)
                own = self._around(node, variant, plan, given)
                yield Suspect(
                    known.id,
                    known.text,
                    {
                        name: _judged(value, own[name]) if name in own else _enlarged(value, right[name])
                        for name, value in variant.outputs.items()
                        if name in values
                    },
                )

    def _around(
        self, node: OracleStage, variant: Variant, plan: Mapping[str, str], given: Mapping[str, Tensor] | None
    ) -> Mapping[str, tuple[Tensor, Tensor]]:
        """The spread of a stage with other parameters or inputs; empty where the formulas do not cover it."""
        if variant.inputs is None:
            return {}
        changed = SimpleNamespace(
            name=node.name, kind=node.kind, config=node.config, params={**node.params, **(variant.params or {})}
        )
        outputs = dict(variant.outputs)
        used = {port.name: outputs[port.name] for port in node.outputs if port.role == "picks"} or given
        try:
            return spread(changed, variant.inputs, outputs | node.selection(outputs), plan, used)
        except InvalidRun:
            return {}

    def _once(self, node: OracleStage, inputs: Mapping[str, Tensor], plan: Mapping[str, str]) -> Mapping[str, Judged]:
        """The judgement of a stage on which picks have no effect: asked for both sides' picks, it is made once."""
        last = self._last
        same = (
            last is not None and last.stage is node and last.plan == dict(plan) and last.inputs.keys() == inputs.keys()
        )
        if last is None or not same or any(last.inputs[name] is not value for name, value in inputs.items()):
            last = self._last = _Made(node, dict(inputs), dict(plan), self._judge(node, inputs, plan, None))
        return last.judged

    def _judge(
        self,
        node: OracleStage,
        inputs: Mapping[str, Tensor],
        plan: Mapping[str, str],
        given: Mapping[str, Tensor] | None,
    ) -> Mapping[str, Judged]:
        wide = {name: upcast(value) for name, value in inputs.items()}
        outputs = node.evaluate(wide, None, given)
        used = {port.name: outputs[port.name] for port in node.outputs if port.role == "picks"} or given
        outputs |= node.selection(outputs)
        around = spread(node, wide, outputs, plan, used)
        return {port.name: _judged(outputs[port.name], around.get(port.name)) for port in node.outputs}


def _enlarged(value: Tensor, right: Judged) -> Judged:
    """A changed value with the right one's spread, times the ratio of their RMS where that is above one."""
    value = value.double().expand(right.value.shape)
    sizes = [torch.where(t.isfinite(), t, 0.0).square().mean().sqrt() for t in (value, right.value)]
    ratio = (sizes[0] / sizes[1]).clamp(min=1.0) if value.numel() and bool(sizes[1] > 0) else 1.0
    return Judged(value, right.rss * ratio, right.total * ratio)


def _judged(value: Tensor, around: tuple[Tensor, Tensor] | None) -> Judged:
    exact = value.double()
    if around is None:  # an output that no rounding can move: ids, masks, copies
        zero = exact.new_zeros(exact.shape)
        return Judged(exact, zero, zero)
    rss, total = around
    return Judged(exact, rss.expand(exact.shape), total.expand(exact.shape))
