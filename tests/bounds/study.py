"""Figures of docs/numerics.md.

python -m tests.bounds.study scenes                     # emulated productions: scenes x plans x orders x lengths
python -m tests.bounds.study sides --prompts 30         # the real sides over prompts of 1 to 400 tokens
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict

import torch

from tests.bounds.clean import ORDERS, rows
from tests.bounds.margin import Row
from tests.bounds.scenes import MAKE, SCENES
from tests.bounds.sides import compare


def table(found: dict[str, list[tuple[str, Row]]]) -> None:
    """One line an output: worst clean ratio and where, share of 2 % errors caught, zeros caught, elements compared."""
    print(f"{'output':36s} {'clean max':>9s} {'2 % caught':>10s} {'zeros':>6s} {'elements':>10s}  worst at")
    for name, cases in found.items():
        count = sum(r.elements for _, r in cases)
        caught = sum(r.caught * r.elements for _, r in cases) / max(1, count)
        where, worst = max(cases, key=lambda case: case[1].ratio)
        zeros = all(r.zero for _, r in cases)
        print(f"{name:36s} {worst.ratio:9.3f} {100 * caught:9.1f}% {zeros!s:>6s} {count:10d}  {where}")


def scenes(stages: list[str], lengths: list[int], seeds: int) -> None:
    for stage in stages:
        found: dict[str, list[tuple[str, Row]]] = defaultdict(list)
        for which, name, length, seed in itertools.product(
            ("reference", "production", "fp32"), SCENES, lengths, range(seeds)
        ):
            for order in ORDERS:
                for output, r in rows(stage, name, length, seed, which, order):
                    found[f"{stage} {which} {output}"].append((f"{name} {length} {order} {seed}", r))
        table(found)


def sides(prompts: int, dtype: str, whose: str) -> None:
    lengths = torch.linspace(1, 400, max(2, prompts)).long().tolist()[:prompts]
    found: dict[str, list[tuple[str, Row]]] = defaultdict(list)
    for seed, length in enumerate(lengths):
        for stage, output, r in compare(dtype, length, seed, whose=whose):
            found[f"{stage.split('.')[-1]} {output}"].append((f"{stage} {length} {seed}", r))
            if r.ratio > 1:
                print(f"above the margin: {stage}.{output} length {length} seed {seed}: {r.ratio:.3f}", flush=True)
    print(f"{whose}, {dtype}, {prompts} prompts of 1 to 400 tokens")
    table(dict(sorted(found.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scenes", "sides"])
    parser.add_argument("--stages", nargs="*", default=list(MAKE))
    parser.add_argument("--lengths", nargs="*", type=int, default=[1, 9, 33])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--dtype", choices=["native", "fp32"], default="native")
    parser.add_argument("--whose", choices=["production", "reference"], default="production")
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.what == "scenes":
        scenes(a.stages, a.lengths, a.seeds)
    else:
        sides(a.prompts, a.dtype, a.whose)


if __name__ == "__main__":
    main()
