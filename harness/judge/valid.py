"""Rule 1, *valid*: what can be compared at all, and who is to blame where it cannot.

INVALID is the reference's (or the harness's) fault: missing, non-finite, constant where the oracle is not, of another
shape than the oracle, or sharing storage with production, so that a tensor would be compared with itself.

FAIL is production's fault: a tensor that is missing, of the wrong shape or dtype, non-finite where the oracle is
finite, or zero everywhere where the oracle is not. Such a tensor is *unusable*: nothing downstream in a free run can be
judged.

SKIPPED is nobody's: a tensor that is empty by design (no compressed entry yet), or constant in the reference and the
oracle alike (cos and sin at position 0, the entropy over one key): equal values there tell nothing apart, so they are
no PASS, but a production value that deviates is still a FAIL.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from harness.judge.ulp import DTYPES, name_of
from harness.types import Output

EMPTY = "empty by design"
CONSTANT = "constant by design: reference and oracle hold one value everywhere, equality tells nothing"


def unusable(produced: object, declared: Output, shape: tuple[int, ...], oracle: Tensor | None = None) -> str | None:
    """Why production's tensor cannot be used, or None. ``oracle`` says where non-finite values and zeros belong."""
    if produced is None:
        return "never written: the stage returned no such output"
    if not isinstance(produced, Tensor):
        return f"returned {type(produced).__name__}, expected a tensor"
    if tuple(produced.shape) != shape:
        return f"shape {list(produced.shape)}, expected {list(shape)} [{','.join(declared.dims)}]"
    if declared.dtype not in DTYPES:
        return f"declares the unknown dtype {declared.dtype!r}; expected one of {', '.join(DTYPES)}"
    if produced.dtype != DTYPES[declared.dtype]:
        return f"dtype {name_of(produced.dtype)}, its own declaration says {declared.dtype}"
    if not produced.is_floating_point() or not produced.numel():
        return None
    if all_finite(produced) and (oracle is None or all_finite(oracle)):
        return _zeros(produced, oracle)
    bad = ~torch.isfinite(produced)
    if oracle is not None and oracle.shape == produced.shape:
        infinite = torch.isinf(oracle)
        bad &= ~(infinite & (produced.double() == oracle))
        if (soft := infinite & torch.isfinite(produced)).any():
            index = first(soft)
            return f"{int(soft.sum())} elements finite where the oracle is -inf, first {list(index)}"
    else:
        bad &= ~torch.isneginf(produced)
    if bad.any():
        index, kind = first(bad), "NaN" if torch.isnan(produced).any() else "infinite"
        return f"{int(bad.sum())} of {produced.numel()} elements {kind} or out of place, first {list(index)}"
    return _zeros(produced, oracle)


def _zeros(produced: Tensor, oracle: Tensor | None) -> str | None:
    if oracle is None or oracle.shape != produced.shape or produced.any() or not oracle.any():
        return None
    return "zero everywhere: never written, or multiplied by a zero"


def invalid_reference(reference: Tensor | None, oracle: Tensor, role: str) -> str | None:
    """Why the reference's tensor means nothing, or None."""
    if reference is None:
        return "the reference has no such tensor"
    if reference.shape != oracle.shape:
        return f"reference shape {list(reference.shape)}, oracle shape {list(oracle.shape)}"
    if not all_finite(oracle) and (torch.isnan(oracle).any() or torch.isposinf(oracle).any()):
        return "the oracle is not finite"
    if not all_finite(reference) and (bad := ~torch.isfinite(reference) & torch.isfinite(oracle)).any():
        return f"the reference is not finite at {list(first(bad))}, the oracle is"
    if role in ("value", "stat") and constant(reference) and not constant(oracle):
        return "the reference holds one value everywhere, the oracle does not"
    return None


def all_finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite. One sum tells: it is finite only if all are (an overflow looks twice)."""
    if not x.is_floating_point():
        return True
    return math.isfinite(float(x.sum(dtype=torch.float64))) or bool(torch.isfinite(x).all())


def constant(x: Tensor) -> bool:
    """Whether more than one element holds the same value everywhere (a lone number is no constant)."""
    flat = x.flatten()
    if flat.numel() < 2 or flat[0] != flat[-1]:
        return False
    return bool((flat == flat[0]).all())


def first(mask: Tensor) -> tuple[int, ...]:
    """Coordinates of the first true element of a mask that has one."""
    flat = int(mask.flatten().to(torch.uint8).argmax())
    index = []
    for size in reversed(mask.shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))


def aliased(produced: Mapping[str, object], others: Iterable[tuple[str, Tensor]]) -> str | None:
    """Which production output shares storage with a tensor of another witness, or None."""
    owners = {_storage(tensor): name for name, tensor in others if tensor.numel()}
    for name, tensor in produced.items():
        if isinstance(tensor, Tensor) and tensor.numel() and (owner := owners.get(_storage(tensor))) is not None:
            return f"output {name} shares its storage with {owner}: a tensor would be compared with itself"
    return None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
