"""Accuracies and spreads of the bundled checkpoint, from its NVFP4 bytes, in bf16 on the CPU (`make eval`).

python -m cases.training.evaluate [--checkpoint cases/tiny] [--stories 8] [--questions 40]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from . import facts
from .export import OUT
from .load import load
from .task import EOS, EXAMPLE_PROMPT, WORD_ID, WORDS, encode, pairs, question, recalls, story

LENGTHS = (128, 384, 512, 700)
QUESTION_LENGTHS = (14, 30, 60, 120, 250, 500)
FAR = 140  # tokens: beyond the sliding window of 128, so only compressed entries can carry the recall
FIRST_SEED = 50_000  # apart from the default case's seed; training draws from another generator altogether


def share(right: list[bool]) -> str:
    """`99.3 % of 1234`."""
    return f"{100 * sum(right) / len(right):.1f} % of {len(right)}" if right else "none"


@torch.no_grad()
def recall_at(
    model: DeepseekV4ForCausalLM, make: Callable[[int, int], list[str]], length: int, texts: int
) -> tuple[list[bool], list[bool]]:
    """Whether each recalled place is the model's first choice: all recalls, and those more than FAR tokens back."""
    words = [make(FIRST_SEED + i, length - 1) for i in range(texts)]  # bos makes it `length` tokens
    ids = torch.tensor([encode(w) for w in words], device=model.device)
    best = model(input_ids=ids, use_cache=False).logits.argmax(-1)
    every, far = [], []
    for row, text in enumerate(words):
        for recall in recalls(text):
            # Token t + 1 of the row is word t, and position t predicts it.
            hit = bool(best[row, recall.index] == ids[row, recall.index + 1])
            every.append(hit)
            if recall.back > FAR:
                far.append(hit)
    return every, far


@torch.no_grad()
def answer(model: DeepseekV4ForCausalLM, words: list[str], most: int = 4) -> list[str]:
    """Greedy continuation of a prompt until eos, recomputed from the start for every token."""
    ids = encode(words)
    out: list[str] = []
    while len(out) < most and (not out or out[-1] != WORDS[EOS]):
        token = int(model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1].argmax())
        ids.append(token)
        out.append(WORDS[token])
    return out


@torch.no_grad()
def questions(model: DeepseekV4ForCausalLM, length: int, count: int) -> list[bool]:
    """Whether a story of about `length` words with a question gets exactly its place and eos, greedily.

    One forward over prompt and right answer decides it: greedy decoding is right exactly where both first choices are.
    """
    right = []
    for i in range(count):
        words, place = question(FIRST_SEED + 100 * length + i, length, objects=min(16, 2 + length // 10))
        ids = torch.tensor([encode([*words, place])], device=model.device)
        best = model(input_ids=ids, use_cache=False).logits[0, -2:].argmax(-1)
        right.append(best.tolist() == [WORD_ID[place], EOS])
    return right


def accuracies(model: DeepseekV4ForCausalLM, stories: int, count: int) -> Iterator[tuple[str, str]]:
    """All accuracy rows, each as soon as it is measured."""
    for length in LENGTHS:
        for form, make in (("stories", story), ("pairs", pairs)):
            every, far = recall_at(model, make, length, stories)
            yield f"recall, {form}, {length} tokens", f"{share(every)}; more than {FAR} tokens back: {share(far)}"
    for length in QUESTION_LENGTHS:
        yield f"answer and eos, about {length} words", share(questions(model, length, count))


def spreads(model: DeepseekV4ForCausalLM, folder: Path, length: int = 513) -> dict[str, str]:
    """All rows about coefficients, attention, picks and bytes, on two stories of `length` tokens."""
    ids: Tensor = torch.tensor([encode(story(FIRST_SEED + 900 + i, length - 1)) for i in range(2)])
    probe = facts.Probe(model)
    try:
        seen = probe.run(ids)
        rows = facts.hyper(model, seen) | facts.attention(model, seen) | facts.routers(model, seen)
        rows |= facts.indexer(probe.run(ids, topk=1 << 20), length)
    finally:
        probe.close()
    return rows | facts.stored(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=OUT)
    parser.add_argument("--stories", type=int, default=2, help="texts per length and form")
    parser.add_argument("--questions", type=int, default=4, help="questions per length")
    dtypes = ("bfloat16", "float32")
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16", help="bf16 is slow on CPUs without bf16 units")
    parser.add_argument("--device", default="cpu", help="for the accuracies; the spreads are measured on the CPU only")
    args = parser.parse_args()
    began = time.monotonic()
    model = load(args.checkpoint, getattr(torch, args.dtype)).to(args.device)
    for name, value in accuracies(model, args.stories, args.questions):
        print(f"{name:34s} {value}", flush=True)
    if args.device == "cpu":
        for name, value in spreads(model, args.checkpoint).items():
            print(f"{name:34s} {value}", flush=True)
    words = EXAMPLE_PROMPT.split()
    print(f"{EXAMPLE_PROMPT!r} -> {' '.join(answer(model, words))!r}")
    print(f"{time.monotonic() - began:.0f} s, {torch.get_num_threads()} threads, {args.dtype}")


if __name__ == "__main__":
    main()
