"""Running stages over an environment of wires: whose inputs, which arithmetic, which picks.

One function runs a stage in each of the ways that a plan knows. What goes wrong *inside a production stage* comes back
as an ``Outcome`` with an error, because it is a finding; what goes wrong on the reference's side raises InvalidRun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness import replace
from harness.judge.ulp import DTYPES, FORMATS
from harness.replace import Function
from harness.types import InvalidRun, Stage, one_line

Wires = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What a production stage returned, by output name, or why it returned nothing."""

    outputs: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None


def upcast(tensor: Tensor) -> Tensor:
    """A float tensor as float64 (exact); anything else as it is."""
    return tensor.double() if tensor.is_floating_point() else tensor


def widen(tensor: Tensor, dtype: str) -> Tensor:
    """A float tensor in the dtype that a side declares for its wire."""
    target = DTYPES.get(dtype, tensor.dtype)
    return tensor.to(target) if tensor.is_floating_point() and target.is_floating_point else tensor


def narrows(tensor: Tensor, dtype: str) -> bool:
    """Whether that cast would lose bits."""
    names = [name for name, t in DTYPES.items() if t == tensor.dtype]
    return bool(names) and names[0] in FORMATS and dtype in FORMATS and FORMATS[dtype][0] < FORMATS[names[0]][0]


def gather(stage: Stage, wires: Mapping[str, Tensor], *, optional: bool = False) -> dict[str, Any]:
    """A stage's inputs by argument name; a missing wire is a KeyError unless ``optional``."""
    return {argument: wires[wire] for argument, wire in stage.inputs.items() if not optional or wire in wires}


def missing(stage: Stage, wires: Mapping[str, Tensor]) -> list[str]:
    """Wires that a stage reads and nobody has written."""
    return [wire for wire in stage.inputs.values() if wire not in wires]


@torch.no_grad()
def run_trusted(stage: Stage, wires: Mapping[str, Tensor], replay: Mapping[str, Tensor] | None, direct: bool) -> Wires:
    """Run a stage of the reference or the oracle; returns its outputs by wire."""
    try:
        if direct:
            outputs = stage.direct(**gather(stage, wires, optional=True))  # type: ignore[attr-defined]
        else:
            outputs = stage.run(replay=replay, **gather(stage, wires)) if replay else stage.run(**gather(stage, wires))
    except Exception as error:
        raise InvalidRun(f"the reference's own {stage.name} raised {one_line(error)}") from error
    return {o.wire: outputs[o.name] for o in stage.outputs if o.name in outputs}


def compose(
    stages: Sequence[Stage], names: Iterable[str], inputs: Mapping[str, Tensor], direct: Iterable[str] = ()
) -> Wires:
    """Run reference stages one after the other from the case inputs; every wire is kept (they certify the run)."""
    wanted, plain = set(names), set(direct)
    wires: Wires = {f"case.{name}": tensor for name, tensor in inputs.items()}
    for stage in stages:
        if stage.name in wanted:
            wires.update(run_trusted(stage, wires, None, stage.name in plain))
    return wires


@dataclass(frozen=True)
class Way:
    """Who computes a production stage: itself, the direct arithmetic, the reference or a user's function."""

    stage: Stage
    direct: bool = False
    reference: Sequence[Stage] = ()  # in order; empty: not bypassed
    reference_dtypes: Mapping[str, str] = field(default_factory=dict)  # wire -> dtype
    function: Function | None = None
    target: str = ""
    elsewhere: Elsewhere | None = None  # runs it in a process of its own (harness.isolate)


Elsewhere = Callable[[Way, Mapping[str, Tensor], Mapping[str, Tensor] | None], Outcome]


@torch.no_grad()
def run_production(way: Way, wires: Mapping[str, Tensor], replay: Mapping[str, Tensor] | None) -> Outcome:
    """Run a production stage on ``wires``; an exception of its own is an outcome, one of a user's function is not."""
    stage = way.stage
    if way.reference:
        return Outcome(_as_reference(way, wires, replay))
    if way.elsewhere is not None:
        return way.elsewhere(way, wires, replay)
    if way.function is not None:
        outcome = Outcome(replace.call(way.function, way.target, stage, gather(stage, wires), replay))
        _synchronise(stage)
        return outcome
    try:
        if way.direct:
            outputs: Any = stage.direct(**gather(stage, wires, optional=True))  # type: ignore[attr-defined]
        elif replay:
            outputs = stage.run(replay=replay, **gather(stage, wires))
        else:
            outputs = stage.run(**gather(stage, wires))
    except Exception as error:  # whatever production raises is the finding
        _synchronise(stage)
        return Outcome(error=f"raised {one_line(error)}")
    _synchronise(stage)
    if not isinstance(outputs, Mapping):
        return Outcome(error=f"returned {type(outputs).__name__}, expected a dict by output name")
    return Outcome({name: t.detach() if isinstance(t, Tensor) else t for name, t in outputs.items()})


def _synchronise(stage: Stage) -> None:
    """Wait for the GPU: what a kernel broke must be laid to the stage that launched it, not to a later one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise InvalidRun(
            f"{stage.name} left the GPU unusable, so nothing after it means anything: {one_line(error)}; "
            "--isolate runs every stage in a process of its own and goes on"
        ) from error


def _as_reference(way: Way, wires: Mapping[str, Tensor], replay: Mapping[str, Tensor] | None) -> dict[str, object]:
    """The reference's callables on production's own inputs, in the dtypes that the reference declares for them."""
    read = {wire for stage in way.reference for wire in stage.inputs.values()}
    local = {wire: widen(wires[wire], way.reference_dtypes.get(wire, "")) for wire in read if wire in wires}
    for stage in way.reference:
        given = replay if replay and set(replay) <= {o.name for o in stage.outputs} else None
        local.update(run_trusted(stage, local, given, direct=False))
    return {o.name: widen(local[o.wire], o.dtype).clone() for o in way.stage.outputs if o.wire in local}
