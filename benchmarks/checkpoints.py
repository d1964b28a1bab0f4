"""Stacking experts and decoding NVFP4: time and memory against the naive way, as ratios within one run.

    python -m benchmarks.checkpoints [--config flash] [--experts 32] [--folder DIR] [--json FILE]

Each measurement runs in a process of its own, in turns; ratios are medians over the turns. The peak is the high-water
mark of resident memory, less what the same process needed to import torch and read the headers. A file copy is timed
beside it, on the same disk. The exit code is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, alternate

OUT = ROOT / "reports" / "bench" / "checkpoints.json"
LEAVES = ("w1", "w3", "w2")
REPEATS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=("tiny", "flash", "pro"), default="flash")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to make the checkpoint (default: a temporary folder)")
    parser.add_argument("--json", type=Path, default=OUT)
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "DIR"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(MEASURES[args.measure[0]](Path(args.measure[1]))))
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        folder = Path(root) / "checkpoint"
        prepare(folder, args.config, args.experts)
        words = {what: ["benchmarks.checkpoints", "--measure", what, str(folder)] for what in MEASURES}
        turns = {what: [dict(s.said or {}) for s in found] for what, found in alternate(words, args.rounds).items()}
    figures = compare(turns)
    print(f"{'figure':46} {'value':>8} {'limit':>9}")
    for name, f in figures.items():
        limit = "" if f["limit"] is None else f"{f['bound']} {f['limit']}"
        print(f"{name:46} {f['value']:8.3f} {limit:>9}  {'' if f['ok'] else 'EXCEEDED'}")
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    run = {"config": args.config, "experts": args.experts, "machine": machine}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**run, "figures": figures, "samples": turns}, indent=1) + "\n")
    print(f"written to {args.json}", file=sys.stderr)
    return 0 if all(f["ok"] for f in figures.values()) else 1


def prepare(folder: Path, config: str, experts: int) -> None:
    """One sparse-attention layer in ModelOpt's experts-only layout."""
    from cases.checkpoints.layout import LAYOUTS
    from cases.checkpoints.make import make
    from cases.checkpoints.presets import PRESETS, cut

    chosen = {**cut(PRESETS[config], [2], experts), "vocab_size": 4096}
    make(folder, chosen, LAYOUTS["modelopt-experts"], shard_bytes=256 << 20)


def compare(turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """The ratios that matter, each with its limit."""

    def over(one: str, other: str) -> float:
        pairs = zip(turns[one], turns[other], strict=True)
        return float(statistics.median(a["seconds"] / b["seconds"] for a, b in pairs))

    def held(what: str) -> float:
        return float(statistics.median(s["peak"] / (s["bytes"] + s["one"]) for s in turns[what]))

    figures = {
        "stacking: peak over stack + one expert": (held("stack"), "<=", 1.05),
        "naive stacking: the same": (held("naive stack"), "<=", None),
        "stacking: time over a file copy": (over("stack", "file copy"), "<=", 1.2),
        "naive stacking: the same ": (over("naive stack", "file copy"), "<=", None),
        "production's decode: a look-up per nibble over it": (over("nibble look-up", "production decode"), ">=", 3.0),
        "reference's decode: a look-up per nibble over it": (over("nibble look-up", "reference decode"), ">=", 3.0),
    }
    return {
        name: {
            "value": round(value, 4),
            "bound": bound,
            "limit": limit,
            "ok": limit is None or (value <= limit if bound == "<=" else value >= limit),
        }
        for name, (value, bound, limit) in figures.items()
    }


def stack(folder: Path) -> dict[str, float]:
    """Production's reader: one buffer, filled from the files."""
    import torch

    from production.checkpoint import Reader, load
    from production.config import read_config
    from production.manifest import stage_leaves

    leaves = stage_leaves(read_config(folder))["layers.0.experts"]
    reader = Reader(folder)

    def once() -> dict[str, Any]:
        params: dict[str, Any] = {}
        for leaf in leaves:
            params |= load(reader, "layers.0.experts", leaf, "nvfp4", torch.device("cpu"))
        return params

    return outcome(once)


def naive_stack(folder: Path) -> dict[str, float]:
    """Every expert's tensors loaded by name with safetensors, then torch.stack."""
    import torch
    from safetensors import safe_open

    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {shard: safe_open(folder / shard, framework="pt") for shard in set(places.values())}
    experts = json.loads((folder / "config.json").read_text())["n_routed_experts"]

    def once() -> dict[str, Any]:
        loaded = {
            (leaf, suffix): [
                files[places[name]].get_tensor(name).clone()
                for name in (f"layers.0.ffn.experts.{expert}.{leaf}.{suffix}" for expert in range(experts))
            ]
            for leaf in LEAVES
            for suffix in ("weight", "weight_scale", "weight_scale_2")
        }
        return {"_".join(key): torch.stack(tensors) for key, tensors in loaded.items()}

    return outcome(once)


def file_copy(folder: Path) -> dict[str, float]:
    """The shards that hold the experts, copied: what the disk and the page cache allow."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as target:

        def once() -> None:
            for shard in folder.glob("*.safetensors"):
                shutil.copyfile(shard, Path(target) / shard.name)

        return {"seconds": fastest(once)}


def outcome(once: Callable[[], dict[str, Any]]) -> dict[str, float]:
    """Sizes of what ``once`` returns, the peak of one call, the time of the fastest."""
    before = peak()
    stacked = once()
    most = peak() - before
    sizes = [t.numel() * t.element_size() for t in stacked.values()]
    one = sum(sizes) / next(iter(stacked.values())).shape[0]
    stacked.clear()
    return {"seconds": fastest(once), "bytes": sum(sizes), "one": one, "peak": most}


def fastest(once: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return min(times)


def peak() -> int:
    """High-water mark of resident memory in bytes. Not getrusage's, which a child inherits from its parent."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def decoding(decode: str) -> Callable[[Path], dict[str, float]]:
    def measure(folder: Path) -> dict[str, float]:
        import torch

        from production.nvfp4 import decode_bf16
        from reference.fast import nvfp4_bfloat16
        from reference.shards import Shards

        shards = Shards(folder)
        stem = "layers.0.ffn.experts.0.w1."
        parts = [shards.tensor(stem + leaf) for leaf in ("weight", "weight_scale", "weight_scale_2")]
        ways = {"production": decode_bf16, "reference": nvfp4_bfloat16, "nibbles": by_nibble}
        assert torch.equal(ways[decode](*parts), by_nibble(*parts))
        seconds = fastest(lambda: ways[decode](*parts))
        return {"seconds": seconds, "values": 2 * parts[0].numel(), "threads": torch.get_num_threads()}

    return measure


def by_nibble(packed: Any, scale: Any, scale_2: Any) -> Any:
    """The usual way: unpack to integers, index a table of 16 values, scale in fp32, round to bf16."""
    import torch

    values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    table = torch.tensor(values + tuple(-v for v in values))
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    blocks = table[codes.long()].unflatten(-1, (-1, 16)) * (scale.float() * scale_2).unsqueeze(-1)
    return blocks.flatten(-2).bfloat16()


MEASURES: dict[str, Callable[[Path], dict[str, float]]] = {
    "stack": stack,
    "naive stack": naive_stack,
    "file copy": file_copy,
    "nibble look-up": decoding("nibbles"),
    "production decode": decoding("production"),
    "reference decode": decoding("reference"),
}

if __name__ == "__main__":
    sys.exit(main())
