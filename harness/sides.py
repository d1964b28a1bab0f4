"""Building both sides of a case from its import strings. What is wrong with a checkpoint is bad input, in one line."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, cast

from harness.types import Builder, DType, InvalidRun, Reference, Side, UsageError, one_line


def reference(spec: str, checkpoint: Path, dtype: DType) -> Reference:
    """The reference side that ``package.module:builder`` makes of a checkpoint."""
    return cast(Reference, _build(spec, checkpoint, dtype, "reference"))


def production(spec: str, checkpoint: Path, dtype: DType) -> Side:
    """The production side that ``package.module:builder`` makes of a checkpoint."""
    return _build(spec, checkpoint, dtype, "production")


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
