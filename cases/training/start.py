"""Initial values. Hugging Face's own leave sinks, biases and tables at zero; here every parameter starts where a
fault in its handling can be seen, and training goes on around it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import DeepseekV4ForCausalLM

# (layer, half, stream) whose pre-coefficient is kept near sigmoid(-12): only there does a missing hc_eps show.
CLOSED_STREAMS = ((1, "ffn", 2), (2, "attn", 1), (3, "ffn", 3), (4, "attn", 0), (5, "attn", 2))
CLOSED_BASE = -12.0
# Layers whose comb logits are wide, so that the last of the 20 Sinkhorn iterations still moves something.
WIDE_COMB = (1, 2, 3, 4)
SINK_RANGE = (-2.0, 3.0)


@torch.no_grad()
def initialise(model: DeepseekV4ForCausalLM, seed: int = 0) -> None:
    """Overwrite every parameter and buffer-with-state of `model`, reproducibly."""
    g = torch.Generator().manual_seed(seed)

    def normal(t: Tensor, std: float, mean: float = 0.0) -> None:
        t.copy_(torch.randn(t.shape, generator=g) * std + mean)

    for name, module in model.named_modules():
        if type(module).__name__ == "DeepseekV4RMSNorm":
            module.weight.copy_(torch.exp(torch.randn(module.weight.shape, generator=g) * 0.25))
        elif isinstance(module, nn.Linear):
            gain = 0.5 if name.endswith(("o_b_proj", "down_proj", "lm_head")) else 1.0
            normal(module.weight, gain * module.weight.shape[-1] ** -0.5)
        elif isinstance(module, nn.Embedding):
            normal(module.weight, 0.4)
    for i, layer in enumerate(model.model.layers):
        _attention(layer.self_attn, i, len(model.model.layers), g)
        _experts(layer.mlp, g)
        for half in ("attn", "ffn"):
            _hyper(getattr(layer, f"{half}_hc"), [s for n, h, s in CLOSED_STREAMS if (n, h) == (i, half)], i, g)
    head = model.model.hc_head
    normal(head.hc_fn, 0.03)
    normal(head.hc_base, 0.6, 0.5)
    normal(head.hc_scale, 0.1, 1.0)


def _attention(attn: nn.Module, layer: int, layers: int, g: torch.Generator) -> None:
    """Sinks spread over SINK_RANGE, neighbouring in no layer; position biases of the compressors."""
    heads = attn.sinks.numel()
    low, high = SINK_RANGE
    step = (high - low) / (heads * layers - 1)
    order = torch.randperm(heads * layers, generator=torch.Generator().manual_seed(11))[layer * heads :][:heads]
    attn.sinks.copy_(low + step * (order + 0.3 * torch.rand(heads, generator=g)))
    if attn.compressor is not None:
        for owner in (attn.compressor, getattr(attn.compressor, "indexer", None)):
            if owner is not None:
                owner.position_bias.copy_(torch.randn(owner.position_bias.shape, generator=g) * 0.7)


def _experts(mlp: nn.Module, g: torch.Generator) -> None:
    """Router, routed experts (a few wide channels that reach swiglu_limit) and the hash table or selection bias."""
    gate, experts = mlp.gate, mlp.experts
    gate.weight.copy_(torch.randn(gate.weight.shape, generator=g) * 0.15)
    count, width, hidden = experts.gate_up_proj.shape
    up = torch.randn(count, width, hidden, generator=g) * hidden**-0.5
    for e in range(count):
        channel = torch.randperm(width // 2, generator=g)[:2]
        up[e, channel[0]] *= 3.0  # a gate channel
        up[e, width // 2 + channel[1]] *= 3.0  # an up channel
    experts.gate_up_proj.copy_(up)
    experts.down_proj.copy_(torch.randn(experts.down_proj.shape, generator=g) * 0.5 * (width // 2) ** -0.5)
    if mlp.is_hash:
        vocab, top_k = gate.tid2eid.shape
        first = torch.arange(vocab) % count  # every expert equally often, and never twice for one token
        shift = 1 + torch.randint(0, count - 1, (vocab,), generator=g)
        table = torch.stack((first, (first + shift) % count), 1)[torch.randperm(vocab, generator=g)]
        gate.tid2eid.copy_(table[:, :top_k])
    else:
        gate.e_score_correction_bias.copy_(torch.randn(count, generator=g) * 0.15)


def _hyper(hc: nn.Module, closed: list[int], layer: int, g: torch.Generator) -> None:
    """Hyper-connection coefficients: pre around 0.6 with closed streams, post around 1, comb narrow or wide."""
    n = hc.hc_mult
    wide = layer in WIDE_COMB
    hc.fn.copy_(torch.randn(hc.fn.shape, generator=g) * 0.03)
    pre = torch.randn(n, generator=g) * 0.7 + 0.5
    pre[closed] = CLOSED_BASE + 0.5 * torch.randn(len(closed), generator=g)
    comb = torch.randn(n, n, generator=g) * (2.7 if wide else 0.7) + torch.eye(n) * 1.5
    hc.base.copy_(torch.cat((pre, torch.randn(n, generator=g) * 0.6, comb.flatten())))
    hc.scale.copy_(torch.tensor([1.0, 1.0, 2.0 if wide else 1.0]) * (0.8 + 0.4 * torch.rand(3, generator=g)))
