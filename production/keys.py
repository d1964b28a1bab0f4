"""Typed access to the keys of a ``config.json``; a wrong value is an error that names its key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from production.errors import ProductionError

#: Keys that say nothing about the forward pass of this path.
IGNORED = frozenset(
    {
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "expert_dtype",
        "initializer_range",
        "max_position_embeddings",
        "output_router_logits",
        "pad_token_id",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "topk_method",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "_name_or_path",
    }
)


class Keys:
    """The raw keys of one file; remembers which were read."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where
        self.read: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def count(self, key: str) -> int:
        value = self.take(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "an integer >= 1", value)
        return value

    def number(self, key: str, ok: Callable[[float], bool] = lambda v: True, expected: str = "a number") -> float:
        return self.number_of(key, self.take(key), ok, expected)

    def number_of(self, key: str, value: Any, ok: Callable[[float], bool], expected: str) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not ok(value):
            raise self.error(key, expected, value)
        return float(value)

    def exactly(self, key: str, wanted: Any, default: Any, why: str) -> None:
        value = self.take(key, default)
        if value != wanted:
            raise self.error(key, repr(wanted), value, why)

    def error(self, key: str, expected: str, value: Any, fix: str = "") -> ProductionError:
        came = "no such key" if value is None else repr(value)
        return ProductionError(f"{self.where}: {key}", expected=expected, came=came, fix=fix)

    def wrong_length(self, key: str, value: Any, *lengths: int) -> ProductionError:
        expected = f"a list of {' or '.join(map(str, sorted(lengths)))} entries"
        came = f"{len(value)} entries" if isinstance(value, list) else repr(value)
        return ProductionError(f"{self.where}: {key}", expected=expected, came=came)

    def unread(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.raw) - self.read - IGNORED))
