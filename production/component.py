"""What a component is: ports, a rounding plan, and one pure function of parameters and inputs.

A component holds configuration only, as dataclass fields under the names of ``config.json``. Parameters come with each
call, so a call can override some of them, and nothing is computed at construction. In declarations ``bf16`` stands
for the model's dtype: a component built with ``dtype="fp32"`` reads it as fp32 in its plan and its ports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from production import weights

Params = Mapping[str, Tensor]

TORCH_DTYPE = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "int64": torch.int64,
    "bool": torch.bool,
}
DTYPE_NAME = {dtype: name for name, dtype in TORCH_DTYPE.items()}


@dataclass(frozen=True)
class Port:
    """One tensor that goes in or comes out. An input may accept several dtypes; an output promises one."""

    dims: tuple[str, ...]
    dtypes: tuple[str, ...]
    role: str = "value"


def rounding(**points: str) -> Mapping[str, str]:
    """A rounding plan: point -> dtype, as docs/stages.md lists the points of each stage. Absent: not rounded."""
    return MappingProxyType(points)


def ports(**named: Port) -> Mapping[str, Port]:
    """Ports by argument or output name."""
    return MappingProxyType(named)


def port(dims: str, dtype: str = "bf16", role: str = "value") -> Port:
    """``port("B S R2", "bf16/fp32")``: dims by their letters in docs/stages.md, dtypes that are accepted."""
    return Port(tuple(dims.split()), tuple(dtype.split("/")), role)


@dataclass(frozen=True)
class Call:
    """How one call is made."""

    detail: bool = True  # also compute the outputs that no other stage reads
    picks: Tensor | None = None  # picks to use instead of choosing some
    choice: bool = False  # with picks: also return, as ``chosen``, those that would have been made


def naming() -> Any:
    """A field that names ports, and so is no configuration."""
    return field(metadata={"naming": True})


@dataclass(frozen=True, kw_only=True)
class Component:
    """Base of all components. Subclasses set ``plan``, ``takes`` and ``gives`` and write ``compute``."""

    dtype: str = "bf16"  # the model's dtype, "bf16" or "fp32"

    plan: ClassVar[Mapping[str, str]] = {}
    takes: ClassVar[Mapping[str, Port]] = {}
    gives: ClassVar[Mapping[str, Port]] = {}
    replays: ClassVar[str | None] = None  # the output that a call may replay

    def compute(self, p: Params, call: Call, **inputs: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    @property
    def act(self) -> torch.dtype:
        """Dtype of stored activations."""
        return TORCH_DTYPE[self.dtype]

    @property
    def settings(self) -> dict[str, object]:
        """The configuration of this instance, for reports and for hypotheses about it."""
        values = asdict(self)
        return {f.name: values[f.name] for f in fields(self) if f.name != "dtype" and not f.metadata.get("naming")}

    def resolve(self, dtype: str) -> str:
        """A declared dtype as this instance means it."""
        return self.dtype if dtype == "bf16" else dtype


def decode_params(params: Params) -> dict[str, Tensor]:
    """Parameters as the components use them: float64 (or integers), unpacked, companions folded in."""
    decoded: dict[str, Tensor] = {}
    for name, tensor in params.items():
        if name.endswith(weights.COMPANIONS):
            continue
        if tensor.element_size() == 1:  # codes of some format
            decoded[name] = weights.operand(params, name.removesuffix("weight")).decoded()
        else:
            decoded[name] = tensor.double() if tensor.is_floating_point() else tensor
    return decoded
