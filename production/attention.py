"""The attention core: one shared key/value head (K = V), a sliding window, compressed entries, and sinks.

Keys of a row are L token keys, then T compressed entries. A query at position t sees

    token keys    with 0 <= t - position < sliding_window, below the row's logical length
    CSA entries   that the indexer picked (-1 is absent)
    HCA entries   e < (t + 1) // m

and never an entry that covers tokens beyond the row's logical length. The mask is derived here from positions,
lengths and picks; none is handed in. With l = q . k / sqrt(D) over visible keys and one sink logit per head, which
stands in the denominator only (HF: eager_attention_forward; paper section 2.3):

    M = max(l, sink),  Z = sum exp(l - M) + exp(sink - M),  out = sum exp(l - M) v / Z,  lse = M + ln Z

A query that sees no key gets zeros and lse = sink. ``entropy`` (nats) is that of the visible keys' probabilities
renormalised without the sink; ``sink_mass`` is the share of the sink.

Key storage is padded to a multiple of 128 as a kernel's descriptors need it. The *logical* length bounds the mask and
the *padded* length describes the storage: two arguments. What lies in the padding may be anything, NaN included.

Rounding: logits, probabilities and accumulation fp32; ``out`` is rounded once. lse, entropy and sink_mass are fp32.
Any strides; outputs are contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from production.component import Call, Component, Params, Port, port, ports, rounding
from production.errors import ProductionError
from production.indexer import ready_entries

KEY_TILE = 128
#: Work is done by blocks of queries against the blocks of keys that one of them sees.
QUERY_BLOCK, KEY_BLOCK = 128, 64
#: Logits held at a time (queries * heads * padded keys): bounds memory for long prompts.
LOGIT_BUDGET = 1 << 25


class Attended(NamedTuple):
    """Results of the core, fp32. The last two are None unless they were asked for."""

    out: Tensor  # [B, S, H, D]
    lse: Tensor | None  # [B, S, H]
    entropy: Tensor | None
    sink_mass: Tensor | None


def padded_length(logical: int) -> int:
    """The key storage for this many keys."""
    return max(1, -(-logical // KEY_TILE)) * KEY_TILE


def pack_keys(kv: Tensor, compressed: Tensor | None, padded: int) -> Tensor:
    """[B, padded, D]: token keys, then entries, then zeros."""
    keys = kv.new_zeros(kv.shape[0], padded, kv.shape[-1])
    keys[:, : kv.shape[1]] = kv
    if compressed is not None:
        keys[:, kv.shape[1] : kv.shape[1] + compressed.shape[1]] = compressed
    return keys


def visible_keys(
    positions: Tensor,
    lengths: Tensor,
    token_keys: int,
    *,
    window: int,
    entries: int = 0,
    rate: int = 0,
    picks: Tensor | None = None,
) -> Tensor:
    """bool [B, S, token_keys + entries].

    The last S of the token keys are the queries' own; any before them are earlier positions without a gap.
    ``picks`` chooses among the entries (CSA); without it every complete entry is visible (HCA).
    """
    batch, queries = positions.shape
    past = token_keys - queries
    earlier = positions[:, :1] + torch.arange(-past, 0, device=positions.device)
    key_positions = torch.cat((earlier, positions), dim=1)
    distance = positions.unsqueeze(-1) - key_positions.unsqueeze(1)
    in_length = torch.arange(token_keys, device=positions.device) < lengths.unsqueeze(-1)
    tokens = (distance >= 0) & (distance < window) & in_length.unsqueeze(1)
    if not rate:
        return tokens

    if picks is None:
        chosen = ready_entries(positions, rate, entries)
    else:
        slots = torch.zeros(batch, queries, entries + 1, dtype=torch.bool, device=positions.device)
        chosen = slots.scatter_(-1, torch.where(picks < 0, entries, picks), True)[..., :entries]
    end = key_positions[:, :1] + lengths.unsqueeze(-1)  # one past the row's last valid position
    covered = (torch.arange(entries, device=positions.device) + 1) * rate <= end
    return torch.cat((tokens, chosen & covered.unsqueeze(1)), dim=-1)


def attend(
    q: Tensor, keys: Tensor, visible: Tensor, sinks: Tensor, *, logical_len: int, padded_len: int, detail: bool
) -> Attended:
    """The core. q [B, S, H, D], keys [B, padded_len, D], visible [B, S, logical_len], sinks [H]."""
    if keys.shape[1] != padded_len or visible.shape[-1] != logical_len or logical_len > padded_len:
        raise ProductionError(
            "attn_core: key lengths",
            expected=f"padded_len {keys.shape[1]} >= logical_len {visible.shape[-1]}, as stored",
            came=f"padded_len {padded_len}, logical_len {logical_len}",
        )
    mask = torch.zeros(*visible.shape[:2], padded_len, dtype=torch.bool, device=q.device)
    mask[..., :logical_len] = visible
    # A zero weight does not silence a NaN value, so what no query sees is made zero.
    seen = mask.any(dim=1).unsqueeze(-1)
    values = torch.where(seen, keys, torch.zeros((), dtype=keys.dtype, device=q.device)).float()
    block = max(1, min(QUERY_BLOCK, LOGIT_BUDGET // (q.shape[0] * q.shape[2] * padded_len)))
    parts = []
    for start in range(0, q.shape[1], block):
        rows = slice(start, start + block)
        parts.append(_attend_block(q[:, rows], *_seen_blocks(values, mask[:, rows]), sinks.float(), detail))
    joined = [None if column[0] is None else torch.cat(column, dim=1) for column in zip(*parts, strict=True)]
    return Attended(*joined)  # type: ignore[arg-type]


def _seen_blocks(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The key blocks that some of these queries see, and their mask: a window makes most of a prompt invisible."""
    blocks = mask.unflatten(-1, (-1, KEY_BLOCK))
    seen = blocks.any(dim=-1).flatten(0, 1).any(dim=0)
    seen[0] = True  # a block that sees nothing still has a shape
    if bool(seen.all()):
        return values, mask
    return values.unflatten(1, (-1, KEY_BLOCK))[:, seen].flatten(1, 2), blocks[:, :, seen].flatten(2)


def _attend_block(q: Tensor, values: Tensor, mask: Tensor, sinks: Tensor, detail: bool) -> Attended:
    batch, queries, heads, dim = q.shape
    rows = q.float().reshape(batch, queries * heads, dim)
    logits = torch.matmul(rows, values.transpose(1, 2)).mul_(dim**-0.5).view(batch, queries, heads, -1)
    logits.masked_fill_(~mask.unsqueeze(2), -torch.inf)
    top = torch.maximum(logits.amax(-1), sinks)
    probs = torch.exp(logits - top.unsqueeze(-1))
    sink = torch.exp(sinks - top)
    total = probs.sum(-1) + sink
    out = torch.matmul(probs.view(batch, queries * heads, -1), values).view_as(q).div_(total.unsqueeze(-1))
    if not detail:
        return Attended(out, None, None, None)
    return Attended(out, top + total.log(), _entropy(logits), sink / total)


def _entropy(logits: Tensor) -> Tensor:
    """ln Z - E[l] over the finite logits, shifted by their own maximum; 0 where none is finite."""
    top = logits.amax(-1, keepdim=True)
    shifted = torch.where(logits == -torch.inf, -torch.inf, logits - top)
    weights = torch.exp(shifted)
    total = weights.sum(-1)
    mean = torch.where(weights > 0, weights * shifted, 0.0).sum(-1)
    return torch.where(total > 0, total.clamp(min=1).log() - mean / total.clamp(min=1), 0.0)


@dataclass(frozen=True, kw_only=True)
class SinkAttention(Component):
    """The core of one layer. ``layer_kind``: sliding, csa or hca. Params: sinks fp32 (H).

    lengths counts a row's valid token keys (0..L); keys from there on are padding. kv may hold more keys than there are
    queries (L >= S): the earlier ones precede them without a gap.
    """

    plan = rounding(logits="fp32", probs="fp32", acc="fp32", out="bf16")
    gives = ports(
        out=port("B S H D"),
        visible=port("B S J", "bool", role="exact"),
        lse=port("B S H", "fp32"),
        entropy=port("B S H", "fp32", role="stat"),
        sink_mass=port("B S H", "fp32", role="stat"),
    )

    layer_kind: str
    sliding_window: int
    compress_rate: int

    @property
    def takes(self) -> Mapping[str, Port]:  # type: ignore[override]
        takes = {"q": port("B S H D"), "kv": port("B L D")}
        if self.layer_kind != "sliding":
            takes["compressed"] = port("B T D")
        if self.layer_kind == "csa":
            takes["picks"] = port("B S K", "int64")
        return {**takes, "positions": port("B S", "int64"), "lengths": port("B", "int64")}

    def compute(  # type: ignore[override]
        self,
        p: Params,
        call: Call,
        *,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        lengths: Tensor,
        compressed: Tensor | None = None,
        picks: Tensor | None = None,
    ) -> dict[str, Tensor]:
        entries = 0 if compressed is None else compressed.shape[1]
        self._check(q, kv, lengths, entries, picks)
        visible = visible_keys(
            positions,
            lengths,
            kv.shape[1],
            window=self.sliding_window,
            entries=entries,
            rate=self.compress_rate,
            picks=picks,
        )
        logical = kv.shape[1] + entries
        padded = padded_length(logical)
        keys = pack_keys(kv, compressed, padded)
        done = attend(q, keys, visible, p["sinks"], logical_len=logical, padded_len=padded, detail=call.detail)
        result = {"out": done.out.to(self.act)}
        if call.detail:
            result |= {"visible": visible, "lse": done.lse, "entropy": done.entropy, "sink_mass": done.sink_mass}  # type: ignore[dict-item]
        return result

    def _check(self, q: Tensor, kv: Tensor, lengths: Tensor, entries: int, picks: Tensor | None) -> None:
        where = "attn_core"
        if kv.shape[1] < q.shape[1]:
            raise ProductionError(f"{where}: kv", expected=f"at least {q.shape[1]} keys", came=str(kv.shape[1]))
        if bool(((lengths < 0) | (lengths > kv.shape[1])).any()):
            raise ProductionError(f"{where}: lengths", expected=f"0..{kv.shape[1]}", came=str(lengths.tolist()))
        if picks is not None and picks.numel() and not -1 <= int(picks.min()) <= int(picks.max()) < entries:
            came = f"{int(picks.min())}..{int(picks.max())}"
            raise ProductionError(f"{where}: picks", expected=f"-1..{entries - 1}", came=came)
