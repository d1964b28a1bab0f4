"""Recompute one recorded comparison from the tensors beside this file. Needs torch and safetensors only.

``harness diff --dump DIR`` copies this file into DIR together with

    dump.json               the row's record: stage, mode, verdict, thresholds
    inputs.safetensors      what the production stage was given, by argument
    params.safetensors      its parameters in the checkpoint's layout
    production.safetensors  reference.safetensors  oracle.safetensors: what each witness returned, by output
    own.safetensors         the oracle for the reference's own picks, where these differ from production's
    bound.safetensors       what the declared roundings allow around every oracle value (local rows)

The exit code is 0 if every figure comes out as recorded, else 1.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

FEWEST = 32  # elements from which on an RMS counts


def rms(x: Tensor) -> float:
    """Root mean square; 0 for an empty tensor."""
    return math.sqrt(float(x.double().square().mean())) if x.numel() else 0.0


def unravel(flat: int, shape: tuple[int, ...]) -> list[int]:
    """Coordinates of a flat index."""
    index = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return index[::-1]


def value(said: dict[str, Any], mine: Tensor, theirs: Tensor, oracle: Tensor, own: Tensor, bound: Tensor | None) -> Any:
    """Worst coordinate, its multiple of the bound (local rows) and the RMS error over what is allowed."""
    finite = torch.isfinite(oracle)
    error = torch.where(finite, mine.double() - oracle, 0.0)
    size = error.abs() if bound is None else (error / torch.where(finite, bound, 1.0)).abs()
    flat = int(size.argmax())
    at = unravel(flat, tuple(size.shape))
    allowed = max(said["factor"] * rms((theirs.double() - own)[finite]), said["least"])
    cost = rms(error[finite]) / allowed if int(finite.sum()) >= FEWEST and allowed > 0 else None
    margin = None if bound is None else float(size.flatten()[flat])
    where = tuple(at)
    if said["worst"] is not None and float(size[tuple(said["worst"])]) == float(size[where]):
        said["worst"] = at  # a tie: several elements are equally wrong
    text = (
        f"production {float(mine[where]):.6g}, reference {float(theirs[where]):.6g}, oracle {float(oracle[where]):.6g}"
    )
    return margin, cost, at, text


def exact(mine: Tensor, theirs: Tensor, oracle: Tensor) -> Any:
    """The first element that differs from the oracle, if any."""
    differs = mine.double() != oracle.double()
    at = unravel(int(differs.flatten().to(torch.uint8).argmax()), tuple(differs.shape)) if differs.any() else None
    if at is None:
        return None, None, None, "all elements are equal"
    where = tuple(at)
    text = f"{int(differs.sum())} elements differ: production {mine[where].item()}, reference {theirs[where].item()}"
    return None, None, at, text


def picks(mine: Tensor, scores: Tensor, bound: Tensor) -> Any:
    """The first row whose picks no rounding of the scores explains; the largest score gap over its room."""
    chosen = mine.reshape(-1, mine.shape[-1]).tolist()
    candidates = scores.shape[-1]
    worst, first, count = 0.0, None, 0
    for row, (ids, s, b) in enumerate(
        zip(chosen, scores.reshape(-1, candidates).double(), bound.reshape(-1, candidates).double(), strict=True)
    ):
        eligible = s > -math.inf
        need = min(int(eligible.sum()), len(ids))
        best = set(s.topk(need).indices.tolist())
        taken = [i for i in ids if i >= 0]
        sound = len(set(taken)) == len(taken) == need and all(i < candidates and bool(eligible[i]) for i in taken)
        extra, missing = sorted(set(taken) - best), sorted(best - set(taken))
        outside = not sound
        if sound and extra:
            ratios = [float((s[o] - s[p]) / (b[o] + b[p])) for o in missing for p in extra]
            worst = max(worst, *ratios)
            outside = max(ratios) > 1
        count += outside
        if outside and first is None:
            first = unravel(row, tuple(mine.shape[:-1]))
    text = f"{count} rows hold picks that no rounding explains" if count else "all picks lie inside their bound"
    return worst, None, first, text


def same(a: float | None, b: float | None) -> bool:
    """Equal up to the order of summation, which another build of torch may choose differently."""
    return (a is None) == (b is None) and (a is None or b is None or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12))


def main(folder: Path) -> int:
    """Print every output's figures, then the row's verdict as it was recorded."""
    row = json.loads((folder / "dump.json").read_text(encoding="utf-8"))
    kinds = ("production", "reference", "oracle", "own", "bound")
    witness: dict[str, dict[str, Tensor]] = {
        kind: load_file(path) if (path := folder / f"{kind}.safetensors").is_file() else {} for kind in kinds
    }
    print(f"{row['stage']} ({row['mode']})  {row['replaced'] or row['component']}")
    print(f"{row['command']}")
    alike = True
    for said in row["outputs"]:
        name = said["name"]
        mine, theirs, oracle, own, bound = (witness[kind].get(name) for kind in kinds)
        if mine is None or theirs is None or oracle is None or not said["judged"]:
            print(f"{name}: {said['verdict']}: {said['reason'] or 'nothing to compare'}")
            continue
        if said["role"] == "exact":
            margin, cost, at, text = exact(mine, theirs, oracle)
        elif said["role"] == "picks":
            margin, cost, at, text = picks(mine, oracle, bound) if bound is not None else (None, None, None, "replayed")
        else:
            margin, cost, at, text = value(said, mine, theirs, oracle, oracle if own is None else own, bound)
        figures = [f"{margin:.3g} x the margin" if margin is not None else "", f"at {at}" if at is not None else ""]
        figures += [f"RMS error {cost:.3g} x the allowed" if cost is not None else ""]
        print(f"{name}: {said['verdict']}: {', '.join(filter(None, [*figures, text]))}")
        if not (same(margin, said["margin"]) and same(cost, said["cost"]) and at == said["worst"]):
            alike = False
            print(f"  recorded otherwise: margin {said['margin']}, cost {said['cost']}, worst {said['worst']}")
    print(f"{row['verdict']}{': ' + row['reason'] if row['reason'] else ''}")
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent))
