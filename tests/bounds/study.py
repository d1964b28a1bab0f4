"""Figures of docs/numerics.md.

python -m tests.bounds.study scenes                     # emulated productions: scenes x plans x orders x lengths
python -m tests.bounds.study sides --prompts 30         # the real sides over prompts of 1 to 400 tokens
python -m tests.bounds.study faults                     # what is caught of known faults
python -m tests.bounds.study gemm                       # fp32 sums of up to 16384 products in five orders
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict

import torch

from reference.bounds.linear import contract
from tests.bounds.clean import ORDERS, rows
from tests.bounds.emulate import Arithmetic
from tests.bounds.faults import FAULTS
from tests.bounds.margin import Row, bound
from tests.bounds.scenes import MAKE, SCENES
from tests.bounds.sides import compare


def table(found: dict[str, list[tuple[str, Row]]]) -> None:
    """One line an output: worst clean ratio, the lambda that was needed (5 by construction where roundings are known),
    share of 2 % errors caught, whether zeros fail everywhere, elements compared, and the worst place."""
    print(
        f"{'output':36s} {'clean max':>9s} {'lambda':>6s} {'2 % caught':>10s} {'zeros':>6s} {'elements':>10s}  worst at"
    )
    for name, cases in found.items():
        count = sum(r.elements for _, r in cases)
        caught = sum(r.caught * r.elements for _, r in cases) / max(1, count)
        where, worst = max(cases, key=lambda case: case[1].ratio)
        zeros = all(r.zero for _, r in cases)
        need = max(r.need for _, r in cases)
        print(f"{name:36s} {worst.ratio:9.3f} {need:6.2f} {100 * caught:9.1f}% {zeros!s:>6s} {count:10d}  {where}")


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


def faults() -> None:
    """Share of instances caught and worst error over bound, under each plan."""
    print(f"{'fault':46s} {'instance':16s} {'production':>20s} {'fp32 run':>20s} {'reference':>20s}")
    for name, (check, instance) in FAULTS.items():
        found = [check(which) for which in ("production", "fp32", "reference")]
        print(
            f"{name:46s} {instance:16s}", *(f"{100 * share:8.1f}% {worst:9.3g} x" for share, worst in found), flush=True
        )


def gemm() -> None:
    """Largest error over bound of an fp32 product, by length, kind of operands and order of the sum."""
    g = torch.Generator().manual_seed(0)
    for k, kind in itertools.product((64, 512, 4096, 16384), ("normal", "positive", "halves", "sorted", "constant")):
        a, b = (torch.randn(24, k, generator=g) for _ in range(2))
        if kind == "positive":
            a, b = a.abs(), b.abs()
        if kind == "halves":  # the second half takes back the first
            a[:, k // 2 :] = -a[:, : k // 2]
            b[:, k // 2 :] = b[:, : k // 2] * (1 + 1e-3 * torch.randn(24, k // 2, generator=g))
        if kind == "sorted":
            a, b = a.sort(-1).values, b.abs()
        if kind == "constant":
            a, b = a[:, :1].expand(-1, k), b[:, :1].expand(-1, k)
        a, b = (t.to(torch.bfloat16).float() for t in (a, b))
        s = contract(a.double(), b.double())
        limit = bound(s.y, *s.result(), "fp32")
        found = {order: Arithmetic({}, torch.float32, order, 1).dot(a, b) for order in (*ORDERS, "sequential")}
        ratios = ((order, float(((y.double() - s.y).abs() / limit).max())) for order, y in found.items())
        print(f"K {k:5d} {kind:9s}", *(f"{order} {ratio:.3f}" for order, ratio in ratios), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scenes", "sides", "faults", "gemm"])
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
    elif a.what == "sides":
        sides(a.prompts, a.dtype, a.whose)
    elif a.what == "faults":
        faults()
    else:
        gemm()


if __name__ == "__main__":
    main()
