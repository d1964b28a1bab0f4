"""What every reference stage shares: ports, parameters by canonical leaf, overrides, and the run itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.types import Role, UsageError
from reference.net import Net, cast

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Port:
    """One output of a stage (``harness.types.Output``)."""

    name: str
    wire: str
    dims: tuple[str, ...]
    dtype: str
    role: Role = "value"


def place(layer: int | None, kind: str) -> str:
    """The full name of a stage."""
    return kind if layer is None else f"layers.{layer}.{kind}"


class HFStage(ABC):
    """One named step of the Hugging Face model (``harness.types.Stage``).

    A subclass names its inputs, outputs and rounding plan, and computes in ``compute`` with the live modules of
    ``net``. Parameters that ``run`` overrides are swapped into those modules for the length of the call.
    """

    kind: str

    def __init__(self, net: Net, layer: int | None, kind: str) -> None:
        self.net = net
        self.layer = layer
        self.kind = kind
        self.name = place(layer, kind)

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, str]: ...

    @property
    @abstractmethod
    def outputs(self) -> Sequence[Port]: ...

    @property
    @abstractmethod
    def component(self) -> str: ...

    @abstractmethod
    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]: ...

    @property
    def points(self) -> Mapping[str, str]:
        """The rounding plan in bfloat16; ``plan`` rewords it for the other dtypes."""
        return {}

    @property
    def covers(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def plan(self) -> Mapping[str, str]:
        words = {"bf16": self.net.word, "fp32": self.net.wide}
        return {point: words.get(word, word) for point, word in self.points.items()}

    @property
    def config(self) -> Mapping[str, object]:
        """Every number of the config that some stage of this layer depends on, under Hugging Face's names."""
        g = self.net.geometry
        numbers: dict[str, object] = {k: v for k, v in vars(g).items() if isinstance(v, int | float | str)}
        numbers["compress_rates"] = dict(g.compress_rates)
        numbers["rope_parameters"] = {name: dict(rope) for name, rope in g.rope.items()}
        numbers["scaling"] = g.head_dim**-0.5
        numbers["index_softmax_scale"] = g.index_head_dim**-0.5
        numbers["index_weights_scale"] = g.index_n_heads**-0.5
        for name in g.rope:
            numbers[f"attention_scaling_{name}"] = getattr(self.net.model.model.rotary_emb, f"{name}_attention_scaling")
        if self.layer is not None:
            numbers["layer_type"] = g.layer_types[self.layer]
            numbers["mlp_layer_type"] = g.mlp_layer_types[self.layer]
            numbers["compress_rate"] = g.rate(self.layer)
            numbers["rope_layer_type"] = self.net.layer(self.layer).self_attn.rope_layer_type
        return numbers

    @property
    def params(self) -> Mapping[str, Tensor]:
        """Parameters by canonical leaf as the Hugging Face model holds them (decoded, in its dtype)."""
        value: dict[str, Tensor] = {}
        for leaf, group in self.net.checkpoint.leaves(self.name).items():
            value[leaf] = self.parameter(leaf, group[0].target)
        return value

    def parameter(self, leaf: str, target: str) -> Tensor:
        """One parameter by canonical leaf; stages whose module stores it otherwise override this."""
        return self.net.parameter(target)

    def targets(self, params: Tensors) -> dict[str, Tensor]:
        """Overrides by canonical leaf, checked and reworded to full Hugging Face names."""
        leaves = self.net.checkpoint.leaves(self.name)
        now = self.params
        for leaf, value in params.items():
            if leaf not in leaves:
                raise UsageError(
                    f"{self.name}: expected a parameter of {sorted(leaves)}, came {leaf!r}; name one of them"
                )
            if value.shape != now[leaf].shape:
                raise UsageError(
                    f"{self.name}: {leaf}: expected shape {list(now[leaf].shape)}, came {list(value.shape)}; give the "
                    "decoded parameter in the checkpoint's layout"
                )
        given = {leaf: cast(value.to(now[leaf].device), now[leaf].dtype) for leaf, value in params.items()}
        return self.assemble(given, now)

    def assemble(self, given: Tensors, now: Tensors) -> dict[str, Tensor]:
        """Full Hugging Face names of checked overrides; ``now`` holds the current values."""
        leaves = self.net.checkpoint.leaves(self.name)
        return {leaves[leaf][0].target: value for leaf, value in given.items()}

    def decoded(self) -> Mapping[str, Tensor]:
        """Parameters by canonical leaf, exact in float64 (tables int64), read from the checkpoint again."""
        return self.net.checkpoint.decoded(self.name)

    def run(
        self, *, params: Tensors | None = None, replay: Tensors | None = None, **inputs: Tensor
    ) -> dict[str, Tensor]:
        """Compute every output.

        ``params`` overrides parameters by canonical leaf (rounded to the dtype the model keeps them in); ``replay``
        gives ``picks`` to use instead of choosing. Raises UsageError for wrong names.
        """
        self._check_names(inputs)
        overrides = self.targets(params) if params else {}
        with torch.no_grad():
            return self.net.using(overrides, lambda: self.compute(inputs, replay or {}))

    def _check_names(self, inputs: Tensors) -> None:
        if set(inputs) != set(self.inputs):
            raise UsageError(f"{self.name}: expected inputs {sorted(self.inputs)}, came {sorted(inputs)}; name them so")

    def selection(self, outputs: Tensors) -> dict[str, Tensor]:
        """Scores of every candidate, for outputs of role picks: what the choice was made by."""
        return {}

    # Shorthand for subclasses.

    def wire(self, kind: str, output: str) -> str:
        return f"{place(self.layer, kind)}.{output}"

    def port(self, name: str, dims: str, dtype: str = "bf16", role: Role = "value") -> Port:
        """An output; ``bf16`` and ``fp32`` are reworded to what this side computes in."""
        word = {"bf16": self.net.word, "fp32": self.net.wide}.get(dtype, dtype)
        return Port(name, f"{self.name}.{name}", tuple(dims.split()), word, role)

    def weight_point(self, leaf: str = "weight") -> str:
        """How the model's copy of a weight relates to the checkpoint's: rounded to bf16 if packed, else exact."""
        entry = self.net.checkpoint.leaves(self.name)[leaf][0]
        return "bf16" if self.net.checkpoint.packed(entry) else "exact"


def origin(thing: Any) -> str:
    """``module:qualname`` of a class, function or instance."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}:{named.__qualname__}"
