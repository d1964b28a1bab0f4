"""Synthetic runs for the report's tests: six layers, every stage of docs/stages.md, serialised as the engine does.

``records(variant)`` builds typed records, so a change of the schema breaks here first. The numbers are invented but
shaped like real ones: a fault at ``layers.2.attn_core`` (two heads diluted) that is inherited downstream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from harness.jsonl import encode
from harness.records import (
    Certification,
    Comparison,
    Config,
    Coordinate,
    FirstFault,
    Logits,
    Record,
    Routing,
    Skip,
    Step,
    Summary,
    Verdict,
    Weights,
)
from tests.report.graph import EXPERTS, LENGTH, graph
from tests.report.maker import Maker

WORDS = str.split("the lamp is in the cellar and the key is under the stone ; where is the lamp ?")


def body(maker: Maker, layers: int) -> Iterator[Record]:
    """Everything between the config and the summary."""
    tag = maker.tag
    yield Certification("composed layer = HF layer" + tag, True, "bit for bit, 6 layers, 4,512 tensors" + tag)
    yield Certification("taps on = taps off" + tag, True, "logits equal bit for bit" + tag)
    for n in range(layers):
        for parameter in (
            "q_a.weight",
            "q_b.weight",
            "kv.weight",
            "o_a.weight",
            "attn_core.sinks",
            "experts.down_proj.weight",
        ):
            yield Weights(
                f"layers.{n}.{parameter.split('.')[0]}",
                n,
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


def summary(parts: list[Record], **changes: Any) -> Summary:
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
    """One run: clean | faulty | stopped | invalid | bypass | weights | loading | inconclusive | generated | hostile."""
    return list(_records(variant, layers))


@cache
def _records(variant: str, layers: int) -> list[Record]:
    tag = HOSTILE if variant == "hostile" else ""
    maker = Maker(7, variant in ("faulty", "hostile", "stopped"), tag)
    head, rest = config(tag, layers), list(body(maker, layers))
    if variant == "stopped":
        rest = rest[: len(rest) // 3]
        return [head, *rest, summary(rest, interrupted=True, reason="SIGTERM after 6.2 s")]
    if variant == "invalid":
        bad = Certification("taps on = taps off", False, "logits differ: 7.02 at [0, 3, 12]")
        rest = [bad if isinstance(r, Certification) and r.name == bad.name else r for r in rest]
        reason = "the reference is not the unmodified model: taps on = taps off failed"
        line = f"INVALID: {reason}"
        return [head, *rest, summary(rest, verdict=Verdict.INVALID, exit_code=3, reason=reason, line=line)]
    if variant == "bypass":
        head = replace(
            head,
            bypass={"layers.2.attn_*": "reference", "layers.4.ffn_hc": "direct", "layers.4.ffn_mix": "direct"},
            replace={"layers.1.q_a": "mine.py:q_a"},
            direct_residual=True,
        )
        rest = [_bypassed(r) for r in rest]
    if variant in ("weights", "loading"):
        rest = [_lost_scale(r, local=variant == "weights") for r in rest]
    if variant == "loading":
        lost = FirstFault("layers.1.q_b", "weights", Verdict.FAIL, reason="every element 16 x too large")
        changes = {"verdict": Verdict.FAIL, "exit_code": 1, "first_fault": lost, "reason": lost.reason}
        return [head, *rest, summary(rest, **changes)]
    if variant == "generated":
        rest = [*map(step, range(12)), *rest]
    if variant == "inconclusive":
        rest = [_undecided(r) for r in rest]
        return [head, *rest, summary(rest, verdict=Verdict.INCONCLUSIVE, exit_code=3, reason="cancellation to 3 bits")]
    return [head, *rest, summary(rest, **({"reason": "because" + tag} if tag else {}))]


def step(index: int) -> Step:
    """A step of a generation; the eighth disagrees beyond what rounding explains."""
    wrong = index == 7
    mine, theirs = (" 4" if wrong else f" {index % 3}"), f" {index % 3}"
    return Step(
        index,
        331 + index,
        theirs + HOSTILE,
        mine,
        theirs,
        mine == theirs,
        Verdict.FAIL if wrong else Verdict.PASS,
        reason="logits: RMS error 4.1 x the allowed" if wrong else None,
        kl=2.1 if wrong else 3e-5 * (index + 1),
        entropy_production=0.31,
        entropy_reference=0.3,
        error=0.4 if wrong else 0.02,
        error_reference=0.018,
        allowed=0.1,
        gap=1.7 if wrong else None,
        attention_production=(2.1, 1.4, 3.0),
        attention_reference=(2.1, 1.5, 3.0),
        divergence=(0.001, 0.004, 0.6 if wrong else 0.009),
        router_flips=index % 2,
        flip_margin=0.4 if index % 2 else None,
    )


def _bypassed(record: Record) -> Record:
    if isinstance(record, Comparison):
        if record.stage.startswith("layers.2.attn_"):
            return replace(record, bypass="reference")
        if record.stage in ("layers.4.ffn_hc", "layers.4.ffn_mix"):
            return replace(record, bypass="direct")
        if record.stage == "layers.1.q_a":
            return replace(record, replaced="mine.py:q_a")
    return record


def _undecided(record: Record) -> Record:
    if isinstance(record, Comparison) and (record.stage, record.mode) == ("layers.4.compressor", "local"):
        return replace(record, verdict=Verdict.INCONCLUSIVE, reason="cancellation to 3 bits")
    return record


def _lost_scale(record: Record, local: bool) -> Record:
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
    if local and isinstance(record, Comparison) and (record.stage, record.mode) == ("layers.1.q_b", "local"):
        tensor = replace(
            record.tensors[0], verdict=Verdict.FAIL, margin=5120.0, cost=9800.0, slope=16.0, reason="slope 16"
        )
        return replace(
            record, verdict=Verdict.FAIL, margin=5120.0, cost=9800.0, reason="q: slope 16", tensors=(tensor,)
        )
    return record


def lines(parts: list[Record]) -> list[str]:
    """The engine's own strict JSONL."""
    return [encode(r) for r in parts]


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
