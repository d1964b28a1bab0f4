"""Building both sides of a case from its import strings. What is wrong with a checkpoint is bad input, in one line."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from harness import select
from harness.types import Backed, Builder, DType, InvalidRun, Reference, Side, UsageError, one_line


def reference(spec: str, checkpoint: Path, dtype: DType) -> Reference:
    """The reference side that ``package.module:builder`` makes of a checkpoint."""
    return cast(Reference, _build(spec, checkpoint, dtype, "reference"))


def production(spec: str, checkpoint: Path, dtype: DType) -> Side:
    """The production side that ``package.module:builder`` makes of a checkpoint."""
    return _build(spec, checkpoint, dtype, "production")


def backed(side: Side, wishes: Sequence[str]) -> Side:
    """The side with the implementations that ``GLOB=torch|cuda|best`` texts name; later ones win."""
    if not wishes:
        return side
    if not isinstance(side, Backed):
        raise UsageError(f"--backend {wishes[0]!r}: this production side has no backends")
    names = [s.name for s in side.stages]
    choices: dict[str, str] = {}
    for text in wishes:
        glob, value = select.assignment(text, "--backend", "torch|cuda|best")
        if value not in ("torch", "cuda", "best"):
            raise UsageError(f"--backend {text!r}: expected torch, cuda or best, got {value!r}")
        choices.update(dict.fromkeys(select.stages(glob, names, "--backend", names), value))
    try:
        return side.with_backends(choices)
    except ValueError as error:
        raise UsageError(f"--backend: {' '.join(str(error).split())}") from error


def _build(spec: str, checkpoint: Path, dtype: DType, which: str) -> Side:
    builder = _resolve(spec, which)
    try:
        return builder(checkpoint, dtype=dtype)
    except (UsageError, InvalidRun):
        raise
    except Exception as error:
        # Builders report bad checkpoints with errors of their own, which the harness cannot import by name.
        if isinstance(error, ValueError | OSError) or type(error).__name__ == "SafetensorError":
            message = " ".join(str(error).split()) or type(error).__name__
            raise UsageError(f"{which}: {message}") from error
        raise


def _resolve(spec: str, which: str) -> Builder:
    module, sign, name = spec.partition(":")
    if not sign or not module or not name:
        raise UsageError(f"{which} {spec!r}: expected package.module:builder")
    try:
        loaded: Any = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{which} {spec!r} cannot be imported: {one_line(error)}") from error
    builder = getattr(loaded, name, None)
    if not callable(builder):
        raise UsageError(f"{which} {spec!r}: {module} has no callable {name!r}")
    return cast(Builder, builder)
