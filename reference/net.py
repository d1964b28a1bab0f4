"""One Hugging Face model with its checkpoint: what the stages of one side share.

The model is built three times at most from one checkpoint: at the checkpoint's precision, in float32, and in float64
for the oracle. All three are the same unmodified classes; only the tensors differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from reference import hf, nvfp4, rope
from reference.checkpoint import Checkpoint
from reference.geometry import Geometry
from reference.manifest import Entry, entries

T = TypeVar("T")

#: torch dtype of a contract's word
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class _Scope(nn.Module):
    """Gives ``functional_call`` a module whose forward is any code at all."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, body: Callable[[], Any]) -> Any:
        return body()


@dataclass(frozen=True)
class Net:
    """A model (``DeepseekV4ForCausalLM``) cut after ``depth`` layers, in dtype ``word`` (bf16, fp32 or fp64)."""

    checkpoint: Checkpoint
    model: Any
    depth: int
    word: str
    device: str
    _scope: _Scope = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_scope", _Scope(self.model))

    @property
    def geometry(self) -> Geometry:
        return self.checkpoint.geometry

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype: what ``bf16`` means in the stage table."""
        return DTYPES[self.word]

    @property
    def wide(self) -> str:
        """What ``fp32`` means in the stage table: float64 in the oracle."""
        return "fp64" if self.word == "fp64" else "fp32"

    def layer(self, index: int) -> Any:
        return self.model.model.layers[index]

    def parameter(self, target: str) -> Tensor:
        """A parameter or buffer by its full Hugging Face name."""
        owner, _, leaf = target.rpartition(".")
        value: Tensor = getattr(self.model.get_submodule(owner), leaf)
        return value

    def cut(self, depth: int) -> Net:
        """The same model ended after its first ``depth`` layers: a second Hugging Face model on the same tensors."""
        return self if depth == self.depth else self.twin(depth)

    def twin(self, depth: int) -> Net:
        """A second Hugging Face model of ``depth`` layers on the same tensors, with hooks and settings of its own."""
        shorter = hf.skeleton({**self.geometry.keywords, "num_hidden_layers": depth})
        own = self.model.state_dict()
        hf.fill(shorter, {name: own[name] for name in shorter.state_dict()}, self.device)
        if self.word == "fp64":
            hf.set_frequencies(shorter, rope.frequencies(self.geometry))
        return Net(self.checkpoint, shorter, depth, self.word, self.device)

    def using(self, overrides: Mapping[str, Tensor], body: Callable[[], T]) -> T:
        """Run ``body`` while the parameters of these full names are replaced by the tensors given."""
        if not overrides:
            return body()
        renamed = {f"inner.{name}": value for name, value in overrides.items()}
        result: T = torch.func.functional_call(self._scope, renamed, (body,), tie_weights=False)
        return result


def build(checkpoint: Checkpoint, word: str, depth: int, device: str) -> Net:
    """Decode the first ``depth`` layers (and what is outside layers) and fill a Hugging Face model with them.

    bf16 gives each parameter the dtype that ``from_pretrained(dtype=bfloat16)`` would; fp64 keeps the decoded values
    and replaces the rotary frequencies by float64 ones.
    """
    geometry = checkpoint.geometry
    keywords = {**geometry.keywords, "num_hidden_layers": depth}
    for key in ("layer_types", "mlp_layer_types"):  # transformers cuts compress_ratios to the depth, and refuses these
        if keywords.get(key) is not None:
            keywords[key] = keywords[key][:depth]
    model = hf.skeleton(keywords)
    plan = hf.stored_dtypes(model, DTYPES[word])
    groups: dict[str, list[Entry]] = {}
    for entry in entries(geometry, depth):
        groups.setdefault(entry.target, []).append(entry)
    state = {name: _assemble(checkpoint, group, plan[name]) for name, group in groups.items()}
    hf.fill(model, state, device)
    if word == "fp64":
        hf.set_frequencies(model, rope.frequencies(geometry))
    return Net(checkpoint, model, depth, word, device)


def _assemble(checkpoint: Checkpoint, group: list[Entry], dtype: torch.dtype) -> Tensor:
    """One Hugging Face parameter: a tensor, or a stack of experts ``[E, N, K]`` with gate above up.

    The stack is filled expert by expert: beside it there is one decoded expert at a time.
    """
    if group[0].expert is None:
        return _value(checkpoint, group[0], dtype)
    experts = checkpoint.geometry.n_routed_experts
    rows, columns = group[0].shape
    stack = torch.empty((experts, rows * len(group) // experts, columns), dtype=dtype)
    filled = [0] * experts
    for entry in group:
        assert entry.expert is not None
        first = filled[entry.expert]
        stack[entry.expert, first : first + rows] = _value(checkpoint, entry, dtype)
        filled[entry.expert] += rows
    return stack


def _value(checkpoint: Checkpoint, entry: Entry, dtype: torch.dtype) -> Tensor:
    value = checkpoint.rounded(entry) if dtype is torch.bfloat16 else None
    return cast(checkpoint.decode(entry), dtype) if value is None else value


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a decoded tensor once to ``dtype``; integers stay as they are."""
    if not value.is_floating_point() or value.dtype is dtype:
        return value
    if value.dtype is torch.float64 and dtype is torch.bfloat16:
        return nvfp4.to_bfloat16(value)
    return value.to(dtype)
