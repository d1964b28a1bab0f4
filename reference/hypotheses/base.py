"""What a hypothesis is: an oracle stage computed again, in float64, with one known mistake in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from reference.oracle import OracleStage

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Variant:
    """One form of a mistake: outputs by name, those that it reaches; and what it was computed with, if by the stage."""

    outputs: Tensors
    params: Tensors | None = None
    inputs: Tensors | None = None


@dataclass(frozen=True)
class Scene:
    """A failing stage: the oracle's, its float64 inputs, right outputs, picks in use, and what production returned.

    ``produced`` serves discrete choices only (which expert's weights these are), never to fit a number.
    """

    stage: OracleStage
    inputs: Tensors
    outputs: Tensors
    produced: Tensors = field(default_factory=dict)
    given: Tensors | None = None

    def again(self, params: Tensors | None = None, **inputs: Tensor) -> Variant:
        """The stage with other parameters or inputs, everything else as it was."""
        changed = {**self.inputs, **inputs}
        return Variant(self.stage.evaluate(changed, params, self.given), params, changed)


Mutate = Callable[[Scene], Iterator[Variant | Tensors]]


@dataclass(frozen=True)
class Hypothesis:
    """A known mistake. ``mutate`` yields its variants: outputs by name, those that the mistake reaches."""

    id: str
    kinds: frozenset[str]  # stages it applies to, without layer
    text: str
    mutate: Mutate


def hypothesis(id: str, kinds: str, text: str) -> Callable[[Mutate], Hypothesis]:
    """Declare a mutation as a hypothesis; ``kinds`` are separated by spaces."""
    return lambda mutate: Hypothesis(id, frozenset(kinds.split()), text, mutate)
