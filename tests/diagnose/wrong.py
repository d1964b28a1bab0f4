"""Production stages gone wrong, written for these tests: ``function(stage, **inputs)`` returns a dict by output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Outputs = dict[str, Tensor]


def packed(change: Any) -> Any:
    """A stage whose packed weights are passed through ``change(params, prefix)``, which edits the dict."""

    def wrong(stage: Any, **inputs: Tensor) -> Outputs:
        params = dict(stage.params)
        for leaf in [n for n, t in params.items() if n.endswith("weight") and t.dtype == torch.uint8]:
            change(params, leaf)
        return stage.run(params=params, **inputs)

    return wrong


def linear(decode: Any) -> Any:
    """A linear stage computed in fp32 on ``decode(params)``, ``[N, K]``."""

    def wrong(stage: Any, **inputs: Tensor) -> Outputs:
        (x,) = inputs.values()
        (name,) = stage.run(**inputs)
        out = x.float() @ decode(stage.params).float().T
        return {name: out.to(x.dtype)}

    return wrong


def drop_ws2(params: Outputs, leaf: str) -> None:
    params[f"{leaf}_scale_2"] = torch.ones_like(params[f"{leaf}_scale_2"])


def fold_input_scale(params: Outputs, leaf: str) -> None:
    scale = params[f"{leaf}_scale_2"]
    params[f"{leaf}_scale_2"] = scale * params[leaf.removesuffix("weight") + "input_scale"].view(scale.shape)


def transpose_scales(params: Outputs, leaf: str) -> None:
    scale = params[f"{leaf}_scale"]
    moved = scale.view(torch.uint8).transpose(-1, -2).reshape(scale.shape).contiguous()
    params[f"{leaf}_scale"] = moved.view(scale.dtype)


def swap_nibbles(params: Outputs, leaf: str) -> None:
    params[leaf] = params[leaf] >> 4 | params[leaf] << 4


def unpermuted(params: Outputs) -> Tensor:
    byte = params["weight"]
    n, half = byte.shape
    value = steps(params).new_tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    moved = byte.T.reshape(n, half)
    return value[codes(moved)] * steps(params)


def codes(byte: Tensor) -> Tensor:
    return torch.stack((byte & 15, byte >> 4), -1).flatten(-2).long()


def steps(params: Outputs) -> Tensor:
    return (params["weight_scale"].double() * params["weight_scale_2"].double()).repeat_interleave(16, -1)


def as_integers(params: Outputs) -> Tensor:
    return codes(params["weight"]) * steps(params)


def reorder_experts(stage: Any, **inputs: Tensor) -> Outputs:
    order = torch.tensor([0, 2, 1, 4, 3, 6, 7, 5])
    params = {n: t[order] for n, t in stage.params.items()}
    return stage.run(params=params, **inputs)


def attend(
    stage: Any,
    i: Outputs,
    *,
    sink: Tensor | None = None,
    zeros: int = 0,
    value: bool = False,
    factor: float = 1.0,
    hidden: Tensor | None = None,
) -> Outputs:
    """The core in fp32 on the mask that the right one returns, without what is ``hidden`` ``[B, S, J]``."""
    out = stage.run(**i)
    if hidden is not None:
        out = {**out, "visible": out["visible"] & ~hidden}
    keys = torch.cat([i["kv"], i["compressed"]], 1).float() if "compressed" in i else i["kv"].float()
    score = torch.einsum("bshd,bjd->bhsj", i["q"].float(), keys) * keys.shape[-1] ** -0.5 * factor
    score = score.masked_fill(~out["visible"].unsqueeze(1), -torch.inf)
    extra = (stage.params["sinks"] if sink is None else sink).float().view(1, -1, 1, 1).expand(*score.shape[:3], 1)
    p = torch.cat([score, score.new_zeros(*score.shape[:3], zeros), extra], -1).softmax(-1)
    result = torch.einsum("bhsj,bjd->bshd", p[..., : keys.shape[1]], keys)
    if value:
        result = result + p[..., -1].transpose(1, 2).unsqueeze(-1) * keys[:, None, :1]
    return {**out, "out": result.to(out["out"].dtype)}


def zero_key(stage: Any, **i: Tensor) -> Outputs:
    return attend(stage, i, sink=torch.zeros_like(stage.params["sinks"]))


def value_sum(stage: Any, **i: Tensor) -> Outputs:
    return attend(stage, i, value=True)


def padded(stage: Any, **i: Tensor) -> Outputs:
    return attend(stage, i, zeros=-i["kv"].shape[1] % 128)


def filled(stage: Any, **i: Tensor) -> Outputs:
    """Every query's list of keys is filled up to a multiple of 128 with keys of zeros, which its entropy counts."""
    out = stage.run(**i)
    keys = torch.cat([i["kv"], i["compressed"]], 1).float()
    score = torch.einsum("bshd,bjd->bshj", i["q"].float(), keys) * keys.shape[-1] ** -0.5
    score = score.masked_fill(~out["visible"].unsqueeze(2), -torch.inf)
    more = torch.arange(128) < (-out["visible"].sum(-1) % 128).unsqueeze(-1)  # [B, S, 128]
    zeros = torch.where(more, 0.0, -torch.inf).unsqueeze(2).expand(*score.shape[:3], 128)
    every = torch.cat([score, zeros], -1)
    sink = stage.params["sinks"].float().expand(score.shape[:3])
    lse = torch.logaddexp(every.logsumexp(-1), sink)
    result = torch.einsum("bshj,bjd->bshd", (score - lse.unsqueeze(-1)).exp(), keys).to(out["out"].dtype)
    entropy = torch.special.entr(every.softmax(-1)).sum(-1)
    return {**out, "out": result, "lse": lse, "entropy": entropy, "sink_mass": (sink - lse).exp()}


def narrow(stage: Any, **i: Tensor) -> Outputs:
    """A window of 127 keys, the query's own included; keys of a cache come before the call's."""
    length, total = i["positions"].shape[1], i["kv"].shape[1]
    entries = i["compressed"].shape[1] if "compressed" in i else 0
    query = torch.arange(total - length, total).unsqueeze(1)
    oldest = query - torch.arange(total + entries) == 127
    oldest[:, total:] = False
    return attend(stage, i, hidden=oldest.unsqueeze(0))


def mscale(stage: Any, **i: Tensor) -> Outputs:
    return attend(stage, i, factor=1.2772588722239782)


def mscale_squared(stage: Any, **i: Tensor) -> Outputs:
    return attend(stage, i, factor=1.2772588722239782**2)


def entries(stage: Any, i: Outputs, step: int) -> Outputs:
    """Entry t is turned by t * step at the plain frequencies of the sliding layers."""
    out = stage.run(**i)
    x = out["pooled"].float()
    x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * stage.params["kv_norm.weight"].float()
    angle = step * torch.arange(x.shape[1]).unsqueeze(-1) * 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    a, b, cos, sin = x[..., -64::2].clone(), x[..., -63::2].clone(), angle.cos(), angle.sin()
    x[..., -64::2], x[..., -63::2] = a * cos - b * sin, b * cos + a * sin
    return {**out, "keys": x.to(out["keys"].dtype)}


def unrotated(stage: Any, **i: Tensor) -> Outputs:
    return entries(stage, i, 0)


def by_main_table(stage: Any, **i: Tensor) -> Outputs:
    return entries(stage, i, 4)


def split(stage: Any, **i: Tensor) -> Outputs:
    p, n = stage.params, i["streams"].shape[2]
    order = [*range(n), *range(n + n * n, 2 * n + n * n), *range(n, n + n * n)]
    return stage.run(params={"fn": p["fn"][order], "base": p["base"][order], "scale": p["scale"]}, **i)


def untransposed(stage: Any, **i: Tensor) -> Outputs:
    return stage.run(**{**i, "comb": i["comb"].transpose(-1, -2).contiguous()})


def from_exp(stage: Any, **i: Tensor) -> Outputs:
    p, n = stage.params, i["streams"].shape[2]
    x = i["streams"].flatten(2).float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    a = x @ p["fn"][2 * n :].float().T * p["scale"][2] + p["base"][2 * n :]
    comb = a.reshape(*a.shape[:2], n, n).exp()
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    return {**stage.run(**i), "comb": comb}


def no_eps(stage: Any, **i: Tensor) -> Outputs:
    p, n = stage.params, i["streams"].shape[2]
    x = i["streams"].flatten(2).float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    pre = torch.sigmoid(x @ p["fn"][:n].float().T * p["scale"][0] + p["base"][:n])
    out = (pre.unsqueeze(-1) * i["streams"].float()).sum(2)
    return {**stage.run(**i), "pre": pre, "collapsed": out.to(i["streams"].dtype)}


def skipped(stage: Any, q: Tensor) -> Outputs:
    return {"q": q.clone()}


def plain_rope(stage: Any, positions: Tensor) -> Outputs:
    out = stage.run(positions=positions)
    base = 160000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    angle = positions.double().unsqueeze(-1) * base
    dtype = out["compress_cos"].dtype
    return {**out, "compress_cos": angle.cos().to(dtype), "compress_sin": angle.sin().to(dtype)}


def stream_0(stage: Any, streams: Tensor) -> Outputs:
    return {**stage.run(streams=streams), "collapsed": streams[:, :, 0].clone()}


def unprojected(stage: Any, out: Tensor) -> Outputs:
    right = stage.run(out=out)["o_a"]
    return {"o_a": out.reshape(*right.shape[:3], -1)[..., : right.shape[-1]].to(right.dtype)}
