"""In which format a checkpoint stores each projection, and which tensors that takes.

The format is read off the weight's dtype and companions, never off config.json: conversions leave stale entries there.
Names are DeepSeek's (``production.names`` translates), the parameters are those of ``production.weights``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from production.errors import ProductionError
from production.manifest import Leaf
from production.nvfp4 import BLOCK
from production.weights import MX_BLOCK, TILE

FLOATS = ("BF16", "F32")
FP8_SCALES = ("F8_E8M0", "F32", "BF16")
#: FP8's scale by its name on disk: DeepSeek's, transformers', compressed-tensors'
FP8_LEAVES = ("scale", "weight_scale_inv", "weight_scale")

Header = tuple[str, tuple[int, ...]]  # dtype, shape


@dataclass(frozen=True)
class Stored:
    """One tensor of a parameter. ``native`` holds ``{expert}`` where the parameter is stacked."""

    name: str  # in the stage
    native: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool = False
    known: bool = True  # False: of a format that is only recognised, to be refused by the registry


def form_at(headers: Mapping[str, Header], stem: str) -> str | None:
    """The format of the projection ``stem``; its dtype in small letters if unknown, None if it has no weight."""
    if f"{stem}.weight_packed" in headers:
        return "nvfp4-ct"
    if f"{stem}.weight" not in headers:
        return None
    dtype = headers[f"{stem}.weight"][0]
    if dtype in FLOATS:
        return "bf16"
    if dtype == "U8":
        return "mxfp4" if f"{stem}.scale" in headers else "nvfp4"
    return {"F8_E4M3": "fp8", "I8": "mxfp4"}.get(dtype, dtype.lower())


def parts(stage: str, leaf: Leaf, form: str | None, present: Collection[str]) -> Iterator[Stored]:
    """The tensors of one parameter. ``present`` tells which of the names that a scale may have is there."""
    if not leaf.projection:
        yield Stored(leaf.name, leaf.native, ("I64", "I32") if leaf.dtype == "I64" else FLOATS, leaf.shape)
        return
    n, k = leaf.shape
    owner, stem = leaf.name.removesuffix("weight"), leaf.native

    def part(name: str, suffix: str, dtypes: tuple[str, ...], shape: tuple[int, ...], optional: bool = False) -> Stored:
        return Stored(owner + name, f"{stem}.{suffix}", dtypes, shape, optional)

    if form == "bf16":
        yield part("weight", "weight", FLOATS, (n, k))
    elif form == "fp8":
        first = stem.format(expert=0)
        suffix = next((s for s in FP8_LEAVES if f"{first}.{s}" in present), "scale")
        yield part("weight", "weight", ("F8_E4M3",), (n, k))
        yield part("weight_scale_inv", suffix, FP8_SCALES, (-(-n // TILE), -(-k // TILE)))
    elif form == "mxfp4":
        _divides(stage, leaf, MX_BLOCK, "MXFP4")
        yield part("weight", "weight", ("I8", "U8"), (n, k // 2))
        yield part("weight_scale", "scale", ("F8_E8M0",), (n, k // MX_BLOCK))
    elif form in ("nvfp4", "nvfp4-ct"):
        _divides(stage, leaf, BLOCK, "NVFP4")
        ct = form == "nvfp4-ct"
        shape: tuple[int, ...] = (1,) if ct else ()
        given = "input_global_scale" if ct else "input_scale"
        whole = "weight_global_scale" if ct else "weight_scale_2"
        yield part("weight", "weight_packed" if ct else "weight", ("U8",), (n, k // 2))
        yield part("weight_scale", "weight_scale", ("F8_E4M3",), (n, k // BLOCK))
        yield part(whole, whole, ("F32",), shape)
        yield part(given, given, ("F32",), shape, optional=True)
    else:
        for suffix in ("weight", *FP8_LEAVES):
            yield Stored(owner + suffix, f"{stem}.{suffix}", (), (), optional=True, known=False)


def formats(headers: Mapping[str, Header], stage: str, leaves: Collection[Leaf]) -> str | None:
    """The one format of a stage's projections; None for a stage without any."""
    found: dict[str, str] = {}  # format -> a stem that has it
    projections = [leaf for leaf in leaves if leaf.projection]
    for leaf in projections:
        for stem in leaf.stems():
            if (form := form_at(headers, stem)) is not None:
                found.setdefault(form, stem)
    if len(found) > 1:
        came = ", ".join(f"{form} ({stem})" for form, stem in found.items())
        raise ProductionError(stage, expected="one format for all of a stage's projections", came=came)
    return next(iter(found), "bf16") if projections else None


def _divides(stage: str, leaf: Leaf, block: int, form: str) -> None:
    if leaf.shape[1] % block:
        came = f"K = {leaf.shape[1]} ({leaf.native})"
        raise ProductionError(stage, expected=f"K a multiple of {block} for {form}", came=came)
