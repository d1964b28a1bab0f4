"""The caches of one sequence over all layers, and the store that its pages come from.

What is kept for T tokens, per layer: the keys of the last window - 1 tokens (every layer); T // 4 entries,
T // 4 indexer keys and two open windows (CSA); T // 128 entries and one open window (HCA). Nothing is copied when a
token is added: rows are written in place, at slots that follow from their position.

``draft`` is the number of tokens that ``rollback`` may take back: rings hold that many more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from production.cache.csa import CsaState
from production.cache.hca import HcaState
from production.cache.pages import PAGE_ROWS, BlockTable, Paged, PageGroup, pages_for
from production.config import ModelConfig
from production.errors import ProductionError


@dataclass(frozen=True)
class Layout:
    """What the caches need to know of a model."""

    kinds: Mapping[int, str]  # layer -> sliding | csa | hca
    window: int
    csa_rate: int
    hca_rate: int
    head_dim: int
    index_dim: int
    dtype: torch.dtype  # of keys and entries; open windows are fp32

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype) -> Layout:
        return cls(
            kinds=dict(enumerate(config.layer_kinds)),
            window=config.sliding_window,
            csa_rate=config.csa_rate,
            hca_rate=config.hca_rate,
            head_dim=config.head_dim,
            index_dim=config.index_head_dim,
            dtype=dtype,
        )

    def bytes(self, tokens: int, draft: int = 0) -> int:
        """The formula: what a sequence of this length needs, without the slack of its last pages."""
        item = torch.empty((), dtype=self.dtype).element_size()
        total = 0
        for kind in self.kinds.values():
            total += min(tokens, self.window - 1 + draft) * self.head_dim * item
            if kind == "csa":
                width, windows = self.head_dim + self.index_dim, 1 + -(-draft // self.csa_rate)
                total += tokens // self.csa_rate * width * item
                total += 2 * 4 * width * (2 * (self.csa_rate + draft) + windows * self.csa_rate)
            elif kind == "hca":
                total += tokens // self.hca_rate * self.head_dim * item
                total += 2 * 4 * self.head_dim * (self.hca_rate + draft)
        return total


@dataclass
class LayerCache:
    """One layer of one sequence."""

    keys: Paged
    entries: Paged | None = None
    index: Paged | None = None
    compressor: CsaState | HcaState | None = None
    indexer: CsaState | None = None


class Store:
    """Pages for ``rows`` sequences of up to ``tokens`` tokens. ``rows`` counts forks, and what they will not share."""

    def __init__(self, layout: Layout, *, tokens: int, rows: int, draft: int, device: torch.device) -> None:
        self.layout, self.tokens, self.rows, self.draft, self.device = layout, tokens, rows, draft, device
        self.ring = pages_for(layout.window - 1 + draft) * PAGE_ROWS
        kinds = set(layout.kinds.values())
        self.groups = {"window": PageGroup("window", rows * self.ring // PAGE_ROWS, device)}
        for kind, rate in (("csa", layout.csa_rate), ("hca", layout.hca_rate)):
            if kind in kinds:
                self.groups[kind] = PageGroup(kind, rows * max(1, pages_for(tokens // rate)), device)
        for layer, kind in layout.kinds.items():
            self.groups["window"].add(f"{layer}.keys", layout.head_dim, layout.dtype)
            if kind != "sliding":
                self.groups[kind].add(f"{layer}.entries", layout.head_dim, layout.dtype)
            if kind == "csa":
                self.groups[kind].add(f"{layer}.index", layout.index_dim, layout.dtype)

    def rate(self, group: str) -> int:
        """Tokens per row of a group's pages."""
        return {"window": 1, "csa": self.layout.csa_rate, "hca": self.layout.hca_rate}[group]

    def sequence(self) -> Sequence:
        """A new, empty sequence."""
        return Sequence(self)

    @property
    def bytes_in_pages(self) -> int:
        """Bytes of the pages in use."""
        return sum(g.used * g.page_bytes for g in self.groups.values())


class Sequence:
    """Caches of one sequence. ``length`` tokens are in them; everything else follows from that number."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.length = 0
        self._highest = 0  # the longest it has been since it was last empty: rings have lost what is far below
        self.broken = False  # a call stopped between two layers
        self.tables = {
            name: BlockTable(group, store.ring if name == "window" else 0) for name, group in store.groups.items()
        }
        self.layers = {layer: self._layer(layer, kind) for layer, kind in store.layout.kinds.items()}

    def _layer(self, layer: int, kind: str) -> LayerCache:
        lay, draft, device = self.store.layout, self.store.draft, self.store.device
        cache = LayerCache(self._paged("window", f"{layer}.keys"))
        if kind != "sliding":
            cache.entries = self._paged(kind, f"{layer}.entries")
        if kind == "csa":
            cache.index = self._paged(kind, f"{layer}.index")
            cache.compressor = CsaState(lay.csa_rate, lay.head_dim, draft, device)
            cache.indexer = CsaState(lay.csa_rate, lay.index_dim, draft, device)
        elif kind == "hca":
            cache.compressor = HcaState(lay.hca_rate, lay.head_dim, draft, device)
        return cache

    def _paged(self, group: str, key: str) -> Paged:
        return Paged(self.tables[group], self.store.groups[group].storages[key])

    def check_room(self, count: int) -> None:
        """An error, before anything is written, if ``count`` more tokens do not fit."""
        if self.broken:
            raise ProductionError(
                "cache", expected="complete caches", came="those of a failed call", fix="reset the row"
            )
        if self.length + count > self.store.tokens:
            raise ProductionError(
                "cache",
                expected=f"at most {self.store.tokens} tokens a row",
                came=f"{self.length} and {count} more",
                fix="build the session with a larger tokens=",
            )

    def advance(self, count: int) -> None:
        """Every layer has taken ``count`` tokens."""
        self.length += count
        self._highest = max(self._highest, self.length)

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens, as if they had never been fed."""
        length = self.length - count
        if not 0 <= count <= self.length or self._highest - length > self.store.draft:
            back = max(0, self.store.draft - (self._highest - self.length))
            raise ProductionError(
                "cache: rollback",
                expected=f"0..{min(back, self.length)} tokens",
                came=str(count),
                fix=f"build the session with draft={count} or more, or reset the row" if count > back else "",
            )
        self.length = length
        for name, table in self.tables.items():
            table.truncate(-(-length // self.store.rate(name)) if name == "window" else length // self.store.rate(name))

    def reset(self) -> None:
        """Forget everything and give the pages back."""
        for table in self.tables.values():
            table.truncate(0)
        self.length = self._highest = 0
        self.broken = False

    def fork(self) -> Sequence:
        """A second sequence with the same past. Pages are shared until one of the two writes to them."""
        other = object.__new__(Sequence)
        other.store, other.length, other._highest, other.broken = self.store, self.length, self._highest, self.broken
        other.tables = {name: table.fork() for name, table in self.tables.items()}
        other.layers = {}
        for layer, kind in self.store.layout.kinds.items():
            mine = self.layers[layer]
            cache = LayerCache(other._paged("window", f"{layer}.keys"))
            cache.entries = other._paged(kind, f"{layer}.entries") if mine.entries else None
            cache.index = other._paged(kind, f"{layer}.index") if mine.index else None
            cache.compressor = mine.compressor.fork() if mine.compressor else None
            cache.indexer = mine.indexer.fork() if mine.indexer else None
            other.layers[layer] = cache
        return other

    @property
    def bytes(self) -> int:
        """Bytes of its pages (shared ones too) and of its open windows."""
        pages = sum(len(t.pages) * t.group.page_bytes for t in self.tables.values())
        states = [s for c in self.layers.values() for s in (c.compressor, c.indexer) if s is not None]
        return pages + sum(s.bytes for s in states)


def scattered(store: Store, generator: torch.Generator) -> None:
    """Permute the pages of an unused store and poison them: neither may matter."""
    for group in store.groups.values():
        group.free = [group.free[i] for i in torch.randperm(group.count, generator=generator).tolist()]
        for storage in group.storages.values():
            storage.fill_(torch.nan)


def tensors_of(store: Store) -> list[Tensor]:
    """Every page storage of a store."""
    return [s for group in store.groups.values() for s in group.storages.values()]
