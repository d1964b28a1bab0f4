"""Train the bundled checkpoint from scratch or from a saved state, within a time limit.

    python -m cases.training.train --minutes 6 --out runs/a
    python -m cases.training.train --minutes 5 --out runs/b --resume runs/a/state0.pt runs/a/state1.pt

Phases, by share of the time: `form` (128 tokens, 2 to 16 objects, until recall forms), `grow` (up to 768 tokens, every
compressed entry attended, the indexer learning from the attention's mass), `sparse` (half of the steps with the real
top-k), `quant` (weights as exported, straight-through gradients, the rate falling to zero). The state is saved in two
parts after each phase; `cases.training.export --state` turns it into the checkpoint.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from .arch import CONFIG, build
from .data import batch
from .learner import ALL, Learner
from .start import initialise

TOP_K: int = CONFIG["index_topk"]
SHAPES = ((128, 128), (320, 48), (768, 24))  # (length, rows) of the phases after `form`


def save(model: torch.nn.Module, out: Path) -> None:
    """The fp32 state dict in two files of about 13 MB."""
    state = {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}
    names = sorted(state)
    for i, half in enumerate((names[0::2], names[1::2])):
        torch.save({k: state[k] for k in half}, out / f"state{i}.pt")


class Run:
    """The clock, the log and the phase plan of one training run."""

    def __init__(self, args: argparse.Namespace, learner: Learner) -> None:
        self.args, self.learner = args, learner
        self.began = time.monotonic()
        self.generator = torch.Generator(device=learner.device).manual_seed(args.seed)
        self.log_file = (args.out / "train.log").open("a")
        self.steps = 0
        self.window: list[Tensor] = []
        self.last = self.began

    @property
    def used(self) -> float:
        """Share of the time limit that is gone."""
        return (time.monotonic() - self.began) / (60 * self.args.minutes)

    def log(self, text: str) -> None:
        line = f"{time.monotonic() - self.began:6.1f}s {self.steps:6d} {text}"
        print(line, flush=True)
        self.log_file.write(line + "\n")
        self.log_file.flush()

    def train(
        self, phase: str, length: int, rows: int, objects: tuple[int, int], rate: float, topk: int, quant: bool
    ) -> None:
        """One step on a fresh batch."""
        rows = max(1, rows // self.args.shrink)
        data = batch(rows, length, objects, self.args.bare, self.generator, self.learner.device)
        floor = 0.003 if phase == "form" else 0.02
        self.window.append(self.learner.step(data, rate, floor, topk, quant))
        self.steps += 1

    def recall(self, phase: str) -> float:
        """Log the mean statistics since the last call; returns the recall accuracy."""
        stats = torch.stack(self.window)
        language, index, norm = stats[:, 0].mean().item(), stats[:, 1].max().item(), stats[:, 4].mean()
        accuracy = (stats[:, 2].sum() / stats[:, 3].sum()).item()
        now = time.monotonic()
        ms = 1000 * (now - self.last) / len(self.window)
        self.log(f"{phase:6s} loss {language:.4f} index {index:.3f} recall {accuracy:.4f} norm {norm:.2f} {ms:.0f} ms")
        self.window, self.last = [], now
        return accuracy

    def form(self, until: float) -> None:
        """128 tokens; the number of objects grows to 16; ends early once recall is there."""
        while self.used < until:
            most = min(16, 2 + self.steps // self.args.ramp)
            rate = self.args.rate * min(1.0, (self.steps + 1) / 50)
            self.train("form", 128, 128, (2, most), rate, ALL, False)
            if self.steps % self.args.every == 0 and self.recall("form") > 0.97 and most == 16:
                break

    def mixed(self, phase: str, until: float, sparse: bool, quant: bool, fall_from: float) -> None:
        """Lengths to 768; with `sparse`, two of three steps use the real top-k; the rate falls from `fall_from` on."""
        while self.used < until:
            length, rows = SHAPES[self.steps % len(SHAPES)]
            topk = TOP_K if sparse and (self.steps // len(SHAPES)) % 3 and length > TOP_K * 4 else ALL
            rate = self.args.rate * min(1.0, max(0.02, (until - self.used) / max(until - fall_from, 1e-9)))
            self.train(phase, length, rows, (2, 16) if length < 300 else (6, 20), rate, topk, quant)
            if self.steps % self.args.every == 0:
                self.recall(phase)

    def report(self, quant: bool) -> None:
        """Accuracies with the real top-k at several lengths, on fresh batches."""
        generator = torch.Generator(device=self.learner.device).manual_seed(99)
        for length in (128, 384, 512, 700):
            rows = max(2, 48 // self.args.shrink)
            data = batch(rows, length, (16, 16), 0.33, generator, self.learner.device)
            for topk in (TOP_K, ALL):
                result = self.learner.accuracy(data, topk, quant)
                text = "  ".join(f"{k} {a:.4f} ({n})" for k, (a, n) in result.items())
                self.log(f"eval {length} top-{'all' if topk == ALL else topk} {'nvfp4' if quant else 'fp32'}: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--resume", nargs="+", type=Path, help="state parts; skips `form`")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--bare", type=float, default=0.5, help="share of rows in the bare form")
    parser.add_argument("--ramp", type=int, default=30, help="steps between additions of an object in `form`")
    parser.add_argument("--shares", nargs=3, type=float, default=(0.45, 0.68, 0.8), help="ends of the first 3 phases")
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--shrink", type=int, default=1, help="divide the batch, for trials on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True

    model = build("dense")
    initialise(model)
    if args.resume:
        state: dict[str, Tensor] = {}
        for part in args.resume:
            state |= torch.load(part, weights_only=True)
        model.load_state_dict(state)
    run = Run(args, Learner(model.to(device), graphs=device.type == "cuda"))
    form, grow, sparse = args.shares
    if not args.resume:
        run.form(form)
        save(model, args.out)
        run.report(False)
    run.mixed("grow", grow, False, False, fall_from=1.0)
    save(model, args.out)
    run.report(False)
    run.mixed("sparse", sparse, True, False, fall_from=1.0)
    save(model, args.out)
    run.report(False)
    run.mixed("quant", 0.97, True, True, fall_from=sparse)
    save(model, args.out)
    run.report(True)


if __name__ == "__main__":
    main()
