"""The vocabulary every part of the harness shares: stages, sides, judged values and errors.

Nothing here knows a model. A *side* (reference, oracle, production, or a recorded trace) is a list of *stages*; a
stage turns named tensors into named tensors. Tensors travel between stages over *wires*, named
``<stage>.<output>`` (``layers.2.attn_norm.x``) or ``case.<input>`` (``case.input_ids``), and both sides use the same
wire names. Production implements these protocols by shape alone: it never imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:  # the command line answers usage errors and --help without paying for torch
    from torch import Tensor

Mode = Literal["local", "free"]
DType = Literal["native", "fp32"]
Bypass = Literal["production", "reference", "direct"]
#: value: judged by margin, cost and free error. exact: equal bit for bit. picks: a set of indices per row (-1 absent).
#: stat: a summary of the stage (entropy, sink mass), judged like a value and shown per head.
Role = Literal["value", "exact", "picks", "stat"]


class Output(Protocol):
    """What a stage promises about one tensor it returns."""

    @property
    def name(self) -> str: ...
    @property
    def wire(self) -> str: ...
    @property
    def dims(self) -> tuple[str, ...]:
        """One letter or word per axis, e.g. ``("B", "S", "H", "D")``; docs/stages.md is the legend."""
        ...

    @property
    def dtype(self) -> str:
        """``bf16 fp32 fp64 int64 bool``: what this side promises to return."""
        ...

    @property
    def role(self) -> Role: ...


@runtime_checkable
class Stage(Protocol):
    """One named step of one side."""

    @property
    def name(self) -> str: ...
    @property
    def layer(self) -> int | None: ...
    @property
    def inputs(self) -> Mapping[str, str]:
        """Argument name -> wire it reads."""
        ...

    @property
    def outputs(self) -> Sequence[Output]: ...
    @property
    def covers(self) -> tuple[str, ...]:
        """Names of the reference stages that this one stands for; ``(name,)`` unless it is fused."""
        ...

    @property
    def component(self) -> str:
        """``module:qualname`` of the code that runs."""
        ...

    @property
    def plan(self) -> Mapping[str, str]:
        """The rounding plan: rounding point -> dtype (docs/stages.md lists the points of each stage).

        A fused stage may put the covered stage in front (``layers.2.attn_norm.out``); a bare point holds for all.
        """
        ...

    @property
    def config(self) -> Mapping[str, object]: ...
    @property
    def params(self) -> Mapping[str, Tensor]:
        """Parameters by canonical leaf name, in the checkpoint's layout and dtype (NVFP4 stays packed)."""
        ...

    def decoded(self) -> Mapping[str, Tensor]:
        """Parameters as this side will use them: float64 (or integers), unpacked and unpermuted.

        Keys are leaf names; a fused stage puts the covered stage in front (``layers.2.q_a.weight``).
        """
        ...

    def run(
        self,
        *,
        params: Mapping[str, Tensor] | None = None,
        replay: Mapping[str, Tensor] | None = None,
        **inputs: Tensor,
    ) -> dict[str, Tensor]:
        """Compute every output. ``params`` overrides parameters; ``replay`` gives picks that are used, not chosen."""
        ...


@runtime_checkable
class DirectStage(Stage, Protocol):
    """A stage that also knows the direct-residual arithmetic; ``direct_with`` names its partner stage.

    ``direct`` gets those of the stage's inputs that exist (a mix has no post or comb then) and may return fewer
    outputs.
    """

    @property
    def direct_with(self) -> str: ...
    def direct(self, **inputs: Tensor) -> dict[str, Tensor]: ...


class Judged(NamedTuple):
    """An oracle value with the spread that a rounding plan allows around it, all float64 and of one shape.

    For an output of role ``picks`` the value is the selection score of every candidate (``-inf``: not eligible) and
    the spread is that of the score.
    """

    value: Tensor
    rss: Tensor  # root sum of squares of the plan's roundings, first order
    total: Tensor  # their plain sum: no rounding pattern can exceed it, to first order


class Side(Protocol):
    """An ordered list of stages and where they come from."""

    @property
    def stages(self) -> Sequence[Stage]: ...
    @property
    def provenance(self) -> Mapping[str, str]:
        """Versions, checkpoint, dtype, device: what a reader needs to trust or repeat the run."""
        ...


@runtime_checkable
class Backed(Side, Protocol):
    """A side whose stages have several implementations."""

    def backends(self, name: str) -> Mapping[str, str | None]:
        """Backend -> why the stage cannot use it on this machine, None where it can."""
        ...

    def with_backends(self, choices: Mapping[str, str]) -> Side:
        """The same side with other implementations of some stages; a ValueError says why one cannot be had."""
        ...


class Oracle(Side, Protocol):
    """The reference in float64; the same stage names and wires."""

    def judge(
        self,
        stage: str,
        inputs: Mapping[str, Tensor],
        *,
        plan: Mapping[str, str],
        given: Mapping[str, Tensor] | None = None,
    ) -> Mapping[str, Judged]:
        """The stage's outputs on ``inputs`` (upcast exactly) and the spread of ``plan``.

        ``given`` holds picks that were made elsewhere: weights are then computed for those picks, in their order.
        """
        ...


class Suspect(NamedTuple):
    """What a stage would return with one known mistake in it: judged outputs by name, those that it reaches."""

    id: str
    text: str  # the cause in words
    outputs: Mapping[str, Judged]


@runtime_checkable
class SuspectingOracle(Protocol):
    """An oracle that can make known mistakes. Several suspects may share an id: variants of one mistake."""

    def suspects(
        self,
        stage: str,
        inputs: Mapping[str, Tensor],
        produced: Mapping[str, Tensor],
        *,
        plan: Mapping[str, str],
        given: Mapping[str, Tensor] | None = None,
    ) -> Iterator[Suspect]: ...


@dataclass(frozen=True)
class Check:
    """One certification step: that the reference side is the unmodified model."""

    name: str
    ok: bool
    detail: str = ""


class Reference(Side, Protocol):
    """The reference side: a callable model that can certify itself and be raised to float64."""

    def oracle(self) -> Oracle: ...
    def certify(self, case: Mapping[str, Tensor], wires: Mapping[str, Tensor]) -> Iterable[Check]:
        """Compare composed wires, bit for bit, with what hooks capture in the untouched model.

        ``case`` holds the case inputs by bare name (``input_ids``); ``wires`` what was composed, by wire name: a run
        of some layers holds the wires up to the last of them only.
        """
        ...

    def logical_dtype(self) -> str: ...


@runtime_checkable
class Steps(Side, Protocol):
    """A side as stages of *one call that continues sequences*: what is kept between calls travels over wires.

    A cache content enters a call as a case input (``case.layers.2.cache.window``) and leaves on the wire of a stage's
    output; ``state`` says which becomes which. Both sides use the same names and logical orders (docs/stages.md).
    """

    @property
    def state(self) -> Mapping[str, str]: ...
    def empty(self, batch: int) -> dict[str, Tensor]:
        """What is kept before the first token, by the wire on which it enters."""
        ...


class StepOracle(Oracle, Steps, Protocol):
    """The oracle of such calls."""


@runtime_checkable
class StepReference(Reference, Steps, Protocol):
    """The reference of such calls. ``certify`` gets caches among the case inputs."""

    def oracle(self) -> StepOracle: ...
    def certify_history(self, calls: Sequence[Tensor], state: Mapping[str, Tensor]) -> Iterable[Check]:
        """Feed the untouched model call after call (ids ``[B, S]``); what it keeps must be ``state``, bit for bit."""
        ...


#: (stage, inputs that exist, picks to use or None) -> outputs: computes a stage in place of its component
Compute = Callable[[Stage, dict[str, "Tensor"], "Tensor | None"], Mapping[str, "Tensor"]]


class Session(Protocol):
    """Rows of one length with caches of their own kind, fed one call after the other."""

    def feed(
        self,
        input_ids: Tensor,
        *,
        replay: Mapping[str, Tensor] | None = None,
        tap: Callable[[str, Mapping[str, Tensor]], None] | None = None,
    ) -> Tensor:
        """Continue all rows by ids ``[B, S]``; returns logits ``[B, S, V]``. ``replay`` gives picks by wire."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What is kept now, by the wire on which it enters a call."""
        ...


@runtime_checkable
class StepProduction(Steps, Protocol):
    """Production of such calls, which also has real caches."""

    def session(self, *, rows: int, tokens: int, ways: Mapping[str, Compute] | None = None) -> Session: ...


class Builder(Protocol):
    """What the import strings of a case name (``reference.build:model``): checkpoint folder in, side out.

    A ``ValueError``, ``OSError`` or ``SafetensorError`` raised while building is bad input: its message is one line.
    """

    def __call__(self, checkpoint: Path, *, dtype: DType) -> Side: ...


class UsageError(Exception):
    """Bad input: what was expected, what came, what to do. One line; the CLI prints it and exits 2."""


class InvalidRun(Exception):
    """The comparison can mean nothing (reference broken, stale or uncertified). The CLI exits 3."""


def one_line(error: BaseException) -> str:
    """An exception as one line of at most 260 characters: its type and its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:240]}" if text else type(error).__name__
