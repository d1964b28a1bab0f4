"""``harness list``: stages, cases and components, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from harness import case as case_files
from harness import select
from harness.case import Case
from harness.types import Backed, Side, Stage, UsageError

if TYPE_CHECKING:
    from torch import Tensor


def cases(out: TextIO) -> int:
    """Names and descriptions of the bundled cases."""
    for name in case_files.bundled():
        found = case_files.load(name)
        print(f"{name:<12} {found.description}", file=out)
    return 0


def stages(case: Case, layer: str, as_json: bool, out: TextIO) -> int:
    """Every production stage with inputs, outputs and parameters (both sides expose the same wires)."""
    side = _production(case)
    available = sorted({s.layer for s in side.stages if s.layer is not None})
    chosen = select.layers(layer, available)
    listed = [s for s in side.stages if (layer.strip() == "all" and s.layer is None) or s.layer in chosen]
    if as_json:
        json.dump([_described(s) for s in listed], out, indent=1)
        print(file=out)
        return 0
    for stage in listed:
        print(stage.name, file=out)
        for argument, wire in stage.inputs.items():
            print(f"    in   {argument:<28} {wire}", file=out)
        for o in stage.outputs:
            role = "" if o.role == "value" else f"  {o.role}"
            print(f"    out  {o.name:<28} [{','.join(o.dims)}] {o.dtype}{role}", file=out)
        for name, tensor in stage.params.items():
            print(f"    par  {name:<28} {_shape(tensor)} {_dtype(tensor)}", file=out)
    return 0


def components(case: Case, out: TextIO) -> int:
    """The code under test: which stages it computes and where it rounds."""
    groups: dict[str, list[Stage]] = {}
    side = _production(case)
    for stage in side.stages:
        groups.setdefault(stage.component, []).append(stage)
    for component, found in groups.items():
        leaves = ", ".join(dict.fromkeys(s.name.rpartition(".")[2] for s in found))
        plan = " ".join(f"{point}:{dtype}" for point, dtype in found[0].plan.items())
        print(f"{component:<48} {len(found):>3} stages: {leaves}", file=out)
        print(f"    rounds {plan or 'nowhere'}", file=out)
        if isinstance(side, Backed):
            there = side.backends(found[0].name)
            print(
                "    backends " + ", ".join(n if why is None else f"{n} ({why})" for n, why in there.items()), file=out
            )
    return 0


def _production(case: Case) -> Side:
    from harness import sides

    if not case.checkpoint.is_dir():
        raise UsageError(f"case {case.name}: the checkpoint folder {str(case.checkpoint)!r} does not exist")
    return sides.production(case.production, case.checkpoint, case.dtype)


def _described(stage: Stage) -> dict[str, Any]:
    outputs: Sequence[dict[str, Any]] = [
        {"name": o.name, "wire": o.wire, "dims": list(o.dims), "dtype": o.dtype, "role": o.role} for o in stage.outputs
    ]
    return {
        "name": stage.name,
        "layer": stage.layer,
        "covers": list(stage.covers),
        "component": stage.component,
        "plan": dict(stage.plan),
        "inputs": dict(stage.inputs),
        "outputs": outputs,
        "params": {n: {"shape": list(t.shape), "dtype": _dtype(t)} for n, t in stage.params.items()},
        "direct_with": getattr(stage, "direct_with", None),
    }


def _shape(tensor: Tensor) -> str:
    return f"[{','.join(map(str, tensor.shape))}]"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
