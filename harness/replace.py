"""``--replace STAGE=path.py:function``: a user's function in place of a production stage.

It is called as ``function(stage, **inputs)`` in both modes and returns a dict by output name. ``stage.run(...)`` is the
production stage; in a free run its picks are already fixed to the reference's. A function that chooses picks by itself
may take a keyword ``replay`` to get them; without it, tokens that it routes otherwise are grafted from the production
stage (``harness.picks``).
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from harness.types import Stage, UsageError, one_line

Function = Callable[..., Any]


def load(target: str) -> Function:
    """The function that ``path.py:function`` names."""
    file, sign, name = target.rpartition(":")
    if not sign or not file or not name:
        raise UsageError(f"--replace {target!r}: expected path.py:function")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"--replace {target!r}: there is no file {file!r}")
    spec = importlib.util.spec_from_file_location(f"_replacement_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--replace {target!r}: {file!r} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling in the user's file look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise UsageError(f"--replace {target!r}: loading raised {one_line(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, f in vars(module).items() if inspect.isfunction(f)]
        raise UsageError(f"--replace {target!r}: no function {name!r} in it; it has {', '.join(known) or 'none'}")
    return function  # type: ignore[no-any-return]


class Replayed:
    """A production stage as a replacement sees it: everything as it is, but ``run`` uses the replayed picks."""

    def __init__(self, stage: Stage, replay: Mapping[str, Tensor] | None) -> None:
        self._stage, self._replay = stage, replay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def run(self, **arguments: Any) -> dict[str, Tensor]:
        if self._replay:
            arguments.setdefault("replay", self._replay)
        return self._stage.run(**arguments)


def call(
    function: Function, target: str, stage: Stage, inputs: Mapping[str, Tensor], replay: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Call a replacement and check what it returns: whatever is wrong with it is the user's, not production's."""
    where = f"--replace {stage.name}={target}"
    extra = {"replay": replay} if "replay" in _keywords(function) else {}
    try:
        result = function(Replayed(stage, replay), **inputs, **extra)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{where}: the function raised {one_line(error)}") from error
    expected = {o.name for o in stage.outputs}
    if not isinstance(result, Mapping):
        raise UsageError(f"{where}: expected a dict by output name, got {type(result).__name__}")
    if wrong := sorted(map(str, set(result) ^ expected)):
        raise UsageError(f"{where}: expected the outputs {', '.join(sorted(expected))}; missing or unknown: {wrong[0]}")
    for name, value in result.items():
        if not isinstance(value, Tensor):
            raise UsageError(f"{where}: output {name!r} is {type(value).__name__}, expected a tensor")
    return dict(result)


def _keywords(function: Function) -> set[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
