"""Float64 for code that asks for float32 by name, and the proof that nothing narrower took part.

The Hugging Face modules write ``.float()`` and ``torch.float32`` in many places. ``Lift`` turns every such request into
float64 while the modules run, unchanged; ``NothingNarrow`` watches the operators below and stops the run at the first
tensor of a narrower float type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.types import InvalidRun

NARROW = (torch.float32, torch.bfloat16, torch.float16)
_METHODS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class Lift(TorchFunctionMode):
    """Every cast to, or creation in, a float type narrower than float64 gives float64 instead."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _METHODS:
            return args[0].double()
        return func(*map(_lifted, args), **{key: _lifted(value) for key, value in (kwargs or {}).items()})


def _lifted(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


class NothingNarrow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises InvalidRun, naming the operator, when a narrow float tensor goes into or comes out of one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        _refuse_narrow(args, func)
        _refuse_narrow(kwargs, func)
        _refuse_narrow(result, func)
        return result


def _refuse_narrow(tree: Any, func: Any) -> None:
    if isinstance(tree, Tensor):
        if tree.dtype in NARROW:
            raise InvalidRun(
                f"the float64 oracle met {str(tree.dtype).removeprefix('torch.')} {list(tree.shape)} in {func}: "
                "its values would not be exact"
            )
    elif isinstance(tree, tuple | list):
        for item in tree:
            _refuse_narrow(item, func)
    elif isinstance(tree, dict):
        for item in tree.values():
            _refuse_narrow(item, func)


@contextmanager
def float64() -> Iterator[None]:
    """Run the modules of a float64 model entirely in float64, or raise InvalidRun."""
    with torch.no_grad(), NothingNarrow(), Lift():  # type: ignore[no-untyped-call]
        yield


def upcast(value: Tensor) -> Tensor:
    """Exact in float64; integers and booleans as they are."""
    return value.to(torch.float64) if value.is_floating_point() else value
