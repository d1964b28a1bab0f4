"""Compressed keys and the lightning indexer that chooses among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reference.geometry import CSA
from reference.net import Net
from reference.stages.base import HFStage, Port, Tensors, origin
from reference.stages.shadow import NoPicks, Observer, shadow

#: rounding points of pooling: projections, softmax weights, their products' sum, the norm, the rope table, the keys
POOL: Mapping[str, str] = dict.fromkeys(("proj", "probs", "pooled", "norm", "table", "out"), "bf16")


class Compressor(HFStage):
    """One key per window of source tokens. HF: ``DeepseekV4CSACompressor`` / ``DeepseekV4HCACompressor``, run whole
    with the indexer left out.

    x ``[B, S, d]``, positions ``[B, S]`` -> pooled ``[B, T, D]`` (what the norm receives) and keys ``[B, T, D]``
    (normed and rotated to the window's first position), ``T = S // rate``; an unfinished window gives nothing. The
    module takes a key's position from its index, not from ``positions``.
    """

    def __init__(self, net: Net, layer: int) -> None:
        super().__init__(net, layer, "compressor")

    @property
    def module(self) -> Any:
        assert self.layer is not None
        return self.net.layer(self.layer).self_attn.compressor

    @property
    def inputs(self) -> Mapping[str, str]:
        return {"x": self.wire("attn_norm", "x"), "positions": "case.positions"}

    @property
    def outputs(self) -> Sequence[Port]:
        return [self.port("pooled", "B T D"), self.port("keys", "B T D")]

    @property
    def points(self) -> Mapping[str, str]:
        return POOL

    @property
    def component(self) -> str:
        return origin(self.module)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        module, x = self.module, inputs["x"]
        norm = Observer(module.kv_norm)
        children: dict[str, torch.nn.Module] = {"kv_norm": norm}
        assert self.layer is not None
        if self.net.geometry.layer_types[self.layer] == CSA:
            children["indexer"] = NoPicks()
        keys, _ = shadow(module, children)(x, None, inputs["positions"], None, self.layer)  # [B, 1, T, D]
        keys = keys.squeeze(1)
        return {"pooled": norm.arguments[0] if norm.arguments else keys, "keys": keys}  # no window: both empty


class Indexer(HFStage):
    """Which compressed keys each query may read. HF: ``DeepseekV4Indexer``, run whole.

    x ``[B, S, d]``, q_residual ``[B, S, QL]``, positions ``[B, S]`` -> keys ``[B, T, DI]``, scores ``[B, S, T]``
    (``-inf`` where the window is not finished at the query's position), picks ``[B, S, K]`` int64 with
    ``K = min(index_topk, T)``, -1 where fewer are eligible. Equal scores are picked in torch's topk order. ``replay``
    gives the picks that come out instead; keys and scores are computed all the same.
    """

    def __init__(self, net: Net, layer: int) -> None:
        super().__init__(net, layer, "indexer")

    @property
    def module(self) -> Any:
        assert self.layer is not None
        return self.net.layer(self.layer).self_attn.compressor.indexer

    @property
    def inputs(self) -> Mapping[str, str]:
        return {
            "x": self.wire("attn_norm", "x"),
            "q_residual": self.wire("q_a_norm", "q_residual"),
            "positions": "case.positions",
        }

    @property
    def outputs(self) -> Sequence[Port]:
        return [
            self.port("keys", "B T DI"),
            self.port("scores", "B S T", "fp32"),
            self.port("picks", "B S K", "int64", "picks"),
        ]

    @property
    def points(self) -> Mapping[str, str]:
        own = {"weight": self.weight_point("q_b_proj.weight"), "q": "bf16", "q_rope": "bf16", "head_weight": "bf16"}
        return {**POOL, **own}

    @property
    def component(self) -> str:
        return origin(self.module)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        module, positions = self.module, inputs["positions"]
        scorer = Observer(module.scorer)
        picks = shadow(module, {"scorer": scorer})(inputs["x"], inputs["q_residual"], positions, None, self.layer)
        _, keys, _ = scorer.arguments
        assert scorer.result is not None
        finished = (positions + 1) // module.compress_rate  # [B, S]: windows closed at the query's position
        entry = torch.arange(keys.shape[1], device=positions.device)
        scores = scorer.result.masked_fill(entry >= finished.unsqueeze(-1), float("-inf"))
        return {"keys": keys, "scores": scores, "picks": replay.get("picks", picks)}

    def selection(self, outputs: Tensors) -> dict[str, Tensor]:
        return {"picks": outputs["scores"]}
