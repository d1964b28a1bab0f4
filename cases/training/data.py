"""Batches of the recall task made on the training device: the same grammar as `task.story` and `task.pairs`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .task import BOS, EOS, FIRST_OBJECT, FIRST_PLACE, OBJECTS, PLACES, WORD_ID

_EMPTY = -1
# Loss weights of a target token: what recall determines, the end of an answer, and everything else.
RECALL, END, OTHER = 1.0, 0.2, 0.03


@dataclass(frozen=True)
class Batch:
    """`ids` [B, S] starts with bos; `weight`, `back` and `ends` describe the token at the same place as a target."""

    ids: Tensor  # int64 [B, S]
    weight: Tensor  # float32 [B, S]
    back: Tensor  # int64 [B, S], distance to the last mention of a recalled place, 0 elsewhere
    ends: Tensor  # bool [B, S], the eos after an answer
    bare: Tensor  # bool [B], rows of the bare form


def batch(
    rows: int,
    length: int,
    objects: tuple[int, int],
    bare_share: float,
    generator: torch.Generator,
    device: torch.device,
) -> Batch:
    """Random rows: each has between `objects[0]` and `objects[1]` objects and is bare or a story."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    most = objects[1]
    events = length // 2 if bare_share > 0 else length // 6 + 1
    bare = uniform(rows) < bare_share
    count = objects[0] + (uniform(rows) * (most - objects[0] + 1)).long()
    # Some stories mention objects evenly; in others a few take most mentions, so that the rest are recalled from afar.
    weights = (0.1 + uniform(rows, most) ** 2) * (torch.arange(most, device=device) < count[:, None])
    which = torch.multinomial(weights, events, replacement=True, generator=generator)  # [B, E]
    names = FIRST_OBJECT + uniform(rows, len(OBJECTS)).argsort(-1)[:, :most]
    homes = FIRST_PLACE + (uniform(rows, most) * len(PLACES)).long()
    name, home = names.gather(1, which), homes.gather(1, which)

    hot = torch.nn.functional.one_hot(which, most)
    seen = (hot.cumsum(1) - hot).gather(2, which[..., None]).squeeze(-1) > 0
    asked = seen & (uniform(rows, events) < 0.25) & ~bare[:, None]
    slots = _slots(name, home, asked, bare, uniform(3, rows, events))  # [B, E, 8]

    flat = slots.flatten(1)
    order = (flat == _EMPTY).to(torch.int8).argsort(dim=-1, stable=True)[:, : length - 1]
    first = torch.full((rows, 1), BOS, dtype=torch.long, device=device)
    ids = torch.cat((first, flat.gather(1, order)), 1)

    mark = torch.zeros_like(slots)
    mark[..., 6] = 1 + seen.long()  # 1: a place named for the first time, 2: a recall
    mark[..., 7] = torch.where(asked, 3, 0)
    owner = which[..., None].expand_as(slots).flatten(1).gather(1, order)
    mark = torch.cat((torch.zeros_like(first), mark.flatten(1).gather(1, order)), 1)
    owner = torch.cat((torch.full_like(first, _EMPTY), owner), 1)
    weight = torch.full_like(ids, OTHER, dtype=torch.float32)
    weight = weight.masked_fill(mark == 2, RECALL).masked_fill(mark == 3, END)
    return Batch(ids, weight, _distance(owner, mark), mark == 3, bare)


def _slots(name: Tensor, home: Tensor, asked: Tensor, bare: Tensor, u: Tensor) -> Tensor:
    """Eight word slots an event [B, E, 8]; the place is always in slot 6, empty slots are dropped later."""
    word = {w: torch.full_like(name, WORD_ID[w]) for w in ("the", "is", "in", "where", ".", "?", "then", "now", "and")}
    none, eos = torch.full_like(name, _EMPTY), torch.full_like(name, EOS)
    then = torch.where(u[0] < 0.2, word["then"], none)
    now = torch.where(u[1] < 0.25, word["now"], none)
    stop = torch.where(u[2] < 0.15, word["and"], word["."])
    fact = (then, word["the"], name, word["is"], word["in"], word["the"], home, stop)
    ask = (word["where"], word["is"], word["the"], name, now, word["?"], home, eos)
    pair = (none, none, name, none, none, none, home, none)
    out = torch.where(asked[..., None], torch.stack(ask, -1), torch.stack(fact, -1))
    return torch.where(bare[:, None, None], torch.stack(pair, -1), out)


def _distance(owner: Tensor, mark: Tensor) -> Tensor:
    """int64 [B, S]: how far back the same object's place was last named, at recalls; 0 elsewhere."""
    place = (mark == 1) | (mark == 2)
    at = torch.arange(owner.shape[1], device=owner.device)
    same = (owner[:, :, None] == owner[:, None, :]) & place[:, :, None] & place[:, None, :]
    same &= at[:, None] > at[None, :]
    last = torch.where(same, at, -1).amax(-1)
    return torch.where(mark == 2, at - last, 0)
