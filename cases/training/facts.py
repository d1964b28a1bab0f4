"""What makes the bundled checkpoint a hard test: measured spreads of its coefficients, picks and attention.

With flat attention, zero sinks or balanced coefficients many real faults change nothing; each number here says that one
family of faults has something to change.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV4ForCausalLM

from .arch import CONFIG, EXPERTS, RATIOS
from .load import stored_tensors

TOP_K: int = CONFIG["index_topk"]
Rows = dict[str, str]


class Probe:
    """Hooks that record one forward pass of `model`, layer by layer."""

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        self.model = model
        self.seen: dict[str, Any] = {}
        self.handles = []
        for i, layer in enumerate(model.model.layers):
            for half in ("attn", "ffn"):
                hc = getattr(layer, f"{half}_hc")
                self.handles.append(hc.register_forward_pre_hook(partial(self._input, f"{half}_hc.{i}")))
            self.handles.append(layer.self_attn.register_forward_hook(partial(self._output, f"attn.{i}")))
            self.handles.append(layer.mlp.experts.register_forward_pre_hook(partial(self._input, f"experts.{i}")))
            self.handles.append(layer.mlp.gate.register_forward_hook(partial(self._output, f"router.{i}")))
            indexer = getattr(layer.self_attn.compressor, "indexer", None)
            if indexer is not None:
                self.handles.append(indexer.scorer.register_forward_hook(partial(self._output, f"scores.{i}")))

    def _input(self, name: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        self.seen[name] = args

    def _output(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        self.seen[name] = output

    @torch.no_grad()
    def run(self, ids: Tensor, topk: int = TOP_K) -> dict[str, Any]:
        """One forward on ids [B, S] with `topk` entries attended; the recorded inputs and outputs by name."""
        for layer in self.model.model.layers:
            indexer = getattr(layer.self_attn.compressor, "indexer", None)
            if indexer is not None:
                indexer.index_topk = topk
        self.seen = {}
        self.model(input_ids=ids, use_cache=False)
        return self.seen

    def close(self) -> None:
        """Remove the hooks and restore the config's top-k."""
        for handle in self.handles:
            handle.remove()
        for layer in self.model.model.layers:
            indexer = getattr(layer.self_attn.compressor, "indexer", None)
            if indexer is not None:
                indexer.index_topk = TOP_K


def hyper_logits(hc: nn.Module, streams: Tensor) -> tuple[Tensor, Tensor]:
    """Pre logits [B, S, 4] and comb logits [B, S, 4, 4] of one hyper-connection on its input streams [B, S, 4, H]."""
    n = hc.hc_mult
    x = hc.input_norm(streams.flatten(2).float())
    pre, _, comb = F.linear(x, hc.fn).split([n, n, n * n], -1)
    pre_base, _, comb_base = hc.base.split([n, n, n * n])
    return pre * hc.scale[0] + pre_base, (comb * hc.scale[2] + comb_base).unflatten(-1, (n, n))


def sinkhorn_residue(comb: Tensor, iterations: int = 20) -> float:
    """Largest change the last of `iterations` Sinkhorn steps makes, for comb logits [..., 4, 4]."""
    m = comb.softmax(-1) + 1e-6
    m = m / (m.sum(-2, keepdim=True) + 1e-6)
    before = m
    for _ in range(iterations - 1):
        before = m
        m = m / (m.sum(-1, keepdim=True) + 1e-6)
        m = m / (m.sum(-2, keepdim=True) + 1e-6)
    return (m - before).abs().max().item()


def hyper(model: DeepseekV4ForCausalLM, seen: dict[str, Any]) -> Rows:
    """Pre and comb logits of every hyper-connection."""
    rows: Rows = {}
    for i, layer in enumerate(model.model.layers):
        for half in ("attn", "ffn"):
            hc, streams = getattr(layer, f"{half}_hc"), seen[f"{half}_hc.{i}"][0]
            pre, comb = hyper_logits(hc, streams)
            sigma = comb.flatten(-2).std(-1).mean().item()
            rows[f"layer {i} {half}_hc"] = (
                f"pre logits {pre.min():.1f} to {pre.max():.1f}, {100 * (pre <= -10).float().mean():.0f} % <= -10; "
                f"comb logits sigma {sigma:.2f}, 20th Sinkhorn step moves {sinkhorn_residue(comb):.0e}; "
                f"stream RMS {streams.float().pow(2).mean().sqrt():.2f}"
            )
    return rows


def attention(model: DeepseekV4ForCausalLM, seen: dict[str, Any]) -> Rows:
    """Entropy of the visible keys' probabilities over ln(visible), sink mass and sinks."""
    rows: Rows = {}
    for i, layer in enumerate(model.model.layers):
        p = seen[f"attn.{i}"][1].float()  # [B, heads, S, keys], the sink's mass missing
        mass = p.sum(-1)
        q = p / mass.unsqueeze(-1).clamp_min(1e-20)
        entropy = -(q * q.clamp_min(1e-30).log()).sum(-1)
        # A key that is visible but has no mass in bf16 counts as invisible here: that only raises the ratio.
        ratio = entropy / (p > 0).sum(-1).clamp_min(2).float().log()
        heads = " ".join(f"{r:.2f}" for r in ratio[..., 8:].mean((0, 2)).tolist())
        sinks = " ".join(f"{s:+.2f}" for s in layer.self_attn.sinks.tolist())
        text = f"entropy / ln n by head {heads}; sink mass {1 - mass.mean():.3f}; sinks {sinks}"
        if RATIOS[i]:
            late = p[:, :, 256:, p.shape[2] :].sum(-1).mean((0, 2))  # queries past two windows
            text += f"; late queries' mass on entries {' '.join(f'{m:.2f}' for m in late.tolist())}"
        rows[f"layer {i} attention"] = text
    return rows


def routers(model: DeepseekV4ForCausalLM, seen: dict[str, Any]) -> Rows:
    """Load, confidence and effect of the selection bias; how often the SwiGLU clamp acts in the picked experts."""
    rows: Rows = {}
    for i, layer in enumerate(model.model.layers):
        gate, experts = layer.mlp.gate, layer.mlp.experts
        logits, weights, picks = seen[f"router.{i}"]
        load = (picks[..., None] == torch.arange(EXPERTS)).float().mean((0, 1))
        text = f"load {100 * load.min():.0f}-{100 * load.max():.0f} %, logits sigma {logits.float().std(-1).mean():.2f}"
        text += f", larger weight {weights.float().amax(-1).mean() / CONFIG['routed_scaling_factor']:.2f} of the sum"
        if not layer.mlp.is_hash:
            plain = gate.score_fn(logits).topk(picks.shape[-1], -1).indices.sort(-1).values
            moved = (plain != picks.sort(-1).values).any(-1).float().mean()
            text += f"; bias std {gate.e_score_correction_bias.std():.3f} changes {100 * moved:.0f} % of picks"
        hidden = seen[f"experts.{i}"][0]
        clamped, values = [0, 0, 0], [0, 0]
        for e in range(EXPERTS):
            g, u = (hidden[(picks == e).any(-1)] @ experts.gate_up_proj[e].T).chunk(2, -1)
            clamped[0] += int((g > experts.limit).any(-1).sum())
            clamped[1] += int((u.abs() > experts.limit).any(-1).sum())
            clamped[2] += len(g)
            values[0] += int((g > experts.limit).sum() + (u.abs() > experts.limit).sum())
            values[1] += g.numel() + u.numel()
        text += f"; gate clamped in {100 * clamped[0] / clamped[2]:.1f} %, up in {100 * clamped[1] / clamped[2]:.1f} %"
        text += f" of the picks, {100 * values[0] / values[1]:.2f} % of the values"
        rows[f"layer {i} router"] = text
    return rows


def indexer(dense: dict[str, Any], length: int) -> Rows:
    """Share of the attention mass on all visible entries that the top-k of the index scores holds, from a dense run."""
    rows: Rows = {}
    at = torch.arange(length)
    for i in (i for i, ratio in enumerate(RATIOS) if ratio == 4):
        scores = dense[f"scores.{i}"]  # [B, S, T]
        mass = dense[f"attn.{i}"][1][..., length:].float().sum(1)  # [B, S, T]
        visible = torch.arange(scores.shape[-1]) < ((at + 1) // RATIOS[i])[:, None]
        late = visible.sum(-1) > TOP_K
        top = scores.masked_fill(~visible, -math.inf)[:, late].topk(TOP_K, -1).indices
        total = mass[:, late].sum(-1)
        kept = mass[:, late].gather(-1, top).sum(-1)
        chance = (TOP_K / visible.sum(-1)[late].float()).mean()
        zero = (scores[:, visible] == 0).float().mean()
        rows[f"layer {i} indexer"] = (
            f"top-{TOP_K} holds {100 * kept.sum() / total.sum():.1f} % of the compressed attention mass (chance "
            f"{100 * chance:.0f} %); mass on entries {total.mean() / CONFIG['num_attention_heads']:.3f}; "
            f"exact-zero scores {100 * zero:.3f} %"
        )
    return rows


def spread(values: Tensor) -> str:
    """Range and number of distinct values."""
    return f"{values.min():.1e} to {values.max():.1e}, {len(values.unique())} of {len(values)} distinct"


def stored(folder: Path) -> Rows:
    """Facts of the bytes: what bf16 cannot hold, norm weights, scales, E2M1 codes."""
    tensors = stored_tensors(folder)
    f32 = {k: t for k, t in tensors.items() if t.dtype == torch.float32 and t.dim()}
    worst, share = min(((t != t.bfloat16().float()).float().mean().item(), k) for k, t in f32.items())[::-1]
    norms = {k: t.float() for k, t in tensors.items() if k.endswith("norm.weight")}
    flat = torch.cat(list(norms.values()))
    rope = torch.cat([t[-64:].unflatten(0, (-1, 2)) for k, t in norms.items() if k.endswith("kv_norm.weight")])
    ape = torch.cat([t.flatten() for k, t in tensors.items() if k.endswith("ape")])
    scale_2 = torch.stack([t for k, t in tensors.items() if k.endswith("weight_scale_2")])
    inputs = torch.stack([t for k, t in tensors.items() if k.endswith("input_scale")])
    codes = torch.zeros(16, dtype=torch.long)
    for t in tensors.values():
        if t.dtype == torch.uint8:
            codes += torch.bincount(torch.cat((t & 15, t >> 4)).flatten().long(), minlength=16)
    apart = (rope[:, 0] - rope[:, 1]).abs().mean()
    return {
        "F32 tensors": f"least share of values that bf16 cannot hold {share:.3f} ({worst})",
        "norm weights": f"{flat.min():.2f} to {flat.max():.2f}, std {flat.std():.2f}; {apart:.2f} apart in a rope pair",
        "position biases": f"std {ape.std():.2f}",
        "weight_scale_2": spread(scale_2),
        "input_scale": spread(inputs),
        "E2M1 codes": f"rarest of the 16 is {100 * codes.min() / codes.sum():.1f} % of all",
    }
