"""Mistakes in the hyper-connections and the head that closes them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from reference.hypotheses.base import Scene, Tensors, Variant, hypothesis


@hypothesis(
    "hc-split-pre-comb-post", "attn_hc ffn_hc", "the projection is split as pre, comb, post, not pre, post, comb"
)
def split(scene: Scene) -> Iterator[Variant | Tensors]:
    p, n = dict(scene.stage.params), scene.inputs["streams"].shape[2]
    rows = torch.arange(n * (2 + n))
    order = torch.cat([rows[:n], rows[n + n * n :], rows[n : n + n * n]])  # where post, then comb are taken from
    moved = {"fn": p["fn"][order]}
    yield scene.again({**moved, "base": p["base"][order]})
    yield scene.again({**moved, "base": p["base"][order], "scale": p["scale"][[0, 2, 1]]})
    yield scene.again(moved)


@hypothesis(
    "comb-not-transposed", "attn_hc ffn_hc attn_mix ffn_mix", "comb is applied without (or with a second) transposition"
)
def transposed(scene: Scene) -> Iterator[Variant | Tensors]:
    if "comb" in scene.inputs:
        yield scene.again(comb=scene.inputs["comb"].transpose(-1, -2))
    else:
        yield {"comb": scene.outputs["comb"].transpose(-1, -2)}


def _logits(scene: Scene) -> tuple[Tensor, float]:
    """comb's pre-activations ``[B, S, N, N]``, and eps."""
    p, c, streams = scene.stage.params, scene.stage.config, scene.inputs["streams"]
    n, x = streams.shape[2], streams.flatten(2)
    normed = x * (x.square().mean(-1, keepdim=True) + float(str(c["rms_norm_eps"]))).rsqrt()
    a = normed @ p["fn"][2 * n :].T * p["scale"][2] + p["base"][2 * n :]
    return a.reshape(*a.shape[:-1], n, n), float(str(c["hc_eps"]))


def _sinkhorn(comb: Tensor, eps: float, iterations: int, *, opened: bool = True) -> Tensor:
    """``opened``: the first of the iterations normalises columns only."""
    for step in range(iterations):
        if step or not opened:
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


@hypothesis("sinkhorn-from-exp", "attn_hc ffn_hc", "Sinkhorn starts from exp(logits) in place of softmax(logits) + eps")
def from_exp(scene: Scene) -> Iterator[Variant | Tensors]:
    a, eps = _logits(scene)
    count = int(str(scene.stage.config["hc_sinkhorn_iters"]))
    for start in (a.exp(), a.exp() + eps, (a - a.amax(-1, keepdim=True)).exp(), (a - a.amax((-1, -2), True)).exp()):
        for opened in (True, False):
            yield {"comb": _sinkhorn(start, eps, count, opened=opened)}


@hypothesis("sinkhorn-order-iterations-eps", "attn_hc ffn_hc", "Sinkhorn ends early, late or in another order")
def iterations(scene: Scene) -> Iterator[Variant | Tensors]:
    a, eps = _logits(scene)
    count = int(str(scene.stage.config["hc_sinkhorn_iters"]))
    start = torch.softmax(a, -1) + eps
    for steps in (count - 1, count + 1, count // 2, 1):
        yield {"comb": _sinkhorn(start, eps, steps)}
    yield {"comb": _sinkhorn(start, eps, count, opened=False)}
    yield {"comb": _sinkhorn(start.transpose(-1, -2), eps, count).transpose(-1, -2)}
    yield {"comb": _sinkhorn(torch.softmax(a, -1), 0.0, count)}


@hypothesis("pre-eps-missing", "attn_hc ffn_hc hc_head", "eps is not added to pre's sigmoid")
def no_eps(scene: Scene) -> Iterator[Variant | Tensors]:
    pre = scene.outputs["pre"] - float(str(scene.stage.config["hc_eps"]))
    yield {"pre": pre, "collapsed": _collapsed(pre, scene.inputs["streams"])}


def _collapsed(pre: Tensor, streams: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * streams).sum(2)


@hypothesis("hyper-head-stream-0", "hc_head", "stream 0 is taken in place of the weighted sum of all streams")
def stream_0(scene: Scene) -> Iterator[Variant | Tensors]:
    yield {"collapsed": scene.inputs["streams"][:, :, 0]}


@hypothesis("hyper-head-wrong-reduction", "hc_head", "the streams are averaged or summed without their weights")
def reduction(scene: Scene) -> Iterator[Variant | Tensors]:
    streams = scene.inputs["streams"]
    yield {"collapsed": streams.mean(2)}
    yield {"collapsed": streams.sum(2)}


ALL = (split, transposed, from_exp, iterations, no_eps, stream_0, reduction)
