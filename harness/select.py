"""What the user asked for, as names: layer ranges, stage globs and ``STAGE=VALUE`` options, with errors that help."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from harness.types import UsageError


def ranges(text: str) -> list[tuple[int, int]] | None:
    """``N``, ``A-B`` and ``a,b`` as (first, last) pairs, ``all`` as None; needs no model."""
    if text.strip() == "all":
        return None
    found = []
    for part in text.split(","):
        ends = part.strip().split("-")
        if len(ends) > 2 or not all(end.isascii() and end.isdigit() and len(end) < 10 for end in ends):
            raise UsageError(f"--layer {text!r}: expected N, A-B, a,b or all, got {part.strip()!r}")
        low, high = int(ends[0]), int(ends[-1])
        if low > high:
            raise UsageError(f"--layer {text!r}: {low} comes after {high}; write {high}-{low}")
        found.append((low, high))
    return found


def layers(text: str, available: Sequence[int]) -> tuple[int, ...]:
    """What ``ranges`` reads, as sorted layer indices of a model."""
    pairs = ranges(text)
    if pairs is None:
        return tuple(available)
    found: set[int] = set()
    valid = f"{available[0]}-{available[-1]}" if available else "none"
    for low, high in pairs:
        for layer in (low, high):
            if layer not in available:
                raise UsageError(f"--layer {text!r}: there is no layer {layer}; layers are {valid}")
        found |= {layer for layer in available if low <= layer <= high}
    return tuple(sorted(found))


def matches(glob: str, name: str) -> bool:
    """Whether a glob means a stage: by its full name, or by the part after the layer where the glob has no dot."""
    return fnmatchcase(name, glob) or ("." not in glob and fnmatchcase(name.rpartition(".")[2], glob))


def stages(glob: str, names: Sequence[str], option: str, elsewhere: Iterable[str] = ()) -> list[str]:
    """Names that a glob matches; none is an error with a close match, or a hint that they lie ``elsewhere``."""
    if found := [name for name in names if matches(glob, name)]:
        return found
    if outside := [name for name in elsewhere if matches(glob, name)]:
        raise UsageError(
            f"{option} {glob!r} matches only stages that this run leaves out ({outside[0]}); widen --layer"
        )
    leaves = sorted({n.rpartition(".")[2] for n in names})
    close = difflib.get_close_matches(glob, [*names, *leaves], n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else "see harness list stages"
    raise UsageError(f"{option} {glob!r} matches no stage; {hint}")


def assignment(text: str, option: str, meaning: str) -> tuple[str, str]:
    """``STAGE=VALUE`` in two."""
    stage, sign, value = text.partition("=")
    if not sign or not stage.strip() or not value.strip():
        raise UsageError(f"{option} {text!r}: expected STAGE={meaning}, for example layers.2.attn_core={meaning}")
    return stage.strip(), value.strip()
