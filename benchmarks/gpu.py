"""``python -m benchmarks.gpu parity|bench FILE``: the CUDA kernels of csrc/ on a GPU, one JSON line a measurement.

parity: every kernel at the sizes of the released models, its outputs held to float64 values by the margins of
reference.bounds. Outputs lie between guard words and are poisoned first; a kernel runs
twice, and once from a replayed graph, and all three must agree bit for bit.
bench: microseconds a graph replay over buffers that exceed the L2 cache several times, random data, median of 30.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.judge.margin import margin
from harness.types import Judged
from production.cuda import hyper, loader
from reference.bounds import hyper as bounds

TOKENS = (1, 2, 3, 7, 16, 64, 127, 128, 129, 1024, 4096)
SIZES = {"flash": 4096, "pro": 7168}
ITERATIONS, HC_EPS, RMS_EPS = 20, 1e-6, 1e-6
GUARD = 64  # words on either side of an output; 256 or 128 bytes, so that outputs stay aligned
L2 = 60e6  # bytes
COPY = 4.3e12  # bytes a second, measured with a copy on this model of GPU

#: vLLM 0.26.0 on the same model of GPU, hidden size 4096, microseconds (graph replay, rotated buffers, median of 30)
ANCHORS = {
    "hc_pre": {1: 9.0, 16: 10.0, 64: 10.6, 4096: 86.0},
    "hc_post": {1: 2.1, 16: 3.4, 64: 3.9, 4096: 75.0},
    "hyper_head": {1: 5.1, 16: 6.6, 64: 6.8, 4096: 110.0},
}


@dataclass(frozen=True)
class Kernel:
    """A launch, its inputs, the shapes and dtypes of its outputs, and what the outputs should be."""

    launch: Callable[[Sequence[Tensor], Sequence[Tensor]], object]
    inputs: tuple[Tensor, ...]
    outputs: dict[str, tuple[tuple[int, ...], torch.dtype]]
    truth: Callable[[tuple[Tensor, ...]], dict[str, bounds.Spread]]
    moved: int  # bytes that must be read or written at least

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.outputs)


def kernel(name: str, tokens: int, d: int, device: str, seed: int = 0) -> Kernel:
    """One of ANCHORS' kernels on random data; streams of unequal size, as a trained model has them."""
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    n = hyper.STREAMS
    x = (normal(tokens, n, d) * torch.tensor([0.5, 1.0, 2.0, 4.0], device=device).view(n, 1)).bfloat16()
    f32, bf16 = torch.float32, torch.bfloat16
    big = 2 * x.numel()
    if name == "hc_post":
        post, comb = normal(tokens, n).sigmoid() * 2, normal(tokens, n, n).softmax(-1)
        return Kernel(
            lambda i, o: hyper.hc_post(i[0], i[1], i[2], i[3], o),
            (x, post, comb, normal(tokens, d).bfloat16()),
            {"streams": ((tokens, n, d), bf16)},
            lambda i: {"streams": bounds.mix(i[0], i[1], i[2], i[3], coef="fp32", terms=0.0)},
            2 * big + big // n,
        )
    rows, scales = (hyper.ROWS, 3) if name == "hc_pre" else (n, 1)
    params = (normal(rows, n * d) / (n * d) ** 0.5, normal(rows), normal(scales))
    base_out = {"pre": ((tokens, n), f32), "collapsed": ((tokens, d), bf16)}
    moved = big + big // n + 4 * params[0].numel()
    if name == "hyper_head":
        return Kernel(
            lambda i, o: hyper.hyper_head(i[0], i[1], i[2], i[3], HC_EPS, RMS_EPS, o),
            (x, *params),
            base_out,
            lambda i: bounds.head(i[0], i[1], i[2], i[3], eps=RMS_EPS, hc_eps=HC_EPS),
            moved,
        )
    order = {"pre": base_out["pre"], "post": base_out["pre"], "comb": ((tokens, n, n), f32)}
    return Kernel(
        lambda i, o: hyper.hc_pre(i[0], i[1], i[2], i[3], ITERATIONS, HC_EPS, RMS_EPS, o),
        (x, *params),
        order | {"collapsed": base_out["collapsed"]},
        lambda i: bounds.connection(*i, eps=RMS_EPS, hc_eps=HC_EPS, iterations=ITERATIONS),
        moved,
    )


class Guarded:
    """Output tensors inside larger ones; ``intact`` says whether nothing around them was written."""

    def __init__(self, k: Kernel, device: str) -> None:
        self.whole = [torch.full((_count(s) + 2 * GUARD,), float("nan"), dtype=t, device=device) for s, t in _of(k)]
        self.inner = [w[GUARD : GUARD + _count(s)].view(s) for w, (s, _) in zip(self.whole, _of(k), strict=True)]

    def intact(self) -> bool:
        return all(bool(w[:GUARD].isnan().all() and w[-GUARD:].isnan().all()) for w in self.whole)

    def bits(self) -> list[Tensor]:
        return [t.contiguous().view(torch.uint8).clone() for t in self.inner]


def _of(k: Kernel) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return list(k.outputs.values())


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def check(k: Kernel, device: str) -> dict[str, Any]:
    """Margins by output, and whether guards, repetition and graph replay hold."""
    first, second, third = (Guarded(k, device) for _ in range(3))
    k.launch(k.inputs, first.inner)
    k.launch(k.inputs, second.inner)
    k.launch(k.inputs, third.inner)  # warm, then poisoned again for the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        k.launch(k.inputs, third.inner)
    for w in third.whole:
        w.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    same = [all(map(torch.equal, first.bits(), other.bits())) for other in (second, third)]
    margins = verdict(k, dict(zip(k.names, first.inner, strict=True)))
    guards = all(g.intact() for g in (first, second, third))
    ok = guards and all(same) and all(m <= 1.0 for m in margins.values())
    return {"margins": margins, "guards": guards, "twice": same[0], "graph": same[1], "ok": ok}


def verdict(k: Kernel, produced: dict[str, Tensor]) -> dict[str, float]:
    """Each output's worst error over its bound; infinite for what is not finite."""
    truth = k.truth(tuple(t.double() for t in k.inputs))
    found = {}
    for name, value in produced.items():
        t = truth[name]
        judged = Judged(t.y.cpu(), t.rss.cpu(), t.lin.cpu())
        dtype = "bf16" if value.dtype == torch.bfloat16 else "fp32"
        finite = bool(value.isfinite().all())
        found[name] = float(margin(value.cpu(), judged, dtype).worst) if finite else float("inf")
    return found


def parity(tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One line a kernel, size and number of tokens."""
    for name in ANCHORS:
        for size, d in SIZES.items():
            for t in tokens:
                yield {"kernel": name, "size": size, "T": t, **check(kernel(name, t, d, "cuda", seed=t), "cuda")}


def bench() -> Iterator[dict[str, Any]]:
    """One line a kernel, size and number of tokens; ``bytes`` over ``copy`` is the floor."""
    for name, anchors in ANCHORS.items():
        for size, d in SIZES.items():
            for t, anchor in anchors.items():
                one = kernel(name, t, d, "cuda")
                sets = max(2, min(64, int(4 * L2 / one.moved) + 1))
                many = [one, *(kernel(name, t, d, "cuda", seed) for seed in range(1, sets))]
                us = _replayed(many)
                line = {"kernel": name, "size": size, "T": t, "us": round(us, 2), "buffers": sets}
                line["floor_us"] = round(one.moved / COPY * 1e6, 2)
                yield line | ({"vllm_us": anchor} if size == "flash" else {})


def _replayed(many: Sequence[Kernel]) -> float:
    """Microseconds a launch: one graph over all buffers, median of 30 replays."""
    outs = [[torch.empty(s, dtype=t, device="cuda") for s, t in _of(k)] for k in many]
    for k, o in zip(many, outs, strict=True):
        k.launch(k.inputs, o)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k, o in zip(many, outs, strict=True):
            k.launch(k.inputs, o)
    times = []
    for _ in range(33):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(many))
    return statistics.median(times[3:])


def header(command: str) -> dict[str, Any]:
    """What a reader needs to trust the lines below it."""
    built = loader.build()
    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "command": command,
        "sources": loader.unit_hashes(),
        "gpu": torch.cuda.get_device_name(),
        "driver": smi.stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "spills": sum(built.spills.values()),
    }


def main(words: Sequence[str]) -> int:
    """parity FILE [T,T,...] or bench FILE; 1 if a line is not ok."""
    if len(words) not in (2, 3) or words[0] not in ("parity", "bench"):
        print("usage: python -m benchmarks.gpu parity|bench FILE [T,T,...]", file=sys.stderr)
        return 2
    if (why := loader.unavailable()) is not None:
        print(f"benchmarks.gpu: {why}", file=sys.stderr)
        return 2
    tokens = tuple(map(int, words[2].split(","))) if len(words) == 3 else TOKENS
    unit = {"unit": "hyper.cu"}
    lines = [header(f"python -m benchmarks.gpu {' '.join(words)}")]
    for line in parity(tokens) if words[0] == "parity" else bench():
        print(json.dumps(line), flush=True)
        lines.append(unit | line)
    Path(words[1]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0 if all(line.get("ok", True) for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
