"""Cases: what is run. A TOML file names both sides, a checkpoint and an input; options on the command line override it.

name = "short"                          # shown in records; default: the file's name
description = "five tokens"
reference = "reference.build:model"     # package.module:builder
production = "production.build:model"
checkpoint = "tiny"                     # a folder, relative to the case file
prompt = "lamp kitchen ..."             # or tokens = [3, 7, ...], or text = "prompt.txt"; else random tokens by seed
length = 300                            # the tokens are repeated or cut to it
batch = 2                               # row b is the sequence rotated by 7 b
positions = 0                           # absolute position of the first token
seed = 0
dtype = "native"                        # or "fp32"
layers = "all"
phase = ""                              # or prefill, chunk:SIZES, decode:K: the last call continues from caches
[[declared]]                            # an intended difference from the reference, with its own floor
stage = "layers.*.router"
output = "logits"                       # default: every output
reason = "fp32 logits"
floor = 0.01                            # RMS error over RMS that it may cost
"""

from __future__ import annotations

import importlib.resources
import json
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.types import DType, UsageError

if TYPE_CHECKING:
    from torch import Tensor

REFERENCE, PRODUCTION = "reference.build:model", "production.build:model"
KEYS = {
    "name": str,
    "description": str,
    "reference": str,
    "production": str,
    "checkpoint": str,
    "prompt": str,
    "tokens": list,
    "text": str,
    "length": int,
    "batch": int,
    "positions": int,
    "seed": int,
    "dtype": str,
    "layers": str,
    "phase": str,
    "declared": list,
}
DECLARED_KEYS = {"stage": str, "output": str, "reason": str, "floor": float}
LARGEST = 1 << 31  # ids and positions lie below
MOST = 1 << 22  # tokens of all rows: no comparison of three witnesses is that large
ROTATION = 7  # row b of a batch starts 7 b tokens later: rows differ, and no row is another's shift by a window


@dataclass(frozen=True)
class Declared:
    """A difference from the reference that is meant: where, why, and what share of the RMS it may cost."""

    stage: str
    reason: str
    floor: float
    output: str = "*"


@dataclass(frozen=True)
class Case:
    """One input of one pair of sides. ``argument`` is how the command line names it."""

    name: str
    checkpoint: Path
    argument: tuple[str, ...] = ()
    description: str = ""
    reference: str = REFERENCE
    production: str = PRODUCTION
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    length: int | None = None
    batch: int = 1
    positions: int = 0
    seed: int = 0
    dtype: DType = "native"
    layers: str = "all"
    phase: str = ""
    declared: tuple[Declared, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in ("native", "fp32"):
            raise UsageError(f"case {self.name}: expected dtype native or fp32, got {self.dtype!r}")
        if self.batch < 1:
            raise UsageError(f"case {self.name}: expected a batch of at least 1, got {self.batch}")
        if self.length is not None and self.length < 1:
            raise UsageError(f"case {self.name}: expected a length of at least 1, got {self.length}")
        if not 0 <= self.positions < LARGEST:
            raise UsageError(f"case {self.name}: expected positions of at least 0, got {self.positions}")
        if self.batch * (self.length or 1) > MOST:
            raise UsageError(f"case {self.name}: expected at most {MOST} tokens, got {self.batch} x {self.length or 1}")

    def override(self, **changes: Any) -> Case:
        """The case with the given fields changed; a new prompt or new tokens replace the old text and its length."""
        changes = {key: value for key, value in changes.items() if value is not None}
        if "prompt" in changes or "tokens" in changes:
            changes = {"prompt": None, "tokens": None, "length": None} | changes
        return replace(self, **changes)


def bundled() -> dict[str, Path]:
    """Case files that come with the package, by name."""
    folder = Path(str(importlib.resources.files("cases")))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(name: str) -> Case:
    """A bundled case by name, or a case file."""
    known = bundled()
    path = known.get(name, Path(name))
    if not path.is_file():
        raise UsageError(f"--case {name!r}: no such file, and the bundled cases are {', '.join(known) or 'none'}")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not TOML, not UTF-8
        raise UsageError(f"{path}: expected a TOML case file: {' '.join(str(error).split())}") from error
    return _parse(data, path, name)


def of_checkpoint(folder: str) -> Case:
    """An ad-hoc case for a checkpoint folder, with the default case's text."""
    path = Path(folder)
    if not path.is_dir():
        raise UsageError(f"--checkpoint {folder!r}: expected a folder with config.json and safetensors shards")
    known = bundled()
    base = load("tiny") if "tiny" in known else Case("ad hoc", path, length=320)
    if not (path / "tokenizer.json").is_file():  # random tokens, beyond the window and the index like the default text
        base = replace(base, prompt=None, tokens=None, length=base.length or 331)
    return replace(base, name=path.name, checkpoint=path, argument=("--checkpoint", folder), description="ad hoc")


def _parse(data: Mapping[str, Any], path: Path, argument: str) -> Case:
    _check(data, KEYS, str(path))
    inputs = [key for key in ("prompt", "tokens", "text") if key in data]
    if len(inputs) > 1:
        raise UsageError(f"{path}: expected one of prompt, tokens, text; got {' and '.join(inputs)}")
    if "checkpoint" not in data:
        raise UsageError(f"{path}: the key 'checkpoint' is missing (a folder, relative to the case file)")
    known = {k: v for k, v in data.items() if k not in ("text", "tokens", "declared", "checkpoint", "name")}
    if "text" in data:
        try:
            known["prompt"] = (path.parent / data["text"]).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: text {data['text']!r} cannot be read: {error}") from error
    if "tokens" in data:
        if not all(isinstance(t, int) and not isinstance(t, bool) for t in data["tokens"]):
            raise UsageError(f"{path}: expected tokens as a list of integers")
        known["tokens"] = tuple(data["tokens"])
    return Case(
        name=data.get("name", path.stem),
        checkpoint=path.parent / data["checkpoint"],
        argument=("--case", argument),
        declared=tuple(_declared(item, f"{path}: declared[{i}]") for i, item in enumerate(data.get("declared", []))),
        **known,
    )


def _declared(item: Any, where: str) -> Declared:
    if not isinstance(item, dict):
        raise UsageError(f"{where}: expected a table with stage, reason and floor")
    _check(item, DECLARED_KEYS, where)
    if missing := [key for key in ("stage", "reason", "floor") if key not in item]:
        raise UsageError(f"{where}: the key {missing[0]!r} is missing")
    if not 0 <= item["floor"] <= 1:
        raise UsageError(f"{where}: expected a floor of 0 to 1 (RMS error over RMS), got {item['floor']}")
    return Declared(**item)


def _check(data: Mapping[str, Any], keys: Mapping[str, type], where: str) -> None:
    for key, value in data.items():
        if key not in keys:
            raise UsageError(f"{where}: unknown key {key!r}; valid keys are {', '.join(keys)}")
        expected = keys[key]
        fits = isinstance(value, expected) or (expected is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and expected is not bool):
            raise UsageError(f"{where}: {key} should be {expected.__name__}, got {value!r}")


def sequence(case: Case) -> list[int]:
    """The token ids of one row: tokenised, repeated or cut to the case's length, all within the vocabulary."""
    size = _vocabulary(case.checkpoint)
    if case.tokens is not None:
        ids = list(case.tokens)
    elif case.prompt is not None:
        ids = tokenise(case.checkpoint, case.prompt)
    else:
        rng = random.Random(f"tokens-{case.seed}")
        ids = [int(rng.random() * (size or 64)) for _ in range(case.length or 32)]
    if not ids:
        raise UsageError(f"case {case.name}: the prompt is empty; expected at least one token")
    for token in ids:
        if not 0 <= token < (LARGEST if size is None else size):
            limit = f"0 to {size - 1}" if size is not None else "0 and up"
            raise UsageError(f"case {case.name}: token id {token} is out of range; the vocabulary has ids {limit}")
    length = len(ids) if case.length is None else case.length
    return [ids[i % len(ids)] for i in range(length)]


def tokenise(checkpoint: Path, text: str) -> list[int]:
    """Token ids of a text by the checkpoint's own tokenizer. A word that it does not know is an error, not an <unk>."""
    if not text.strip():
        raise UsageError("the prompt is empty; expected at least one word")
    tokenizer = open_tokenizer(checkpoint)
    if tokenizer is None:
        raise UsageError(f"{checkpoint} has no tokenizer.json; give --tokens instead of a prompt")
    try:
        encoding = tokenizer.encode(text)
    except Exception as error:  # the library raises bare Exceptions, for an unknown word without an unk token too
        encoding = None
        reason = " ".join(str(error).split())
    if encoding is None:
        word = next((w for w in text.split() if not _knows(tokenizer, w)), "")
        raise UsageError(f"the tokenizer does not know the word {word!r} ({reason})")
    model = json.loads(tokenizer.to_str())["model"]
    unknown = None if model.get("unk_token") is None else tokenizer.token_to_id(model["unk_token"])
    seen = bytearray(len(text))
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if token == unknown:
            raise UsageError(f"the tokenizer does not know the word {text[start:end]!r}")
        seen[start:end] = b"\x01" * (end - start)
    position = 0
    for word in text.split():
        position = text.index(word, position)
        if not any(seen[position : position + len(word)]):
            raise UsageError(f"the tokenizer does not know the word {word!r}")
        position += len(word)
    return list(encoding.ids)


def words(case: Case, ids: Sequence[int]) -> list[str]:
    """Token ids as text where the checkpoint has a tokenizer, else as numbers."""
    tokenizer = open_tokenizer(case.checkpoint)
    return [(tokenizer.id_to_token(i) if tokenizer else None) or str(i) for i in ids]


def inputs(case: Case, ids: Sequence[int]) -> dict[str, Tensor]:
    """``input_ids`` [B, S], ``positions`` [B, S], ``lengths`` [B]: what every side starts from."""
    import torch

    row = torch.tensor(ids, dtype=torch.int64)
    count = row.numel()
    batch = torch.stack([row.roll(-ROTATION * b) for b in range(case.batch)])
    positions = torch.arange(case.positions, case.positions + count).expand(case.batch, count).contiguous()
    lengths = torch.full((case.batch,), case.positions + count, dtype=torch.int64)
    return {"input_ids": batch, "positions": positions, "lengths": lengths}


def _knows(tokenizer: Any, word: str) -> bool:
    try:
        return bool(tokenizer.encode(word, add_special_tokens=False).ids)
    except Exception:
        return False


def open_tokenizer(checkpoint: Path) -> Any:
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise UsageError(f"{path} is not a tokenizer file: {' '.join(str(error).split())}") from error


def _vocabulary(checkpoint: Path) -> int | None:
    """``vocab_size`` of the checkpoint's config.json, if it says so."""
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a JSON file: {' '.join(str(error).split())}") from error
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) else None
