"""The attention itself: window and compressed keys, one sink per head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.types import UsageError
from reference import hf
from reference.geometry import CSA, SLIDING
from reference.net import Net
from reference.stages.base import HFStage, Port, Tensors, origin


class AttnCore(HFStage):
    """Softmax attention with a sink. HF: ``eager_attention_forward`` under the mask that
    ``create_sliding_window_causal_mask`` makes, with the compressor's block bias behind it.

    q ``[B, S, H, D]``, kv ``[B, S, D]`` (one head for all; keys are values), compressed ``[B, T, D]`` (not on sliding
    layers), picks ``[B, S, K]`` int64 (CSA; -1 absent), positions ``[B, S]``, lengths ``[B]`` ->

    - out ``[B, S, H, D]``;
    - visible ``[B, S, J]`` bool: the keys a query may read, S tokens and then T entries;
    - lse ``[B, S, H]`` float32: log of the sum of exponentials, sink included;
    - entropy ``[B, S, H]`` float32, in nats: of the visible keys' probabilities, renormalised without the sink;
    - sink_mass ``[B, S, H]`` float32: the sink's share.

    The last three come from the module's own logits (scaled, in the model's dtype), continued in float32. UsageError
    when a length differs from S: the Hugging Face compressors pool padding into their keys.
    """

    def __init__(self, net: Net, layer: int) -> None:
        super().__init__(net, layer, "attn_core")
        self.layer_type = net.geometry.layer_types[layer]

    @property
    def module(self) -> Any:
        assert self.layer is not None
        return self.net.layer(self.layer).self_attn

    @property
    def inputs(self) -> Mapping[str, str]:
        wires = {"q": self.wire("q_rope", "q"), "kv": self.wire("kv_rope", "kv")}
        if self.layer_type != SLIDING:
            wires["compressed"] = self.wire("compressor", "keys")
        if self.layer_type == CSA:
            wires["picks"] = self.wire("indexer", "picks")
        return {**wires, "positions": "case.positions", "lengths": "case.lengths"}

    @property
    def outputs(self) -> Sequence[Port]:
        return [
            self.port("out", "B S H D"),
            self.port("visible", "B S J", "bool", "exact"),
            self.port("lse", "B S H", "fp32"),
            self.port("entropy", "B S H", "fp32", "stat"),
            self.port("sink_mass", "B S H", "fp32", "stat"),
        ]

    @property
    def points(self) -> Mapping[str, str]:
        return {"logits": "bf16", "probs": "bf16", "acc": "fp32", "out": "bf16"}

    @property
    def component(self) -> str:
        return origin(hf.modeling.eager_attention_forward)

    def compute(self, inputs: Tensors, replay: Tensors) -> dict[str, Tensor]:
        attention, positions = self.module, inputs["positions"]
        check_lengths(inputs["lengths"], inputs["kv"].shape[1])
        q = inputs["q"].transpose(1, 2).contiguous()  # [B, H, S, D]: the layout that the module's rotation leaves
        keys, mask = inputs["kv"].unsqueeze(1).contiguous(), self._window(inputs["kv"], positions)
        if self.layer_type != SLIDING:
            compressed = inputs["compressed"].unsqueeze(1)  # [B, 1, T, D]
            keys = torch.cat([keys, compressed], dim=2)  # [B, 1, J, D]
            bias = self._block_bias(compressed, positions, inputs.get("picks"))
            mask = torch.cat([mask, bias.to(mask.dtype)], dim=-1)  # [B, 1, S, J]
        out, _ = hf.modeling.eager_attention_forward(attention, q, keys, keys, mask, scaling=attention.scaling)
        return {"out": out, "visible": mask.squeeze(1) == 0, **self._summary(q, keys, mask)}

    def _window(self, kv: Tensor, positions: Tensor) -> Tensor:
        """HF's own mask over the token keys: 0 where visible, the dtype's minimum elsewhere, ``[B, 1, S, S]``."""
        build = hf.masking.create_sliding_window_causal_mask
        mask: Tensor = build(self.net.model.config, kv, None, None, position_ids=positions)
        return mask

    def _block_bias(self, compressed: Tensor, positions: Tensor, picks: Tensor | None) -> Tensor:
        """0 for the compressed keys a query may read, -inf for the rest, ``[B, 1, S, T]``; HF: the closing lines of the
        two compressors' forwards."""
        batch, _, entries, _ = compressed.shape
        length = positions.shape[1]
        if picks is not None:
            slots = torch.where(picks >= 0, picks, torch.full_like(picks, entries))  # absent: a slot that is cut off
            bias = compressed.new_full((batch, 1, length, entries + 1), float("-inf"))
            return bias.scatter_(-1, slots.unsqueeze(1), 0.0)[..., :entries]
        finished = (positions + 1) // self.net.geometry.rate(self.module.layer_idx)  # [B, S]
        entry = torch.arange(entries, device=positions.device)
        bias = compressed.new_zeros((batch, 1, length, entries))
        return bias.masked_fill(entry >= finished[:, None, :, None], float("-inf"))

    def _summary(self, q: Tensor, keys: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """lse, entropy and sink mass from the logits as the module computes them."""
        attention = self.module
        repeated = hf.modeling.repeat_kv(keys, attention.num_key_value_groups)
        logits = (torch.matmul(q, repeated.transpose(2, 3)) * attention.scaling).float()  # [B, H, S, J]
        logits = logits.masked_fill(mask != 0, float("-inf"))
        sink = attention.sinks.reshape(1, -1, 1).float()  # [1, H, 1]
        lse = torch.logaddexp(torch.logsumexp(logits, dim=-1), sink)  # [B, H, S]
        entropy = torch.special.entr(torch.softmax(logits, dim=-1)).sum(dim=-1)
        rows = {"lse": lse, "entropy": entropy, "sink_mass": torch.exp(sink - lse)}
        return {name: row.transpose(1, 2) for name, row in rows.items()}


def check_lengths(lengths: Tensor, length: int) -> None:
    """UsageError unless every row uses all ``length`` positions."""
    if not bool((lengths == length).all()):
        raise UsageError(
            f"case.lengths: expected {length} for every row, came {lengths.tolist()}; ragged batches are not supported "
            "yet on the reference side, so run rows of one length together"
        )
