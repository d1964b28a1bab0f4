"""Model scope: the embedding that fills the streams, the rope tables, the closing norm and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.types import InvalidRun, UsageError
from reference.net import Net
from reference.stages.base import HFStage, Port, Tensors, origin


class Embed(HFStage):
    """Token vectors, copied into every stream. HF: the opening of ``DeepseekV4Model.forward``.

    input_ids ``[B, S]`` int64 in ``0..vocab_size - 1`` (else UsageError) -> streams ``[B, S, N, d]``.
    """

    def __init__(self, net: Net) -> None:
        super().__init__(net, None, "embed")

    @property
    def inputs(self) -> Mapping[str, str]:
        return {"input_ids": "case.input_ids"}

    @property
    def outputs(self) -> Sequence[Port]:
        return [self.port("streams", "B S N d", role="exact")]

    @property
    def component(self) -> str:
        return origin(self.net.model.model.embed_tokens)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        ids, size = inputs["input_ids"], self.net.geometry.vocab_size
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise UsageError(
                f"case.input_ids: expected ids in 0..{size - 1}, came {ids.min()}..{ids.max()}; correct them"
            )
        rows = self.net.model.model.embed_tokens(ids)  # [B, S, d]
        return {"streams": rows.unsqueeze(2).expand(-1, -1, self.net.geometry.hc_mult, -1).contiguous()}


class RopeCache(HFStage):
    """Cosines and sines of both ropes. HF: ``DeepseekV4RotaryEmbedding``; the table is rounded to the model's dtype.

    positions ``[B, S]`` int64 -> four tables ``[B, S, R2]``, one entry per pair of channels.
    """

    def __init__(self, net: Net) -> None:
        super().__init__(net, None, "rope_cache")

    @property
    def inputs(self) -> Mapping[str, str]:
        return {"positions": "case.positions"}

    @property
    def outputs(self) -> Sequence[Port]:
        return [self.port(f"{rope}_{part}", "B S R2") for rope in ("main", "compress") for part in ("cos", "sin")]

    @property
    def points(self) -> Mapping[str, str]:
        return {"angle": "fp32", "out": "bf16"}

    @property
    def component(self) -> str:
        return origin(self.net.model.model.rotary_emb)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        positions = inputs["positions"]
        like = torch.empty(0, dtype=self.net.dtype, device=positions.device)  # names the dtype of the table
        tables: dict[str, Tensor] = {}
        for rope in ("main", "compress"):
            cos, sin = self.net.model.model.rotary_emb(like, position_ids=positions, layer_type=rope)
            tables |= {f"{rope}_cos": cos, f"{rope}_sin": sin}
        return tables


class HyperHead(HFStage):
    """The streams weighed into one. HF: ``DeepseekV4HyperHead``, which returns the sum only.

    streams ``[B, S, N, d]`` -> pre ``[B, S, N]``, collapsed ``[B, S, d]``. ``pre`` is the module's own expression,
    computed here a second time; InvalidRun if it does not give the module's sum bit for bit.
    """

    def __init__(self, net: Net) -> None:
        super().__init__(net, None, "hc_head")

    @property
    def inputs(self) -> Mapping[str, str]:
        return {"streams": f"layers.{self.net.depth - 1}.ffn_mix.streams"}

    @property
    def outputs(self) -> Sequence[Port]:
        return [self.port("pre", "B S N", "fp32"), self.port("collapsed", "B S d")]

    @property
    def points(self) -> Mapping[str, str]:
        return {"collapsed": "bf16"}

    @property
    def component(self) -> str:
        return origin(self.net.model.model.hc_head)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        head, streams = self.net.model.model.hc_head, inputs["streams"]
        flat = head.input_norm(streams.flatten(2).float())  # [B, S, N * d]
        mixes = torch.nn.functional.linear(flat, head.hc_fn.float())  # [B, S, N]
        pre = torch.sigmoid(mixes * head.hc_scale.float() + head.hc_base.float()) + head.eps
        return {"pre": pre, "collapsed": collapse(self.name, pre, streams, head(streams))}


class Closing(HFStage):
    """``final_norm`` and ``lm_head``: one module each, from ``[B, S, d]``."""

    def __init__(self, net: Net, kind: str) -> None:
        super().__init__(net, None, kind)
        self.module = net.model.model.norm if kind == "final_norm" else net.model.lm_head

    @property
    def inputs(self) -> Mapping[str, str]:
        return {"x": "hc_head.collapsed" if self.kind == "final_norm" else "final_norm.x"}

    @property
    def outputs(self) -> Sequence[Port]:
        return [self.port("x", "B S d") if self.kind == "final_norm" else self.port("logits", "B S V")]

    @property
    def points(self) -> Mapping[str, str]:
        if self.kind == "final_norm":
            return {"out": "bf16"}
        return {"weight": self.weight_point(), "acc": "fp32", "out": "bf16"}

    @property
    def component(self) -> str:
        return origin(self.module)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        return {self.outputs[0].name: self.module(inputs["x"])}


def collapse(name: str, pre: Tensor, streams: Tensor, expected: Tensor) -> Tensor:
    """The module's own collapsed streams, once it is sure that ``pre`` gives them bit for bit."""
    ours = (pre.unsqueeze(-1) * streams).sum(dim=2).to(streams.dtype)
    same = (ours == expected) | (ours.isnan() & expected.isnan())  # a production input may hold NaN
    if not bool(same.all()):
        raise InvalidRun(
            f"{name}: pre recomputed from the module's parameters does not collapse to the module's output"
        )
    return expected
