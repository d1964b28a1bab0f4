"""Values with the statistics of a trained model, the same for every layout that is made with one seed.

Each part has a random stream of its own, drawn from the seed and its name, so that a checkpoint can be written in any
order and cut to some layers without changing the others. Nothing is left where a fault could hide: sinks, biases and
tables are not zero, norms are not one, scales differ between experts, rows and blocks, and some hyper-connection
streams are nearly closed (only there does a missing eps show).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from cases.checkpoints.formats import GLOBAL
from cases.checkpoints.manifest import Part
from cases.checkpoints.model import Model

CLOSED = -12.0  # base of a closed stream: sigmoid(-12) is about hc_eps
SINKS = (-2.0, 3.0)
PIECE = 16 << 20  # elements


class Synthesis:
    """Draws the values of ``model``'s parts."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model, self.seed = model, seed
        self._linear = lru_cache(maxsize=2)(self._draw_linear)  # w1 and w3 need each other's maximum

    def values(self, part: Part) -> Tensor:
        """float32 of the part's shape; int64 for a hash table."""
        if part.linear:
            return self._linear(part.key, part.shape, part.leaf)
        g = self._stream(part.key)
        shape, leaf = part.shape, part.leaf
        if leaf == "tid2eid":
            return self._table(shape, g)
        if "hc_" in leaf:
            return self._hyper(part, g)
        if leaf == "attn_sink":
            return SINKS[0] + (SINKS[1] - SINKS[0]) * torch.rand(shape, generator=g)
        if leaf == "ape":
            return 0.7 * torch.randn(shape, generator=g)
        if leaf == "bias":
            return 0.15 * torch.randn(shape, generator=g)
        if len(shape) == 1:  # norms: around one, never one
            return torch.exp(0.25 * torch.randn(shape, generator=g)).clamp_(0.2, 4.0)
        return torch.cat(list(self.pieces(part)))

    def pieces(self, part: Part) -> Iterator[Tensor]:
        """The rows of a matrix that no layout quantises, some at a time: an embedding of Pro has 3.7 GB in float32."""
        g, (rows, columns) = self._stream(part.key), part.shape
        std = 0.4 if part.leaf == "embed" else {"head": 0.5, "gate": 1.7}.get(part.leaf, 1.0) * columns**-0.5
        step = max(1, PIECE // columns)
        for first in range(0, rows, step):
            yield torch.randn(min(step, rows - first), columns, generator=g).mul_(std)

    def amax(self, part: Part) -> Tensor:
        """float32 []: the largest magnitude of what shares the part's global scale (gate and up of one MLP)."""
        top = self.values(part).abs().max()
        partner = {"w1": "w3", "w3": "w1"}.get(part.leaf)
        if partner is None:
            return top
        stem = part.stem.removesuffix(part.leaf)
        other = self._linear(f"{stem}{partner}.weight", part.shape, partner)
        return torch.maximum(top, other.abs().max())

    def input_scale(self, part: Part) -> Tensor:
        """float32 []: a calibrated activation maximum over 6 * 448; one for gate and up, which share an input."""
        leaf = "w1" if part.leaf == "w3" else part.leaf
        g = self._stream(f"{part.stem.removesuffix(part.leaf)}{leaf}.input")
        return 8.0 * torch.exp(0.4 * torch.randn((), generator=g)) / GLOBAL

    def _stream(self, key: str) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed}:{key}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

    def _draw_linear(self, key: str, shape: tuple[int, int], leaf: str) -> Tensor:
        """Gaussian with a scale per matrix and row, and a few wide rows that reach swiglu_limit and other clamps."""
        g = self._stream(key)
        rows, columns = shape
        gain = (0.5 if leaf in ("wo_b", "w2") else 1.0) * math.exp(0.25 * float(torch.randn((), generator=g)))
        row = torch.exp(0.2 * torch.randn(rows, 1, generator=g))
        row[torch.randperm(rows, generator=g)[: max(1, rows // 256)]] *= 3.0
        return torch.randn(shape, generator=g).mul_(row).mul_(gain * columns**-0.5)

    def _table(self, shape: tuple[int, int], g: torch.Generator) -> Tensor:
        """Expert ids of every token: no expert twice for one token, every expert about equally often."""
        tokens, top_k = shape
        experts = self.model.experts
        steps = torch.tensor([s for s in range(1, experts + 1) if math.gcd(s, experts) == 1])
        first = torch.arange(tokens) % experts
        step = steps[torch.randint(len(steps), (tokens,), generator=g)]
        table = (first[:, None] + torch.arange(top_k) * step[:, None]) % experts
        return table[torch.randperm(tokens, generator=g)]

    def _hyper(self, part: Part, g: torch.Generator) -> Tensor:
        """Coefficients: pre around 0.6 with a closed stream in places, post around 1, comb narrow or wide by layer."""
        n, shape = self.model.streams, part.shape
        wide = part.layer is not None and part.layer % 3 != 0
        if part.leaf.endswith("fn"):
            return 2.0 * shape[-1] ** -0.5 * torch.randn(shape, generator=g)
        if part.leaf.endswith("scale"):
            scale = 0.8 + 0.4 * torch.rand(shape, generator=g)
            if wide and shape[0] == 3:
                scale[2] *= 2.0
            return scale
        pre = 0.5 + 0.7 * torch.randn(n, generator=g)
        if shape[0] == n:
            return pre
        if wide:
            pre[int(torch.randint(n, (), generator=g))] = CLOSED
        comb = torch.randn(n, n, generator=g) * (2.5 if wide else 0.7) + 1.5 * torch.eye(n)
        return torch.cat((pre, 0.6 * torch.randn(n, generator=g), comb.flatten()))
