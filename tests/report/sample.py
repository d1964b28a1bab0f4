"""Synthetic runs for the report's tests: six layers, every stage of docs/stages.md, serialised as the engine does.

``records(variant)`` builds typed records, so a change of the schema breaks here first. The numbers are invented but
shaped like real ones: a fault at ``layers.2.attn_core`` (two heads diluted) that is inherited downstream.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.records import (
    Certification,
    Comparison,
    Config,
    Coordinate,
    Density,
    Entropy,
    FirstFault,
    Histogram,
    Logits,
    Record,
    Routing,
    Skip,
    Slice,
    Summary,
    TensorComparison,
    Verdict,
    Weights,
)

LENGTH, HEADS, EXPERTS = 320, 4, 8
BUCKETS, TOKEN_WIDTH = 160, 2
SIZES = {
    "B": 1,
    "S": LENGTH,
    "N": 4,
    "M": 4,
    "d": 128,
    "H": HEADS,
    "D": 512,
    "R2": 32,
    "QL": 64,
    "G": 2,
    "OL": 64,
    "T": 80,
    "K": 32,
    "DI": 128,
    "E": EXPERTS,
    "k": 2,
    "F": 128,
    "V": 64,
    "J": 400,
}
SLICED = {"S": "position", "H": "head", "D": "channel", "d": "channel", "N": "stream", "E": "expert", "G": "group"}
ATTENTION = ("sliding", "sliding", "csa", "hca", "csa", "hca")
FAULT = "layers.2.attn_core"

HEAD = "embed streams:BSNd:exact", "rope_cache main_cos:BS.R2:fp32 compress_cos:BS.R2:fp32"
TAIL = "hc_head pre:BSN:fp32 collapsed:BSd", "final_norm x:BSd", "lm_head logits:BSV:fp32"
LAYER = (
    "attn_hc pre:BSN:fp32 post:BSN:fp32 comb:BSNM:fp32 collapsed:BSd",
    "attn_norm x:BSd",
    "q_a q_a:BS.QL",
    "q_a_norm q_residual:BS.QL",
    "q_b q:BSHD",
    "q_b_norm q:BSHD",
    "q_rope q:BSHD",
    "kv kv:BSD",
    "kv_norm kv:BSD",
    "kv_rope kv:BSD",
    "compressor pooled:BTD:fp32 keys:BTD",
    "indexer keys:BT.DI scores:BST:fp32 picks:BSK:picks",
    "attn_core out:BSHD visible:BSJ:exact lse:BSH:fp32 entropy:BSH:stat sink_mass:BSH:stat",
    "attn_unrope out:BSHD",
    "o_a o_a:BSG.OL",
    "o_b out:BSd",
    "attn_mix streams:BSNd",
    "ffn_hc pre:BSN:fp32 post:BSN:fp32 comb:BSNM:fp32 collapsed:BSd",
    "ffn_norm x:BSd",
    "router logits:BSE:fp32 weights:BSk:fp32 picks:BSk:picks",
    "experts gate:BSkF:fp32 up:BSkF:fp32 act:BSkF down:BSkd:fp32 out:BSd",
    "shared_expert gate:BSF act:BSF out:BSd",
    "moe_sum out:BSd",
    "ffn_mix streams:BSNd",
)
FORMULA = {
    "local": "|production - oracle| <= h(|y| + d) + d,  d = min(lambda * RSS, sum)",
    "free": "error(production) <= 1.5 * error(reference), both against the oracle, picks replayed",
    "exact": "bit for bit",
    "picks": "every differing pick lies inside production's own score bound",
}


def graph(layers: int = 6) -> list[tuple[str, int | None, str]]:
    """(full name, layer, output spec) of every stage in execution order."""
    out: list[tuple[str, int | None, str]] = []
    for spec in HEAD:
        name, _, outputs = spec.partition(" ")
        out.append((name, None, outputs))
    for layer in range(layers):
        kind = ATTENTION[layer % len(ATTENTION)]
        for spec in LAYER:
            name, _, outputs = spec.partition(" ")
            if (name == "compressor" and kind == "sliding") or (name == "indexer" and kind != "csa"):
                continue
            out.append((f"layers.{layer}.{name}", layer, outputs))
    for spec in TAIL:
        name, _, outputs = spec.partition(" ")
        out.append((name, None, outputs))
    return out


def _dims(word: str) -> tuple[str, ...]:
    first, _, last = word.partition(".")
    return (*first, last) if last else tuple(first)


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
        kind = rest[0] if rest else "bf16"
        dims = _dims(dims_word)
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
                        SLICED[dim] + self.tag,
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
            reproduce=f"harness diff --layer {'all' if layer is None else layer} --stage {stage} --mode {mode}{self.tag}",
        )


_INDEX = {name: i for i, (name, _, _) in enumerate(graph(64))}


def graph_index(stage: str) -> int:
    """Position in execution order (layer graphs of any depth up to 64)."""
    return _INDEX[stage] if stage in _INDEX else len(_INDEX)


WORDS = [
    "the",
    "lamp",
    "is",
    "in",
    "the",
    "cellar",
    "and",
    "the",
    "key",
    "is",
    "under",
    "the",
    "stone",
    ";",
    "where",
    "?",
]


def body(maker: Maker, layers: int) -> Iterator[Record]:
    """Everything between the config and the summary."""
    tag = maker.tag
    yield Certification("composed layer = HF layer" + tag, True, "bit for bit, 6 layers, 4,512 tensors" + tag)
    yield Certification("taps on = taps off" + tag, True, "logits equal bit for bit" + tag)
    for layer in range(layers):
        for parameter in (
            "q_a.weight",
            "q_b.weight",
            "kv.weight",
            "o_a.weight",
            "attn_core.sinks",
            "experts.down_proj.weight",
        ):
            yield Weights(
                f"layers.{layer}.{parameter.split('.')[0]}",
                layer,
                parameter + tag,
                Verdict.PASS,
                None,
                (64, 128),
                0,
                None,
                None,
            )
    for stage, layer, outputs in graph(layers):
        for mode in ("local", "free"):
            if stage == "layers.3.compressor" and mode == "local":
                yield Skip(stage, layer, mode, "no compressed entry yet: length 320 < 128 x 3" + tag)
                continue
            yield maker.comparison(stage, layer, outputs, mode)
            if stage.endswith(".router") and layer is not None:
                flips = maker.rng.randrange(1, 6) if mode == "free" else 0
                flips *= 4 if maker.faulty and layer > 2 and mode == "free" else 1
                outside = flips // 4 if flips > 8 else 0
                examples = []
                for i in range(flips):
                    bound = 2e-4 * maker.rng.uniform(0.5, 2)
                    examples.append(
                        (
                            maker.rng.randrange(LENGTH),
                            bound * maker.rng.uniform(1.5, 30) if i < outside else bound * maker.rng.random(),
                            bound,
                        )
                    )
                load = [maker.rng.randrange(30, 120) for _ in range(EXPERTS)]
                load[3] = 0 if layer == 4 else load[3]
                yield Routing(stage, layer, mode, LENGTH, flips, outside, tuple(examples), tuple(load), 1.71, 1.709)
    yield Logits(
        1.402 if maker.faulty else 0.413,
        0.411,
        0.288 if maker.faulty else 0.0004,
        0.71 if maker.faulty else 1.0,
        LENGTH,
    )


def config(tag: str = "", layers: int = 6) -> Config:
    names = tuple(name for name, _, _ in graph(layers))
    return Config(
        command="harness diff --layer all" + tag,
        case="tiny" + tag,
        checkpoint="cases/tiny" + tag,
        layers=tuple(range(layers)),
        modes=("local", "free"),
        dtype="native",
        batch=1,
        length=LENGTH,
        tokens=tuple(WORDS[i % len(WORDS)] + tag for i in range(LENGTH)),
        bypass={},
        replace={},
        direct_residual=False,
        stages_reference=names,
        stages_production=names,
        provenance={
            "harness": "0.1.0",
            "torch": "2.13.0+cpu",
            "transformers": "5.24.0",
            "production": "portable PyTorch, CPU" + tag,
            "device": "cpu, 2 threads",
            "checkpoint sha256": "3f0c9a…e17b",
            "attention": "eager",
            "experts": "eager",
        },
    )


def summary(parts: list[Record], layers: int, **changes: Any) -> Summary:
    compared = [r for r in parts if isinstance(r, Comparison)]
    counts = {v.value: sum(c.verdict is v for c in compared) for v in Verdict}
    counts["SKIPPED"] += sum(isinstance(r, Skip) for r in parts)
    bad = next((c for m in ("local", "free") for c in compared if c.mode == m and c.verdict is Verdict.FAIL), None)
    fault = FirstFault(bad.stage, bad.mode, bad.verdict, bad.margin, bad.cost, bad.tensor, bad.reason) if bad else None
    verdict = Verdict.FAIL if bad else Verdict.PASS
    line = (
        f"FIRST FAULT: {bad.stage} ({bad.mode}, {bad.margin or 0:.3g} x margin)"
        if bad
        else f"PASS {len(compared)} stages"
    )
    out = Summary(
        verdict=verdict,
        counts=counts,
        first_fault=fault,
        exit_code=1 if bad else 0,
        interrupted=False,
        reason=None,
        seconds={"import": 4.1, "load": 1.9, "reference": 1.2, "oracle": 3.8, "local": 5.6, "free": 2.4, "total": 19.4},
        peak_rss_bytes=1_180_000_000,
        line=line,
    )
    return replace(out, **changes)


HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\u202e\x07"


def records(variant: str = "faulty", layers: int = 6) -> list[Record]:
    """One run: clean | faulty | stopped | invalid | bypass | weights | hostile."""
    tag = HOSTILE if variant == "hostile" else ""
    maker = Maker(7, variant in ("faulty", "hostile", "stopped"), tag)
    head, rest = config(tag, layers), list(body(maker, layers))
    if variant == "stopped":
        rest = rest[: len(rest) // 3]
        return [head, *rest, summary(rest, layers, interrupted=True, reason="SIGTERM after 6.2 s")]
    if variant == "invalid":
        bad = Certification("taps on = taps off", False, "logits differ: 7.02 at [0, 3, 12]")
        rest = [bad if isinstance(r, Certification) and r.name == bad.name else r for r in rest]
        reason = "the reference is not the unmodified model: taps on = taps off failed"
        return [head, *rest, summary(rest, layers, verdict=Verdict.INVALID, exit_code=3, reason=reason)]
    if variant == "bypass":
        head = replace(
            head,
            bypass={"layers.2.attn_*": "reference", "layers.4.ffn_hc": "direct", "layers.4.ffn_mix": "direct"},
            replace={"layers.1.q_a": "mine.py:q_a"},
            direct_residual=True,
        )
        rest = [_bypassed(r) for r in rest]
    if variant == "weights":
        rest = [_lost_scale(r) for r in rest]
    return [head, *rest, summary(rest, layers, **({"reason": "because" + tag} if tag else {}))]


def _bypassed(record: Record) -> Record:
    if isinstance(record, Comparison):
        if record.stage.startswith("layers.2.attn_"):
            return replace(record, bypass="reference")
        if record.stage in ("layers.4.ffn_hc", "layers.4.ffn_mix"):
            return replace(record, bypass="direct")
        if record.stage == "layers.1.q_a":
            return replace(record, replaced="mine.py:q_a")
    return record


def _lost_scale(record: Record) -> Record:
    if isinstance(record, Weights) and record.stage == "layers.1.q_b":
        worst = Coordinate((3, 17), 0.5, 0.03125, 0.03125, None, None)
        return replace(
            record,
            verdict=Verdict.FAIL,
            reason="every element 16 x too large",
            mismatches=8192,
            worst=worst,
            slope=16.0,
        )
    if isinstance(record, Comparison) and record.stage == "layers.1.q_b" and record.mode == "local":
        tensor = replace(
            record.tensors[0], verdict=Verdict.FAIL, margin=5120.0, cost=9800.0, slope=16.0, reason="slope 16"
        )
        return replace(
            record, verdict=Verdict.FAIL, margin=5120.0, cost=9800.0, reason="q: slope 16", tensors=(tensor,)
        )
    return record


def lines(parts: list[Record]) -> list[str]:
    """Strict JSONL: ``kind`` first, tuples as lists, null for missing."""
    return [json.dumps({"kind": r.kind, **asdict(r)}, allow_nan=False, ensure_ascii=False) for r in parts]


def write(path: Path, variant: str = "faulty", layers: int = 6) -> Path:
    """Write a variant; ``killed`` is a faulty run cut in the middle of a line, without a summary."""
    parts = lines(records("faulty" if variant == "killed" else variant, layers))
    if variant == "killed":
        parts = parts[: len(parts) // 2]
        parts[-1] = parts[-1][: len(parts[-1]) // 2]
        path.write_text("\n".join(parts), encoding="utf-8")
    else:
        path.write_text("\n".join(parts) + "\n", encoding="utf-8")
    return path
