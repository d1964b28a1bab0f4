"""One training step of the tiny model: forward with taps, losses, backward, update; captured as a CUDA graph on a GPU.

The Hugging Face modules are used as they are. What they do not offer is added from outside, by hooks: the indexer gets
detached inputs and a loss of its own (its picks are discrete, so the language loss gives it no gradient), the routers'
selection biases are moved when an expert is starved or flooded, and quantised weights replace the parameters in the
last phase.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DeepseekV4ForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .arch import CONFIG, EXPERTS, RATIOS, is_bf16_parameter, is_nvfp4_parameter
from .data import Batch
from .muon import Adam, Muon
from .nvfp4 import fake_quantize
from .start import CLOSED_STREAMS

ALL = 1 << 20  # an index_topk that attends to every entry
RATE_4 = 4  # tokens an entry of compressed sparse attention
SINK_SHIFT = 4.0  # a head's mean sink mass is kept above sigmoid(sink - SINK_SHIFT)
HCA_FLOOR = 0.1  # and its mean mass on heavily compressed entries above this, where there are at least two


def dense_experts(self: nn.Module, hidden: Tensor, picks: Tensor, weights: Tensor) -> Tensor:
    """Every expert on every token, weighted by zero where not picked: no data-dependent shapes, so capturable.

    hidden [T, H], picks and weights [T, k] -> [T, H].
    """
    gate = torch.zeros(hidden.shape[0], self.num_experts, device=hidden.device, dtype=weights.dtype)
    gate = gate.scatter(1, picks, weights)
    act = self._apply_gate(torch.matmul(hidden, self.gate_up_proj.transpose(1, 2)))  # [E, T, F]
    return torch.matmul(act * gate.T.unsqueeze(-1), self.down_proj.transpose(1, 2)).sum(0)


ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)


def window_mask(rows: int, length: int, device: torch.device) -> Tensor:
    """The additive sliding-window causal mask [B, 1, S, S] that the model would build for itself."""
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    hidden = (distance < 0) | (distance >= CONFIG["sliding_window"])
    mask = torch.zeros(length, length, device=device).masked_fill(hidden, torch.finfo(torch.float32).min)
    return mask.expand(rows, 1, length, length)


@dataclass(frozen=True)
class Mode:
    """What a captured step depends on besides its inputs."""

    rows: int
    length: int
    topk: int  # ALL or CONFIG["index_topk"]
    quantised: bool


class Learner:
    """Model, taps and optimisers. `step` runs one update and returns its statistics as device tensors."""

    def __init__(self, model: DeepseekV4ForCausalLM, graphs: bool) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.rate = torch.zeros((), device=self.device)
        self.floor = torch.zeros((), device=self.device)
        self.tap: dict[str, Tensor] = {}
        self.graphs: dict[Mode, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] | None = {} if graphs else None
        self.pool: Any = None
        self.side = torch.cuda.Stream() if graphs else None
        self._hook()
        self._optimisers()

    def _hook(self) -> None:
        for i, layer in enumerate(self.model.model.layers):
            if not layer.mlp.is_hash:
                layer.mlp.gate.register_forward_hook(self._keep(f"picks.{i}", 2))
            indexer = getattr(layer.self_attn.compressor, "indexer", None)
            if indexer is not None:
                indexer.register_forward_pre_hook(lambda _m, a: (a[0].detach(), a[1].detach(), *a[2:]))
                indexer.scorer.register_forward_hook(self._keep(f"scores.{i}", None))
            layer.self_attn.register_forward_hook(self._keep(f"mass.{i}", 1))

    def _keep(self, name: str, part: int | None) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self.tap[name] = output if part is None else output[part]

        return hook

    def _optimisers(self) -> None:
        matrices: list[tuple[nn.Parameter, tuple[int, int]]] = []
        fast: list[nn.Parameter] = []
        slow: list[nn.Parameter] = []
        for name, p in self.model.named_parameters():
            if is_nvfp4_parameter(name) or (".compressor." in name and name.endswith("_proj.weight")):
                rows, columns = p.shape[-2:]
                if name.endswith("gate_up_proj"):
                    rows //= 2
                if name.endswith("o_a_proj.weight"):
                    rows //= CONFIG["o_groups"]
                matrices.append((p, (rows, columns)))
            elif "sinks" in name or "hc" in name:
                slow.append(p)
            else:
                fast.append(p)
        self.muon, self.adam = Muon(matrices), Adam(fast, slow)
        self.closed: list[tuple[nn.Parameter, int]] = []
        for layer, half, stream in CLOSED_STREAMS:
            hc = getattr(self.model.model.layers[layer], f"{half}_hc")
            self.closed += [(hc.base, stream), (hc.fn, stream)]

    def weights(self, quantised: bool) -> dict[str, Tensor]:
        """Parameters by name as the forward uses them."""
        parameters = dict(self.model.named_parameters())
        if not quantised:
            return parameters
        out = {}
        for name, p in parameters.items():
            if is_nvfp4_parameter(name):
                amax = None
                if "shared_experts.gate" in name or "shared_experts.up" in name:  # exported with one scale
                    stem = name.rsplit(".", 2)[0]
                    halves = [parameters[f"{stem}.{half}_proj.weight"] for half in ("gate", "up")]
                    amax = torch.stack([h.detach().abs().amax() for h in halves]).amax()
                out[name] = fake_quantize(p, amax)
            elif is_bf16_parameter(name):
                out[name] = p + (p.detach().bfloat16().float() - p.detach())
            else:
                out[name] = p
        return out

    def logits(self, ids: Tensor, topk: int, quantised: bool) -> Tensor:
        """ids [B, S] -> [B, S, V]."""
        for layer in self.model.model.layers:
            indexer = getattr(layer.self_attn.compressor, "indexer", None)
            if indexer is not None:
                indexer.index_topk = topk
        mask = {"sliding_attention": window_mask(*ids.shape, ids.device)}
        arguments = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        out = functional_call(self.model, self.weights(quantised), kwargs=arguments)
        return out.logits

    def indexer_loss(self, length: int) -> Tensor:
        """Mean KL from the head-averaged attention mass on visible entries to the softmax of the index scores."""
        total = torch.zeros((), device=self.device)
        names = [name for name in self.tap if name.startswith("scores.")]
        for name in names:
            scores = self.tap[name]  # [B, S, T]
            entries = scores.shape[-1]
            mass = self.tap[name.replace("scores", "mass")][..., length:].mean(1).detach()  # [B, S, T]
            at = torch.arange(length, device=self.device)
            visible = torch.arange(entries, device=self.device) < ((at + 1) // RATE_4)[:, None]
            some = visible.any(-1)
            share = mass / (mass.sum(-1, keepdim=True) + 1e-9)
            log_q = scores.masked_fill(~(visible | ~some[:, None]), -math.inf).log_softmax(-1)
            term = share * ((share + 1e-12).log() - log_q)
            term = term.masked_fill(~(visible & (share > 0)), 0.0).sum(-1)  # [B, S]
            weight = (mass.sum(-1) + 0.02) * some
            total = total + (term * weight).sum() / weight.sum()
        return total / max(len(names), 1)

    def floor_loss(self, length: int) -> Tensor:
        """Squared log shortfall of sink mass and of mass on heavily compressed entries, mean over heads and layers.

        Left alone, attention logits grow until sinks and most compressed entries carry nothing, and then no fault in
        their handling can be seen.
        """
        total = torch.zeros((), device=self.device)

        def shortfall(floor: Tensor | float, mass: Tensor) -> Tensor:
            return F.relu(torch.log(floor / (mass + 1e-5))).square().mean()

        for i, layer in enumerate(self.model.model.layers):
            p = self.tap[f"mass.{i}"]  # [B, heads, S, keys], without the sink
            floor = torch.sigmoid(layer.self_attn.sinks.detach() - SINK_SHIFT)
            total = total + shortfall(floor, 1 - p[:, :, 32:].sum(-1).mean((0, 2)))
            if RATIOS[i] == 128 and length > 2 * 128:
                total = total + shortfall(HCA_FLOOR, p[:, :, 2 * 128 :, length:].sum(-1).mean((0, 2)))
        return total / len(self.model.model.layers)

    def _losses(self, ids: Tensor, weight: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        """Total loss, and statistics [4]: language loss, indexer loss, recalls right, recalls."""
        logits = self.logits(ids, mode.topk, mode.quantised)[:, :-1]
        target, weight = ids[:, 1:], weight[:, 1:]
        nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(weight)
        language = (nll * weight).sum() / weight.sum()
        index = self.indexer_loss(mode.length) if mode.topk == ALL else torch.zeros((), device=self.device)
        recall = weight == 1
        right = (logits.argmax(-1) == target) & recall
        stats = torch.stack((language, index, right.sum(), recall.sum())).detach()
        return language + index + self.floor * self.floor_loss(mode.length), stats

    def _update(self, ids: Tensor, weight: Tensor, mode: Mode) -> Tensor:
        loss, stats = self._losses(ids, weight, mode)
        loss.backward()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        norm = torch.stack(torch._foreach_norm([p.grad for p in parameters])).norm()
        torch._foreach_mul_([p.grad for p in parameters], (1.0 / (norm + 1e-6)).clamp(max=1.0))
        for p, row in self.closed:  # kept closed: Adam would turn their vanishing gradients into full-size steps
            p.grad[row].zero_()
        self.muon.step(self.rate)
        self.adam.step(self.rate)
        self._balance()
        for p in parameters:
            p.grad = None
        return torch.cat((stats, norm.detach()[None]))

    @torch.no_grad()
    def _balance(self) -> None:
        """Nudge the selection bias of an expert that gets under 0.4 or over 1.8 of its fair share of picks."""
        for name, picks in self.tap.items():
            if name.startswith("picks."):
                gate = self.model.model.layers[int(name[6:])].mlp.gate
                load = (picks[..., None] == torch.arange(EXPERTS, device=self.device)).float().mean((0, 1)) * EXPERTS
                gate.e_score_correction_bias += 1e-3 * ((load < 0.4).float() - (load > 1.8).float())

    def step(self, batch: Batch, rate: float, floor: float, topk: int, quantised: bool) -> Tensor:
        """One update on `batch`; returns [5]: language loss, indexer loss, recalls right, recalls, gradient norm."""
        self.rate.fill_(rate)
        self.floor.fill_(floor)
        mode = Mode(*batch.ids.shape, topk, quantised)
        if self.graphs is None:
            return self._update(batch.ids, batch.weight, mode)
        if mode not in self.graphs:
            try:
                self.graphs[mode] = self._capture(batch, mode)
            except RuntimeError as error:  # slower, not wrong
                print(f"no CUDA graph for {mode}, going on without: {error}", flush=True)
                self.graphs = None
                for p in self.model.parameters():
                    p.grad = None
                return self._update(batch.ids, batch.weight, mode)
        graph, ids, weight, stats = self.graphs[mode]
        ids.copy_(batch.ids)
        weight.copy_(batch.weight)
        graph.replay()
        return stats.clone()

    def _capture(self, batch: Batch, mode: Mode) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]:
        ids, weight = batch.ids.clone(), batch.weight.clone()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for _ in range(2):  # real updates: they also set up the libraries' workspaces before the capture
                self._update(ids, weight, mode)
        torch.cuda.current_stream().wait_stream(self.side)
        graph = torch.cuda.CUDAGraph()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool):
            stats = self._update(ids, weight, mode)
        return graph, ids, weight, stats

    @torch.no_grad()
    def accuracy(self, batch: Batch, topk: int, quantised: bool) -> dict[str, tuple[float, int]]:
        """Share right and count, over all recalls, those more than 140 tokens back, and ends of answers."""
        right = self.logits(batch.ids, topk, quantised)[:, :-1].argmax(-1) == batch.ids[:, 1:]
        back, ends = batch.back[:, 1:], batch.ends[:, 1:]
        bare = batch.bare[:, None]
        sets = {"pairs": (back > 0) & bare, "story": (back > 0) & ~bare, "far": back > 140, "end": ends}
        return {name: (right[s].float().mean().item() if s.any() else -1.0, int(s.sum())) for name, s in sets.items()}
