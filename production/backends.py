"""Which components have a kernel, why it may be unavailable, and a model whose stages use it.

Nothing falls back: a stage asked to use a backend that is missing or cannot run here is an error that says why.
``best`` is CUDA where the component has a kernel that can run here, and torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from production.component import Component
from production.cuda import loader
from production.cuda.hyper import STREAMS, CudaHyperConnection, CudaHyperHead, CudaResidualMix
from production.errors import ProductionError
from production.hyper_connection import HyperConnection, ResidualMix
from production.hyper_head import HyperHead
from production.stage import Stage

CHOICES = ("torch", "cuda", "best")
KERNELS: Mapping[type[Component], type[Component]] = {
    HyperConnection: CudaHyperConnection,
    ResidualMix: CudaResidualMix,
    HyperHead: CudaHyperHead,
}


def backends(stage: Stage) -> dict[str, str | None]:
    """Backend -> why it cannot be used for this stage here, None where it can."""
    if type(stage.op) not in KERNELS:
        return {"torch": None, "cuda": "no kernel"}
    if stage.op.dtype != "bf16":
        return {"torch": None, "cuda": f"the kernel stores bf16, the model {stage.op.dtype}"}
    if (streams := stage.sizes.get("N", STREAMS)) != STREAMS:
        return {"torch": None, "cuda": f"the kernel has {STREAMS} streams, the model {streams}"}
    return {"torch": None, "cuda": loader.unavailable()}


def with_backend(stage: Stage, choice: str) -> Stage:
    """The stage with the implementation that ``choice`` (torch, cuda or best) means."""
    if choice not in CHOICES:
        raise ProductionError(f"{stage.name}: backend", expected=", ".join(CHOICES), came=repr(choice))
    why = backends(stage)["cuda"]
    if choice == "torch" or (choice == "best" and why is not None):
        return stage
    if why is not None:
        raise ProductionError(f"{stage.name}: backend cuda", expected="a kernel that can run here", came=why)
    settings = {f.name: getattr(stage.op, f.name) for f in fields(stage.op)}
    return replace(stage, op=KERNELS[type(stage.op)](**settings))
