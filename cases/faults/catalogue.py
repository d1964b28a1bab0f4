"""What a fault of the catalogue is, and the few tools with which one is planted.

A fault is a function ``fault(stage, **inputs)`` that stands in a production stage's place, exactly as a user's
``--replace`` function does: it changes the stage's inputs, parameters, configuration or outputs, or swaps one function
of production's own code while the stage runs. It never reads the reference or the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., dict[str, Tensor]]
HISTORY = "project history"
DERIVED = "derived from the reference"
#: how a scenario changes what reaches the stage, by argument name: values that a trained text does not contain
Stress = Mapping[str, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Scenario:
    """What shows a fault. ``length`` 0: the case's own."""

    case: str = "tiny"
    phase: str = ""
    dtype: str = "native"
    length: int = 0

    @property
    def words(self) -> str:
        """As a reader should see it, and as the options of ``harness diff``."""
        length = f" --length {self.length}" if self.length else ""
        phase = f" --phase {self.phase}" if self.phase else ""
        dtype = "" if self.dtype == "native" else f" --dtype {self.dtype}"
        return f"--case {self.case}{length}{phase}{dtype}"


@dataclass(frozen=True)
class Fault:
    """One entry. ``stage`` is where it is planted, ``expected`` the stages of which one must be reported first."""

    id: str
    stage: str
    cause: str
    origin: str
    expected: tuple[str, ...] = ()
    cause_id: str = ""
    scenario: Scenario = Scenario()
    stress: Stress | None = None
    stressed: str = ""  # the stress in words
    waits_for: str = ""  # why one process on a CPU cannot show it
    function: Function | None = None

    def __post_init__(self) -> None:
        if not self.id or not self.origin or not self.cause:
            raise ValueError(f"fault {self.id!r}: expected an id, an origin and a cause")
        if (self.function is None) != bool(self.waits_for):
            raise ValueError(f"fault {self.id!r}: expected either a function or what it waits for")
        object.__setattr__(self, "expected", self.expected or (self.stage,))
        object.__setattr__(self, "cause_id", self.cause_id or self.id)

    @property
    def shown_in(self) -> str:
        """The scenario in words, its stress included."""
        return self.scenario.words + (f", {self.stressed}" if self.stressed else "")


CATALOGUE: dict[str, Fault] = {}


def add(entry: Fault) -> None:
    """Put an entry into the catalogue; ids are unique."""
    if entry.id in CATALOGUE:
        raise ValueError(f"fault {entry.id!r} is declared twice")
    CATALOGUE[entry.id] = entry


def fault(name: str, stage: str, cause: str, origin: str = DERIVED, **more: Any) -> Callable[[Function], Function]:
    """Declare the decorated function as a fault."""

    def register(function: Function) -> Function:
        add(Fault(name, stage, cause, origin, function=function, **more))
        return function

    return register


def waits(name: str, stage: str, cause: str, waits_for: str, origin: str) -> None:
    """Declare a fault that one process on a CPU cannot show."""
    add(Fault(name, stage, cause, origin, waits_for=waits_for))


@contextmanager
def swapped(owner: Any, **attributes: Any) -> Iterator[None]:
    """Attributes of a production module or class, replaced while the block runs."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def configured(stage: Any, inputs: Mapping[str, Tensor], **settings: Any) -> dict[str, Tensor]:
    """Run the stage with other settings of its component."""
    inner = getattr(stage, "_stage", stage)
    made: dict[str, Tensor] = replace(inner, op=replace(inner.op, **settings)).run(**inputs)
    return made


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of the last axis, whose size is a power of two."""
    size, y, step = x.shape[-1], x.float(), 1
    while step < size:
        pairs = y.unflatten(-1, (-1, 2, step))
        y = (pairs[..., 0, :] + pairs[..., 1, :]).unsqueeze(-2)
        other = (pairs[..., 0, :] - pairs[..., 1, :]).unsqueeze(-2)
        y = torch.cat((y, other), dim=-2).flatten(-3)
        step *= 2
    return (y / math.sqrt(size)).to(x.dtype)


def bf16(x: Tensor) -> Tensor:
    """Rounded to bf16, in its own dtype."""
    return x.bfloat16().to(x.dtype)
