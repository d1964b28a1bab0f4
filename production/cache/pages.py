"""Paged storage: fixed pages, handed out one by one, and a block table for each sequence.

A ``PageGroup`` owns one storage tensor [pages, rows, width] per layer (and kind of content); the same page number
means the same page in each of them, so one block table serves all layers of a group. A ``BlockTable`` maps logical
rows to pages. Pages are counted by reference: a fork shares them, and whoever writes to a shared page copies it first.

Storage starts uninitialised and freed pages keep their bytes. Nobody may read a row that was not written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from production.errors import ProductionError

PAGE_ROWS = 16


def pages_for(rows: int) -> int:
    """Pages that hold this many rows."""
    return -(-rows // PAGE_ROWS)


class PageGroup:
    """``count`` pages in every storage of a group. ``free`` is the order in which they are handed out, last first."""

    def __init__(self, name: str, count: int, device: torch.device) -> None:
        self.name, self.count, self.device = name, count, device
        self.free = list(range(count - 1, -1, -1))
        self.uses = [0] * count
        self.storages: dict[str, Tensor] = {}

    def add(self, key: str, width: int, dtype: torch.dtype) -> Tensor:
        """A storage of this group, [pages, PAGE_ROWS, width]."""
        self.storages[key] = torch.empty(self.count, PAGE_ROWS, width, dtype=dtype, device=self.device)
        return self.storages[key]

    def take(self) -> int:
        """A free page, owned once."""
        if not self.free:
            raise ProductionError(
                f"cache: {self.name}",
                expected=f"at most {self.count} pages of {PAGE_ROWS} rows in use",
                came="a request for one more",
                fix="build the session with more tokens or rows, or reset a row",
            )
        page = self.free.pop()
        self.uses[page] = 1
        return page

    def share(self, page: int) -> None:
        self.uses[page] += 1

    def release(self, page: int) -> None:
        self.uses[page] -= 1
        if self.uses[page] == 0:
            self.free.append(page)

    def copy_page(self, source: int, target: int) -> None:
        for storage in self.storages.values():
            storage[target] = storage[source]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all storages."""
        return sum(s[0].numel() * s.element_size() for s in self.storages.values())

    @property
    def used(self) -> int:
        """Pages in use."""
        return self.count - len(self.free)


class BlockTable:
    """Logical rows of one sequence in the pages of a group. ``ring``: row r lives where r modulo ``ring`` lives."""

    def __init__(self, group: PageGroup, ring: int = 0) -> None:
        if ring % PAGE_ROWS:
            raise ValueError(f"a ring of whole pages, not of {ring} rows")
        self.group, self.ring = group, ring
        self.pages: list[int] = []
        self._tensor: Tensor | None = None
        self._spans: dict[tuple[int, int], Tensor] = {}

    def prepare(self, first: int, last: int) -> None:
        """Make rows first..last-1 writable: give them pages, and copy the pages among them that others share."""
        if last <= first:
            return
        if self.ring:
            first = max(first, last - self.ring)
            touched = {row % self.ring // PAGE_ROWS for row in range(first, last, PAGE_ROWS)}
            touched.add((last - 1) % self.ring // PAGE_ROWS)
        else:
            touched = set(range(first // PAGE_ROWS, pages_for(last)))
        while len(self.pages) <= max(touched):
            self.pages.append(self.group.take())
            self._forget()
        for index in touched:
            if self.group.uses[self.pages[index]] > 1:
                own = self.group.take()
                self.group.copy_page(self.pages[index], own)
                self.group.release(self.pages[index])
                self.pages[index] = own
                self._forget()

    def truncate(self, rows: int) -> None:
        """Give back pages that hold none of the first ``rows`` rows; a ring keeps its pages until it is empty."""
        keep = 0 if rows == 0 else len(self.pages) if self.ring else pages_for(rows)
        for page in self.pages[keep:]:
            self.group.release(page)
        if keep < len(self.pages):
            del self.pages[keep:]
            self._forget()

    def fork(self) -> BlockTable:
        """Another table over the same pages."""
        other = BlockTable(self.group, self.ring)
        other.pages = list(self.pages)
        for page in other.pages:
            self.group.share(page)
        return other

    def slots(self, rows: Tensor) -> Tensor:
        """Where rows lie in the flattened [pages * PAGE_ROWS] storage; any shape, int64."""
        if self._tensor is None:
            self._tensor = torch.tensor(self.pages, dtype=torch.int64, device=self.group.device)
        if self.ring:
            rows = rows % self.ring
        page = torch.div(rows, PAGE_ROWS, rounding_mode="floor")
        return self._tensor[page] * PAGE_ROWS + rows % PAGE_ROWS

    def span(self, first: int, last: int) -> Tensor:
        """``slots`` of rows first..last-1; remembered, because every layer of the group asks for the same."""
        found = self._spans.get((first, last))
        if found is None:
            if len(self._spans) > 8:
                self._spans.clear()
            found = self._spans[first, last] = self.slots(torch.arange(first, last, device=self.group.device))
        return found

    def runs(self, rows: int) -> list[tuple[int, int]]:
        """The first ``rows`` rows as (slot, count) of stretches that are contiguous in memory, in logical order."""
        found: list[tuple[int, int]] = []
        for index in range(pages_for(rows)):
            slot, count = self.pages[index] * PAGE_ROWS, min(PAGE_ROWS, rows - index * PAGE_ROWS)
            if found and found[-1][0] + found[-1][1] == slot:
                found[-1] = (found[-1][0], found[-1][1] + count)
            else:
                found.append((slot, count))
        return found

    def _forget(self) -> None:
        self._tensor = None
        self._spans.clear()


class Paged:
    """One layer's content behind a block table."""

    def __init__(self, table: BlockTable, storage: Tensor) -> None:
        self.table, self.flat = table, storage.flatten(0, 1)

    def put(self, first: int, rows: Tensor) -> None:
        """Write rows [n, width] at first..first+n-1; of more than a ring holds, the last ones."""
        table = self.table
        if table.ring and rows.shape[0] > table.ring:
            first, rows = first + rows.shape[0] - table.ring, rows[-table.ring :]
        last = first + rows.shape[0]
        if last > first:
            table.prepare(first, last)
            self.flat.index_copy_(0, table.span(first, last), rows)

    def span(self, first: int, last: int) -> Tensor:
        """A copy of rows first..last-1, [n, width]."""
        if last <= first:
            return self.flat[:0]
        return self.flat.index_select(0, self.table.span(first, last))

    def take(self, rows: Tensor) -> Tensor:
        """A copy of the rows of a 1-d index, [n, width]."""
        return self.flat.index_select(0, self.table.slots(rows)) if rows.numel() else self.flat[:0]

    def views(self, rows: int) -> list[Tensor]:
        """The first ``rows`` rows as views of the storage, in logical order: one if their pages follow each other."""
        return [self.flat[slot : slot + count] for slot, count in self.table.runs(rows)]
