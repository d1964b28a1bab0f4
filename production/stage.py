"""Stages: a component with its parameters, wired into the graph of docs/stages.md.

The classes have the shape that the harness expects of a side's stages; the harness is not imported. ``run`` checks
every input against the component's ports (name, dtype, dims, device) before anything is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from production.component import DTYPE_NAME, TORCH_DTYPE, Call, Component, Params, Port, decode_params
from production.errors import ProductionError


@dataclass(frozen=True)
class Output:
    """What a stage promises about one tensor it returns."""

    name: str
    wire: str
    dims: tuple[str, ...]
    dtype: str
    role: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One named step of the production side."""

    name: str
    layer: int | None
    inputs: Mapping[str, str]  # argument -> wire
    params: Mapping[str, Tensor]
    op: Component
    sizes: Mapping[str, int]  # dim -> size, where the configuration fixes it
    device: torch.device
    covers: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = field(init=False)

    def __post_init__(self) -> None:
        if set(self.inputs) != set(self.op.takes):
            raise TypeError(f"{self.name}: wires for {sorted(self.inputs)}, ports {sorted(self.op.takes)}")
        outputs = tuple(
            Output(name, f"{self.name}.{name}", p.dims, self.op.resolve(p.dtypes[0]), p.role)
            for name, p in self.op.gives.items()
        )
        object.__setattr__(self, "outputs", outputs)
        object.__setattr__(self, "covers", self.covers or (self.name,))

    @property
    def component(self) -> str:
        return f"{type(self.op).__module__}:{type(self.op).__qualname__}"

    @property
    def plan(self) -> dict[str, str]:
        return {point: self.op.resolve(dtype) for point, dtype in self.op.plan.items()}

    @property
    def config(self) -> dict[str, object]:
        return self.op.settings

    def decoded(self) -> dict[str, Tensor]:
        """Parameters as the component uses them: float64 or integers."""
        return decode_params(self.params)

    def run(
        self,
        *,
        params: Mapping[str, Tensor] | None = None,
        replay: Mapping[str, Tensor] | None = None,
        **inputs: Tensor,
    ) -> dict[str, Tensor]:
        """Compute every output. ``params`` overrides parameters by name; ``replay`` gives picks to use."""
        require_plain_fp32(self.name)
        return self.execute(inputs, params=params, replay=replay)

    def execute(
        self,
        inputs: Mapping[str, Tensor],
        *,
        detail: bool = True,
        params: Mapping[str, Tensor] | None = None,
        replay: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """``run`` without its look at the global precision; ``Model.forward`` looks once, and may turn detail off."""
        sizes = check_inputs(self, self.op.takes, inputs)
        call = Call(detail=detail, picks=self._replayed(replay, sizes))
        with torch.no_grad():
            return self.op.compute(self._merged(params), call, **inputs)

    def _merged(self, params: Mapping[str, Tensor] | None) -> Params:
        if not params:
            return self.params
        for name, tensor in params.items():
            own = self.params.get(name)
            if own is None:
                known = ", ".join(self.params) or "none"
                raise ProductionError(f"{self.name}: params", expected=f"names among {known}", came=name)
            if (tensor.dtype, tensor.shape, tensor.device) != (own.dtype, own.shape, own.device):
                raise ProductionError(f"{self.name}: params {name}", expected=describe(own), came=describe(tensor))
        return {**self.params, **params}

    def _replayed(self, replay: Mapping[str, Tensor] | None, sizes: dict[str, int]) -> Tensor | None:
        if not replay:
            return None
        name = self.op.replays
        if name is None or set(replay) != {name}:
            expected = f"only {name!r}" if name else "nothing: this stage chooses nothing"
            raise ProductionError(f"{self.name}: replay", expected=expected, came=", ".join(replay))
        own = self.op.gives[name]
        check_tensor(self, f"replay {name}", own, replay[name], sizes)
        return replay[name]


@dataclass(frozen=True, kw_only=True)
class DirectStage(Stage):
    """A stage that also knows the direct-residual arithmetic, together with its partner."""

    direct_with: str

    def direct(self, **inputs: Tensor) -> dict[str, Tensor]:
        """The plain residual path in place of hyper-connections (docs/stages.md); inputs it does not read may come."""
        op = self.op
        takes = {name: op.takes[name] for name in op.direct_takes}  # type: ignore[attr-defined]
        used = {name: tensor for name, tensor in inputs.items() if name in takes}
        check_inputs(self, takes, used)
        with torch.no_grad():
            return op.direct(**used)  # type: ignore[attr-defined, no-any-return]


def check_inputs(stage: Stage, takes: Mapping[str, Port], inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Names, dtypes, dims and device, before anything is computed; returns the sizes of the free dims."""
    if inputs.keys() != takes.keys():
        missing = [f"{n} (wire {stage.inputs[n]})" for n in takes if n not in inputs]
        came = ", ".join(inputs) or "none"
        raise ProductionError(
            f"{stage.name}: inputs",
            expected=", ".join(takes),
            came=came,
            fix=f"pass {', '.join(missing)}" if missing else "",
        )
    bound: dict[str, int] = {}
    for name, p in takes.items():
        check_tensor(stage, f"input {name}", p, inputs[name], bound)
    return bound


def check_tensor(stage: Stage, what: str, p: Port, tensor: Tensor, bound: dict[str, int]) -> None:
    """One tensor against its port; free dims are bound by the first tensor that has them."""
    if not isinstance(tensor, Tensor):
        raise ProductionError(f"{stage.name}: {what}", expected="a tensor", came=type(tensor).__name__)
    sizes = {**stage.sizes, **bound}
    allowed = [stage.op.resolve(dtype) for dtype in p.dtypes]
    good = tensor.dtype in [TORCH_DTYPE[dtype] for dtype in allowed] and tensor.dim() == len(p.dims)
    good = good and all(sizes.get(dim, size) == size for dim, size in zip(p.dims, tensor.shape, strict=True))
    if not good or tensor.device != stage.device:
        shape = ", ".join(f"{dim}={sizes[dim]}" if dim in sizes else dim for dim in p.dims)
        expected = f"{' or '.join(dict.fromkeys(allowed))} [{shape}] on {stage.device}"
        raise ProductionError(f"{stage.name}: {what}", expected=expected, came=describe(tensor))
    bound.update((dim, size) for dim, size in zip(p.dims, tensor.shape, strict=True) if dim not in stage.sizes)


def describe(tensor: Tensor) -> str:
    """``fp32 [1, 320, 4, 512] on cpu``"""
    name = DTYPE_NAME.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return f"{name} {list(tensor.shape)} on {tensor.device}"


def require_plain_fp32(where: str) -> None:
    """fp32 products must be fp32: no TF32 or bf16 passes, and no autocast around the call."""
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        raise ProductionError(
            where,
            expected="torch.get_float32_matmul_precision() 'highest'",
            came=repr(precision),
            fix="call torch.set_float32_matmul_precision('highest')",
        )
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            raise ProductionError(where, expected="no autocast", came=f"autocast on {kind}", fix="leave its context")
