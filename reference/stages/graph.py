"""The stages of a model in execution order: the list that both sides of the harness share."""

from __future__ import annotations

from reference.geometry import CSA, SLIDING
from reference.net import Net
from reference.stages.attention import AttnCore
from reference.stages.base import HFStage
from reference.stages.compress import Compressor, Indexer
from reference.stages.hyper import Hyper, Mix
from reference.stages.model import Closing, Embed, HyperHead, RopeCache
from reference.stages.moe import Experts, MoeSum, Router, SharedExpert
from reference.stages.projections import Projection
from reference.stages.rotary import Rotation


def stages(net: Net) -> list[HFStage]:
    """Every stage of ``net``. A model cut before its last layer has no head: its streams are not the head's input."""
    graph: list[HFStage] = [Embed(net), RopeCache(net)]
    for layer in range(net.depth):
        graph += [*_attention(net, layer), *_feed_forward(net, layer)]
    if net.depth == net.geometry.num_hidden_layers:
        graph += [HyperHead(net), Closing(net, "final_norm"), Closing(net, "lm_head")]
    return graph


def _attention(net: Net, layer: int) -> list[HFStage]:
    kind = net.geometry.layer_types[layer]
    half: list[HFStage] = [Hyper(net, layer, "attn"), Projection(net, layer, "attn_norm")]
    half += [Projection(net, layer, name) for name in ("q_a", "q_a_norm", "q_b", "q_b_norm")]
    half += [Rotation(net, layer, "q_rope"), Projection(net, layer, "kv"), Projection(net, layer, "kv_norm")]
    half.append(Rotation(net, layer, "kv_rope"))
    if kind != SLIDING:
        half.append(Compressor(net, layer))
    if kind == CSA:
        half.append(Indexer(net, layer))
    half += [AttnCore(net, layer), Rotation(net, layer, "attn_unrope")]
    return [*half, Projection(net, layer, "o_a"), Projection(net, layer, "o_b"), Mix(net, layer, "attn")]


def _feed_forward(net: Net, layer: int) -> list[HFStage]:
    experts: list[HFStage] = [Router(net, layer), Experts(net, layer), SharedExpert(net, layer), MoeSum(net, layer)]
    return [Hyper(net, layer, "ffn"), Projection(net, layer, "ffn_norm"), *experts, Mix(net, layer, "ffn")]
