"""Draws the comparisons of a synthetic run."""

from __future__ import annotations

import math
import random
from typing import Any

from harness.records import (
    Comparison,
    Coordinate,
    Density,
    Entropy,
    Histogram,
    Slice,
    TensorComparison,
    Verdict,
)
from tests.report.graph import (
    BUCKETS,
    FAULT,
    FORMULA,
    HEADS,
    LENGTH,
    SIZES,
    SLICED,
    TOKEN_WIDTH,
    dims_of,
    graph_index,
)


class Maker:
    """Draws one run; ``severity`` says how far beyond the allowed a stage lies in each mode (1 = just inside)."""

    def __init__(self, seed: int, faulty: bool, tag: str = "") -> None:
        self.rng = random.Random(seed)
        self.faulty = faulty
        self.tag = tag  # appended to every free string: the escaping test puts markup here
        self.normal = [self.rng.gauss(0, 1) for _ in range(4096)]
        self.densities = {bad: [self.density(bad) for _ in range(4)] for bad in (False, True)}

    def severity(self, stage: str, layer: int | None, mode: str, tensor: str) -> float:
        if not self.faulty:
            return 1.0
        if stage == FAULT and tensor in ("out", "lse", "entropy", "sink_mass"):
            return {"out": 41.2, "lse": 19.0, "entropy": 17.5, "sink_mass": 11.0}[tensor] * (
                1 if mode == "local" else 0.4
            )
        if mode == "free" and (layer is None or layer >= 2):
            after = graph_index(stage) > graph_index(FAULT)
            if after and not stage.endswith("rope_cache"):
                return 9.0 / (1 + 0.4 * ((layer or 6) - 2))
        return 1.0

    def values(self, count: int, top: float, peak: int | None) -> tuple[float | None, ...]:
        """Log-normal figures whose largest is ``top``, at ``peak`` if given."""
        start = self.rng.randrange(4096 - count)
        raw = [math.exp(0.5 * v - 1.1) for v in self.normal[start : start + count]]
        if peak is not None and count:
            for offset, factor in ((0, 9.0), (1, 3.0), (2, 2.0)):
                if peak + offset < count:
                    raw[peak + offset] *= factor
        scale = top / max(raw, default=1.0)
        return tuple(v * scale for v in raw)

    def tensor(self, stage: str, layer: int | None, mode: str, word: str) -> TensorComparison:
        name, dims_word, *rest = word.split(":")
        # By name, so that a clean and a faulty run agree wherever the fault does not reach.
        self.rng = random.Random(f"{stage} {mode} {name}")
        kind = rest[0] if rest else "bf16"
        dims = dims_of(dims_word)
        shape = tuple(SIZES[d] for d in dims)
        role = kind if kind in ("exact", "picks", "stat") else "value"
        dtype = {"exact": "bool" if name == "visible" else "bf16", "picks": "int64", "stat": "fp32"}.get(kind, kind)
        severity = self.severity(stage, layer, mode, name)
        bad = severity > 1
        common: dict[str, Any] = {
            "tensor": name + self.tag,
            "wire": f"{stage}.{name}{self.tag}",
            "dims": dims,
            "shape": shape,
            "role": role,
            "production_dtype": dtype,
            "reference_dtype": "bf16" if dtype == "fp32" else dtype,
        }
        if role in ("exact", "picks"):
            flips = self.rng.randrange(0, 4) if role == "picks" and mode == "free" else 0
            return TensorComparison(
                **common,
                verdict=Verdict.PASS,
                mismatches=0,
                flips=flips if role == "picks" else None,
                formula=FORMULA[role],
                threshold={"selection": "sqrtsoftplus"} if role == "picks" else {},
                tokens=(0.0,) * BUCKETS if "S" in dims else (),
                token_width=TOKEN_WIDTH,
            )
        level = severity * self.rng.uniform(0.25, 0.97)
        cost = severity * self.rng.uniform(0.35, 0.98)
        fails = cost > 1 or (mode == "local" and level > 1)
        verdict = Verdict.FAIL if fails else Verdict.PASS
        rms = 0.61
        error = rms * 2**-9 * (cost if mode == "local" else cost * 1.5)
        worst = tuple(self.coordinate(shape, level / (1 + 0.3 * i), rms, mode) for i in range(5))
        slices = []
        for dim in dims:
            if dim in SLICED and SIZES[dim] > 1:
                size = SIZES[dim]
                width = max(1, math.ceil(size / 32))
                buckets = math.ceil(size / width)
                peak = {"head": 1}.get(SLICED[dim]) if bad else None
                slices.append(
                    Slice(
                        dim + self.tag,
                        self.values(buckets, level, peak) if mode == "local" else (None,) * buckets,
                        self.values(buckets, 0.0031 * cost, peak),
                        width,
                    )
                )
        tokens = (
            self.values(BUCKETS, level if mode == "local" else 0.0031 * cost, 106 if bad else None)
            if "S" in dims
            else ()
        )
        spread = max(1.2, level)
        bins = [0] * 41
        for _ in range(80):
            x = 0.25 * self.rng.choice(self.normal) * (spread if bad and self.rng.random() < 0.2 else 1)
            if -spread <= x <= spread:
                bins[min(40, int((x + spread) / (2 * spread) * 41))] += self.rng.randrange(1, 900)
        return TensorComparison(
            **common,
            verdict=verdict,
            reason=self.reason(mode, level, cost, name) if fails else None,
            margin=level if mode == "local" else None,
            cost=cost,
            rms_oracle=rms,
            rms_error=error,
            rms_reference_error=rms * 2**-9,
            slope=0.9413 if stage == FAULT and bad and name == "out" else 1.0 + self.rng.gauss(0, 1e-5),
            worst=worst,
            slices=tuple(slices),
            errors=Histogram(-spread, spread, tuple(bins)),
            density=self.rng.choice(self.densities[bad]),
            tokens=tokens,
            token_width=TOKEN_WIDTH,
            formula=FORMULA[mode],
            threshold={
                "lambda": 5.0,
                "h": "ulp/2 of bf16",
                "kappa": 1.0,
                "u": 2**-8,
                "plan": "probs: fp32, out: bf16" + self.tag,
            },
        )

    def coordinate(self, shape: tuple[int, ...], ratio: float, rms: float, mode: str) -> Coordinate:
        oracle = self.rng.gauss(0, rms)
        bound = 2**-8 * abs(oracle) + 1e-4
        reference = oracle + self.rng.uniform(-0.5, 0.5) * bound
        index = tuple(self.rng.randrange(n) for n in shape)
        if mode == "free":
            return Coordinate(index, oracle + ratio * bound, reference, oracle, None, None)
        return Coordinate(index, oracle + ratio * bound * self.rng.choice((-1, 1)), reference, oracle, bound, ratio)

    def reason(self, mode: str, level: float, cost: float, name: str) -> str:
        text = (
            f"worst element {level:.3g} x its bound, RMS error {cost:.3g} x what rounding allows"
            if mode == "local"
            else f"error {cost:.3g} x 1.5 times the reference's own"
        )
        return f"{name}: {text}{self.tag}"

    def density(self, bad: bool) -> Density:
        size = 28
        grid = [[0] * size for _ in range(size)]
        for _ in range(700):
            x = self.rng.gauss(0, 0.9)
            y = x * (0.72 if bad and self.rng.random() < 0.4 else 1) + self.rng.gauss(0, 0.02)
            i, j = (int((v + 3) / 6 * size) for v in (y, x))
            if 0 <= i < size and 0 <= j < size:
                grid[i][j] += self.rng.randrange(1, 60)
        return Density(-3.0, 3.0, tuple(tuple(row) for row in grid))

    def entropy(self, layer: int, mode: str) -> Entropy:
        uniform = math.log(LENGTH) - 1
        reference = tuple(uniform * self.rng.uniform(0.25, 0.7) for _ in range(HEADS))
        sink = tuple(self.rng.uniform(0.02, 0.3) for _ in range(HEADS))
        off = self.faulty and layer == 2
        production = tuple(v + 0.002 * self.rng.random() for v in reference)
        if off:
            production = (production[0], uniform * 0.998, production[2], uniform * 0.81)
        return Entropy(
            production,
            reference,
            uniform,
            tuple(v * (0.4 if off and i in (1, 3) else 1) for i, v in enumerate(sink)),
            sink,
            (1,) if off else (),
        )

    def comparison(self, stage: str, layer: int | None, outputs: str, mode: str) -> Comparison:
        tensors = tuple(self.tensor(stage, layer, mode, word) for word in outputs.split())
        order = [Verdict.FAIL, Verdict.PASS]
        decides = min(tensors, key=lambda t: (order.index(t.verdict), -(t.margin or t.cost or 0)))
        short = stage.rsplit(".", 1)[-1]
        rms = {}
        if short in ("embed", "attn_mix", "ffn_mix"):
            base = 1.0 + 0.45 * (layer if layer is not None else -1) + (0.2 if short == "ffn_mix" else 0)
            rms = {
                "reference": base,
                "production": base * (1.06 if self.severity(stage, layer, mode, "streams") > 1 else 1.0003),
            }
        return Comparison(
            stage=stage,
            layer=layer,
            mode=mode,
            verdict=decides.verdict,
            reason=decides.reason,
            tensor=decides.tensor,
            margin=decides.margin,
            cost=decides.cost,
            worst=decides.worst[0] if decides.worst else None,
            covers=(stage,),
            component=f"production.{short}:{short.title().replace('_', '')}{self.tag}",
            plan={"acc": "fp32", "out": "bf16" + self.tag},
            bypass="production",
            replaced=None,
            tensors=tensors,
            entropy=self.entropy(layer, mode) if short == "attn_core" and layer is not None else None,
            stream_rms=rms,
            seconds=0.02,
            reproduce=f"harness diff --layer {layer or 'all'} --stage {stage} --mode {mode}{self.tag}",
        )
