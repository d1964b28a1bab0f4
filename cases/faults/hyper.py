"""Faults of hyper-connections, of the residual mix and of the hyper-head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cases.faults.catalogue import HISTORY, Scenario, bf16, configured, fault, swapped
from production import hyper_connection as mhc
from production import hyper_head

HC, MIX, HEAD = "layers.2.attn_hc", "layers.2.attn_mix", "hc_head"
EXACT = Scenario("fp32", dtype="fp32")


@fault("hc-split-pre-comb-post", HC, "coefficients are split as pre, comb, post", HISTORY)
def split_order(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    n = stage.config["hc_mult"]
    params = {
        name: torch.cat((t[:n], t[n + n * n :], t[n : n + n * n]))
        for name, t in stage.params.items()
        if name != "scale"
    }
    return stage.run(params={**params, "scale": stage.params["scale"][[0, 2, 1]]}, **inputs)  # type: ignore[no-any-return]


@fault("comb-not-transposed", MIX, "comb is contracted over its second axis", HISTORY)
def not_transposed(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(**(inputs | {"comb": inputs["comb"].mT.contiguous()}))  # type: ignore[no-any-return]


def _sinkhorn(stage: Any, inputs: dict[str, Tensor], other: Any) -> dict[str, Tensor]:
    with swapped(mhc, sinkhorn=other):
        return stage.run(**inputs)  # type: ignore[no-any-return]


def _alternate(comb: Tensor, iterations: int, eps: float) -> Tensor:
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


@fault("sinkhorn-from-exp", HC, "Sinkhorn starts from exp of the logits, not from their softmax plus eps", HISTORY)
def from_exp(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _sinkhorn(stage, inputs, lambda z, n, eps: _alternate(torch.exp(z), n, eps))


@fault(
    "sinkhorn-row-first",
    HC,
    "rows are divided before columns",
    "https://github.com/NVIDIA/Megatron-LM/issues/5106",
)
def row_first(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _sinkhorn(
        stage,
        inputs,
        lambda z, n, eps: _alternate((torch.softmax(z, -1) + eps).mT.contiguous(), n, eps).mT.contiguous(),
    )


def _iterations(count: int, stage: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return configured(stage, inputs, hc_sinkhorn_iters=count)


@fault("sinkhorn-1-iteration", HC, "one iteration", "https://github.com/AI-Hypercomputer/maxtext/pull/4337",
       cause_id="sinkhorn-iterations")  # fmt: skip
def one(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _iterations(1, stage, inputs)


@fault("sinkhorn-10-iterations", HC, "ten iterations", "https://github.com/AI-Hypercomputer/maxtext/pull/4337",
       cause_id="sinkhorn-iterations")  # fmt: skip
def ten(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _iterations(10, stage, inputs)


@fault("sinkhorn-19-iterations", HC, "nineteen iterations", "https://github.com/NVIDIA-NeMo/Automodel/pull/2039",
       cause_id="sinkhorn-iterations")  # fmt: skip
def nineteen(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _iterations(19, stage, inputs)


@fault(
    "sinkhorn-last-columns-missing",
    HC,
    "the last division of the columns is left out: columns do not sum to one",
    "https://github.com/ml-explore/mlx-lm/pull/1189",
)
def last_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def short(z: Tensor, n: int, eps: float) -> Tensor:
        comb = _alternate(torch.softmax(z, -1) + eps, n - 1, eps)
        return comb / (comb.sum(-1, keepdim=True) + eps)

    return _sinkhorn(stage, inputs, short)


@fault("sinkhorn-missing", HC, "comb is the softmax of its rows", "https://github.com/ml-explore/mlx-lm/pull/1189")
def missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _sinkhorn(stage, inputs, lambda z, n, eps: torch.softmax(z, -1) + eps)


def _without_eps(stage: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Recompute pre and what follows from it without its eps; everything else as it is."""
    made, p, eps = stage.run(**inputs), stage.params, stage.config["rms_norm_eps"]
    n = inputs["streams"].shape[2]
    z = mhc.project(inputs["streams"], p["fn"], eps)[..., :n]
    pre = torch.sigmoid(z * p["scale"].float()[0] + p["base"].float()[:n])
    return {**made, "pre": pre, "collapsed": mhc.collapse(inputs["streams"], pre).to(made["collapsed"].dtype)}


@fault("pre-eps-missing", HC, "nothing is added to the sigmoid of pre", HISTORY)
def pre_eps(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _without_eps(stage, inputs)


@fault("hc-post-not-doubled", HC, "post is the sigmoid, not twice the sigmoid")
def post_single(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    return {**made, "post": made["post"] / 2}


@fault(
    "hc-coefficients-low-precision",
    HC,
    "the projection of the coefficients has bf16 inputs",
    "https://github.com/Avarok-Cybersecurity/atlas/pull/186",
)
def low_precision(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(params={"fn": bf16(stage.params["fn"])}, **inputs)  # type: ignore[no-any-return]


@fault("hc-scale-order-swapped", HC, "the three scales are read in reverse order")
def scale_order(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(params={"scale": stage.params["scale"].flip(0)}, **inputs)  # type: ignore[no-any-return]


@fault("hc-base-missing", HC, "the static part of the coefficients is zero")
def base_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(params={"base": torch.zeros_like(stage.params["base"])}, **inputs)  # type: ignore[no-any-return]


@fault("hc-norm-per-stream", HC, "the streams are normed one by one, not flattened")
def per_stream(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def project(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
        x = streams.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return torch.nn.functional.linear(x.flatten(2), fn.float())

    with swapped(mhc, project=project):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault("hc-collapsed-is-the-mean", HC, "the block reads the mean of the streams")
def mean(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    return {**made, "collapsed": inputs["streams"].float().mean(2).to(made["collapsed"].dtype)}


@fault("mix-post-missing", MIX, "the block's output is added with weight one")
def post_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(**(inputs | {"post": torch.ones_like(inputs["post"])}))  # type: ignore[no-any-return]


@fault("mix-comb-missing", MIX, "the streams are carried on unmixed")
def comb_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    eye = torch.eye(inputs["comb"].shape[-1]).expand_as(inputs["comb"]).contiguous()
    return stage.run(**(inputs | {"comb": eye}))  # type: ignore[no-any-return]


@fault("mix-coefficients-in-bf16", MIX, "post and comb are rounded to bf16", scenario=EXACT)
def mix_bf16(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(**(inputs | {n: bf16(inputs[n]) for n in ("post", "comb")}))  # type: ignore[no-any-return]


@fault("mix-only-the-first-stream", MIX, "only the first stream receives the block's output")
def first_stream(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    post = torch.zeros_like(inputs["post"])
    post[..., 0] = inputs["post"][..., 0]
    return stage.run(**(inputs | {"post": post}))  # type: ignore[no-any-return]


def _head(stage: Any, inputs: dict[str, Tensor], pre: Tensor) -> dict[str, Tensor]:
    out = hyper_head.collapse(inputs["streams"], pre)
    return {"pre": pre, "collapsed": out.to(inputs["streams"].dtype)}


@fault("hyper-head-stream-0", HEAD, "the head reads stream 0 only", HISTORY)
def head_stream(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return {"pre": stage.run(**inputs)["pre"], "collapsed": inputs["streams"][:, :, 0].contiguous()}


@fault(
    "hyper-head-mean",
    HEAD,
    "the head takes the mean of the streams",
    "https://github.com/AI-Hypercomputer/maxtext/pull/4789",
)
def head_mean(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _head(stage, inputs, torch.full(inputs["streams"].shape[:3], 0.25))


@fault("hyper-head-eps-missing", HEAD, "nothing is added to the sigmoid", scenario=EXACT)
def head_eps(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, hc_eps=0.0)


@fault("hyper-head-norm-missing", HEAD, "the streams are projected without their norm")
def head_norm(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def project(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.linear(streams.flatten(2).float(), fn.float())

    with swapped(hyper_head, project=project):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault("hyper-head-softmax", HEAD, "the streams' weights are a softmax")
def head_softmax(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    p = stage.params
    z = hyper_head.project(inputs["streams"], p["fn"], stage.config["rms_norm_eps"])
    return _head(stage, inputs, torch.softmax(z * p["scale"].float() + p["base"].float(), -1))
