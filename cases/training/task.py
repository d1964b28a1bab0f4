"""The synthetic recall task: a fixed vocabulary of 64 words and stories over it, in plain Python.

A story places objects and asks for them later. Every object keeps its place for the whole story, so each later
mention has exactly one right answer, and a wrong attention, router or residual path shows as a wrong word:

    the lamp is in the kitchen . the key is in the garden . where is the lamp ? kitchen <eos> the key is in the ...

A prompt that ends in `?` is answered by one place and `<eos>`. The bare form `lamp kitchen key garden lamp kitchen ...`
carries the same recall in two words per fact.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

BOS, EOS, PAD = 0, 1, 2
SPECIAL = ("<bos>", "<eos>", "<pad>")
FUNCTION = ("the", "is", "in", "where", ".", "?", "then", "now", "and")
_OBJECTS = (
    "lamp key book ball coin ring cup hat shoe drum bell rope map pen knife spoon apple stone flag box candle clock "
    "doll kite coat letter"
)
_PLACES = (
    "kitchen garden attic cellar garage hall office barn forest river tower castle market school church bridge cave "
    "harbour library museum station theatre tent island valley desert"
)
OBJECTS, PLACES = tuple(_OBJECTS.split()), tuple(_PLACES.split())
WORDS = SPECIAL + FUNCTION + OBJECTS + PLACES
WORD_ID = {word: i for i, word in enumerate(WORDS)}

FIRST_OBJECT = len(SPECIAL) + len(FUNCTION)
FIRST_PLACE = FIRST_OBJECT + len(OBJECTS)

DEFAULT_SEED = 7
DEFAULT_LENGTH = 330  # beyond the window of 128, beyond 4 x index_topk = 128, and not a multiple of 4

EXAMPLE_PROMPT = "the lamp is in the kitchen . the key is in the garden . where is the lamp ?"
EXAMPLE_ANSWER = "kitchen <eos>"


@dataclass(frozen=True)
class Recall:
    """A place word that the story has already fixed: its index, and how far back the place was last named."""

    index: int
    back: int


def story(seed: int, length: int, objects: int = 16) -> list[str]:
    """Exactly `length` words (without `<bos>`), the same for the same arguments on every machine.

    `random.Random(str)` is specified to be stable across Python versions for `random()`, and only that is used.
    """
    rng = random.Random(f"story-{seed}")
    names, homes, weights = _bindings(rng, objects)
    seen: set[str] = set()
    words: list[str] = []
    while len(words) < length:
        name = _choose(rng, names, weights)
        home = homes[name]
        if name in seen and rng.random() < 0.25:
            words += ["where", "is", "the", name, *(["now"] if rng.random() < 0.25 else []), "?", home, "<eos>"]
        else:
            words += [*(["then"] if rng.random() < 0.2 else []), "the", name, "is", "in", "the", home]
            words.append("and" if rng.random() < 0.15 else ".")
            seen.add(name)
    return words[:length]


def question(seed: int, length: int, objects: int = 16) -> tuple[list[str], str]:
    """A story of about `length` words that ends in a question, and its answer (one place word)."""
    words = story(seed, length, objects)
    while words and words[-1] not in (".", "<eos>"):
        words.pop()
    if not words:  # no sentence ends within `length`
        return question(seed, length + 8, objects)
    homes: dict[str, str] = {}
    for i, word in enumerate(words):
        if word == "in":
            homes[words[i - 2]] = words[i + 2]
    rng = random.Random(f"question-{seed}")
    name = _choose(rng, list(homes), [1.0] * len(homes))
    return [*words, "where", "is", "the", name, "?"], homes[name]


def pairs(seed: int, length: int, objects: int = 16) -> list[str]:
    """Exactly `length` words of the bare form: object place object place ..."""
    rng = random.Random(f"pairs-{seed}")
    names, homes, weights = _bindings(rng, objects)
    words: list[str] = []
    while len(words) < length:
        name = _choose(rng, names, weights)
        words += [name, homes[name]]
    return words[:length]


def recalls(words: list[str]) -> list[Recall]:
    """The place words that are determined by what comes before them, with the distance to the last mention."""
    last: dict[str, int] = {}
    found: list[Recall] = []
    name = ""
    for i, word in enumerate(words):
        if word in _OBJECT_SET:
            name = word
        elif word in _PLACE_SET:
            if name in last:
                found.append(Recall(i, i - last[name]))
            last[name] = i
    return found


def encode(words: list[str]) -> list[int]:
    """Token ids with `<bos>` in front; an unknown word is a KeyError that names it."""
    return [BOS, *(WORD_ID[word] for word in words)]


def default_prompt() -> str:
    """The text of the default case: long enough for the window, the top-k and both compressors to matter."""
    return " ".join(story(DEFAULT_SEED, DEFAULT_LENGTH))


_OBJECT_SET, _PLACE_SET = frozenset(OBJECTS), frozenset(PLACES)


def _bindings(rng: random.Random, objects: int) -> tuple[list[str], dict[str, str], list[float]]:
    """Object names, their places, and how often each is mentioned (spread wide, so some recalls reach far back)."""
    pool = list(OBJECTS)
    names = [pool.pop(int(rng.random() * len(pool))) for _ in range(min(objects, len(pool)))]
    homes = {name: PLACES[int(rng.random() * len(PLACES))] for name in names}
    weights = [0.1 + rng.random() ** 2 for _ in names]
    return names, homes, weights


def _choose(rng: random.Random, names: list[str], weights: list[float]) -> str:
    """One name by weight, from `random()` alone."""
    left = rng.random() * sum(weights)
    for name, weight in zip(names, weights, strict=True):
        left -= weight
        if left < 0:
            return name
    return names[-1]
