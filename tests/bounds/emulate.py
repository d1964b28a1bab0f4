"""An independent implementation of every stage, in any precision, rounding order and rounding plan.

With ``Arithmetic()`` (float64, no rounding) it is the oracle of these tests; with a plan it is a production that rounds
where the plan says and sums in an order of its own. Written from docs/stages.md; shares no code with reference/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

Tensors = Mapping[str, Tensor]


@dataclass
class Arithmetic:
    """Where and how to round. ``order``: native, permuted, split (8 partial sums), tensor (16-wide, truncating),
    sequential (one product after the other)."""

    plan: Mapping[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    order: str = "native"
    seed: int = 0

    def at(self, point: str, x: Tensor) -> Tensor:
        """Round at a point of the plan."""
        return x.to(torch.bfloat16).to(self.dtype) if self.plan.get(point) == "bf16" else x

    def take(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.is_floating_point() else x

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """a [..., M, K] times b [..., N, K] transposed."""
        k = a.shape[-1]
        if self.dtype == torch.float64 or self.order == "native" or k == 0:
            return a @ b.mT
        if self.order == "tensor":
            return _tensor_core(a, b)
        if self.order == "sequential":
            y = torch.zeros(())
            for i in range(k):
                y = torch.addcmul(y, a[..., i : i + 1], b[..., i].unsqueeze(-2))
            return y
        index = torch.arange(k)
        if self.order == "permuted":
            index = torch.randperm(k, generator=torch.Generator().manual_seed(self.seed))
        y = torch.zeros(())
        for part in index.chunk(8):
            y = y + a[..., part] @ b[..., part].mT
        return y

    def sum(self, x: Tensor, dim: int) -> Tensor:
        if self.dtype == torch.float64 or self.order == "native":
            return x.sum(dim)
        index = torch.randperm(x.shape[dim], generator=torch.Generator().manual_seed(self.seed))
        y = torch.zeros((), dtype=self.dtype)
        for i in index.tolist():  # one after the other: the longest chain there is
            y = y + x.select(dim, i)
        return y


def _tensor_core(a: Tensor, b: Tensor) -> Tensor:
    """Exact sums of 16 products, each added to an fp32 accumulator that truncates."""
    y = torch.zeros((), dtype=torch.float64)
    for start in range(0, a.shape[-1], 16):
        cut = slice(start, start + 16)
        y = y + a[..., cut].double() @ b[..., cut].double().mT
        near = y.float()
        away = near.double().abs() > y.abs()
        y = torch.where(away, torch.nextafter(near, torch.zeros_like(near)), near).double()
    return y.float()


def rms(m: Arithmetic, x: Tensor, weight: Tensor | None, eps: float, point: str = "") -> Tensor:
    r = torch.rsqrt(m.sum(x * x, -1).unsqueeze(-1) / x.shape[-1] + eps)
    y = x * (m.at(point, r) if point else r)
    return y if weight is None else y * weight


def angles(m: Arithmetic, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    fp32 = m.dtype != torch.float64 and "angle" in m.plan
    phase = positions.float().unsqueeze(-1) * inv_freq.float() if fp32 else positions.unsqueeze(-1) * inv_freq
    return m.take(phase.cos()), m.take(phase.sin())


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    a, b = x[..., -width::2], x[..., x.shape[-1] - width + 1 :: 2]
    return torch.cat((x[..., :-width], torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)), -1)


def norm(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    return {"x": m.at("out", rms(m, i["x"], p.get("weight"), c["rms_norm_eps"], "rsqrt"))}


def linear(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    return {"y": m.at("out", m.dot(i["x"], m.at("weight", p["weight"])))}


def o_a(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    groups = c["o_groups"]
    x = i["out"].flatten(2).unflatten(-1, (groups, -1)).transpose(1, 2)  # [B, G, S, K]
    y = m.dot(x, m.at("weight", p["weight"]).unflatten(0, (groups, -1)))
    return {"o_a": m.at("out", y.transpose(1, 2))}


def rope_cache(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for which in ("main", "compress"):
        cos, sin = angles(m, i["positions"], c[f"inv_freq_{which}"])
        found |= {f"{which}_cos": m.at("out", cos), f"{which}_sin": m.at("out", sin)}
    return found


def rope(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    cos, sin = (m.at("table", i[f"{c['rope_layer_type']}_{t}"]).unsqueeze(2) for t in ("cos", "sin"))
    return {"q": m.at("out", turn(i["q"], cos, sin))}


def unrope(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    cos, sin = (m.at("table", i[f"{c['rope_layer_type']}_{t}"]).unsqueeze(2) for t in ("cos", "sin"))
    return {"out": m.at("out", turn(i["out"], cos, -sin))}


def _pre(m: Arithmetic, c: Any, z: Tensor) -> Tensor:
    return torch.sigmoid(z) + c["hc_eps"]


def hyper(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    x = i["streams"]
    n = x.shape[2]
    z = m.dot(rms(m, x.flatten(2), None, c["rms_norm_eps"]), p["fn"])
    scale = torch.cat([p["scale"][j].expand(w) for j, w in enumerate((n, n, n * n))])
    z = z * scale + p["base"]
    pre, post = _pre(m, c, z[..., :n]), 2 * torch.sigmoid(z[..., n : 2 * n])
    comb = torch.softmax(z[..., 2 * n :].unflatten(-1, (n, n)), -1) + c["hc_eps"]
    for axis in [-2] + [-1, -2] * (c["hc_sinkhorn_iters"] - 1):
        comb = comb / (comb.sum(axis, keepdim=True) + c["hc_eps"])
    return {"pre": pre, "post": post, "comb": comb, "collapsed": m.at("collapsed", m.sum(pre.unsqueeze(-1) * x, 2))}


def hc_head(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    x = i["streams"]
    z = m.dot(rms(m, x.flatten(2), None, c["rms_norm_eps"]), p["fn"]) * p["scale"] + p["base"]
    pre = _pre(m, c, z)
    return {"pre": pre, "collapsed": m.at("collapsed", m.sum(pre.unsqueeze(-1) * x, 2))}


def mix(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    post, comb = m.at("coef", i["post"]), m.at("coef", i["comb"])
    carried = m.at("terms", m.sum(comb.unsqueeze(-1) * i["streams"].unsqueeze(3), 2))
    return {"streams": m.at("out", m.at("terms", post.unsqueeze(-1) * i["out"].unsqueeze(2)) + carried)}


def _pooled(m: Arithmetic, p: Tensors, x: Tensor, rate: int, overlap: bool) -> Tensor:
    """[B, T, D]; entry by entry, as the paper writes it."""
    kv = m.at("proj", m.dot(x, m.at("weight", p["kv_proj.weight"])))
    gate = m.at("proj", m.dot(x, m.at("weight", p["gate_proj.weight"])))
    half = kv.shape[-1] // 2 if overlap else kv.shape[-1]
    entries = []
    for t in range(x.shape[1] // rate):
        now = slice(t * rate, (t + 1) * rate)
        k, l = kv[:, now, -half:], gate[:, now, -half:] + p["position_bias"][:, -half:]
        if overlap and t:
            past = slice((t - 1) * rate, t * rate)
            k = torch.cat((kv[:, past, :half], k), 1)
            l = torch.cat((gate[:, past, :half] + p["position_bias"][:, :half], l), 1)
        w = m.at("probs", torch.softmax(l, 1))
        entries.append(m.at("pooled", m.sum(m.at("probs", k * w), 1)))
    return torch.stack(entries, 1) if entries else kv[:, :0, :half]


def _keys(m: Arithmetic, c: Any, p: Tensors, x: Tensor, overlap: bool) -> tuple[Tensor, Tensor]:
    rate = c["compress_rate"]
    pooled = _pooled(m, p, x, rate, overlap)
    cos, sin = angles(m, torch.arange(pooled.shape[1]) * rate, c["inv_freq_compress"])
    normed = m.at("norm", rms(m, pooled, p["kv_norm.weight"], c["rms_norm_eps"]))
    return pooled, m.at("out", turn(normed, m.at("table", cos), m.at("table", sin)))


def compressor(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    pooled, keys = _keys(m, c, p, i["x"], c["layer_type"].startswith("compressed"))
    return {"pooled": pooled, "keys": keys}


def indexer(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    _, keys = _keys(m, c, p, i["x"], True)
    heads, width = c["index_n_heads"], keys.shape[-1]
    q = m.at("q", m.dot(i["q_residual"], m.at("weight", p["q_b_proj.weight"]))).unflatten(-1, (heads, width))
    cos, sin = (m.at("table", t).unsqueeze(2) for t in angles(m, i["positions"], c["inv_freq_compress"]))
    q = m.at("q_rope", turn(q, cos, sin))
    w = m.at("head_weight", m.dot(i["x"], m.at("weight", p["weights_proj.weight"]))) * heads**-0.5
    dots = m.dot(q.transpose(1, 2), keys.unsqueeze(1)).relu() * width**-0.5  # [B, H, S, T]
    scores = m.sum(dots * w.mT.unsqueeze(-1), 1)
    late = torch.arange(keys.shape[1]) >= ((i["positions"] + 1) // c["compress_rate"]).unsqueeze(-1)
    scores = scores.masked_fill(late, float("-inf"))
    return {"keys": keys, "scores": scores, "picks": scores}


def attn_core(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    keys = torch.cat((i["kv"], i["compressed"]), 1) if "compressed" in i else i["kv"]
    visible = c["visible"]
    l = m.at("logits", m.dot(i["q"].transpose(1, 2), keys.unsqueeze(1)))
    l = m.at("logits", l * c["scaling"]).masked_fill(~visible.unsqueeze(1), float("-inf"))  # [B, H, S, J]
    sink = p["sinks"].reshape(1, -1, 1, 1).expand(*l.shape[:3], 1)
    top = torch.maximum(l.amax(-1, keepdim=True), sink) if l.shape[-1] else sink
    e = torch.exp(l - top)
    z = m.sum(e, -1).unsqueeze(-1) + torch.exp(sink - top)
    out = m.dot(m.at("probs", e / z), keys.mT.unsqueeze(1))
    lse = (top + z.log()).squeeze(-1)
    r = torch.softmax(l, -1)
    entropy = torch.special.entr(r).sum(-1)
    mass = torch.exp(sink.squeeze(-1) - lse)
    rows = {"lse": lse, "entropy": entropy, "sink_mass": mass}
    return {"out": m.at("out", out.transpose(1, 2)), "visible": visible, **{k: t.mT for k, t in rows.items()}}


def router(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    l = m.at("logits", m.dot(i["x"], m.at("weight", p["weight"])))
    s = m.at("scores", m.at("scores", softplus(l, threshold=700.0 if m.dtype == torch.float64 else 20.0)).sqrt())
    w = s.gather(-1, c["picks"])
    w = m.at("weights", w / (m.at("weights", m.sum(w, -1).unsqueeze(-1)) + 1e-20))
    chosen = s + p["e_score_correction_bias"]
    return {"logits": l, "weights": m.at("weights", w * c["routed_scaling_factor"]), "picks": chosen}


def _swiglu(m: Arithmetic, c: Any, gate: Tensor, up: Tensor, down: Tensor, x: Tensor) -> dict[str, Tensor]:
    g, u = m.at("gate", m.dot(x, m.at("weight", gate))), m.at("up", m.dot(x, m.at("weight", up)))
    limit = c["swiglu_limit"]
    held = g.clamp(max=limit)
    act = m.at("act", m.at("silu", held * torch.sigmoid(held)) * u.clamp(-limit, limit))
    return {"gate": g, "up": u, "act": act, "down": m.dot(act, m.at("weight", down))}


def shared(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    found = _swiglu(m, c, *(p[f"{n}_proj.weight"] for n in ("gate", "up", "down")), i["x"])
    return {**{k: found[k] for k in ("gate", "up", "act")}, "out": m.at("out", found["down"])}


def experts(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    x, w, picks = i["x"], i["weights"], i["picks"]
    rows = [
        _swiglu(m, c, *(p[f"{n}_proj.weight"][e] for n in ("gate", "up", "down")), x[b, s].unsqueeze(0))
        for b in range(x.shape[0])
        for s in range(x.shape[1])
        for e in picks[b, s].tolist()
    ]
    found = {k: torch.cat([r[k] for r in rows]).unflatten(0, picks.shape) for k in rows[0]}
    found["down"] = m.at("down", found["down"])
    terms = m.at("weighted", found["down"] * w.unsqueeze(-1))
    order = picks.argsort(-1).unsqueeze(-1).expand_as(terms)
    total = torch.zeros_like(terms[..., 0, :])
    for t in terms.gather(-2, order).unbind(-2):
        total = m.at("sum", total + t)
    return {**found, "out": m.at("out", total)}


def moe_sum(m: Arithmetic, c: Any, p: Tensors, i: Tensors) -> dict[str, Tensor]:
    return {"out": m.at("out", i["routed"] + i["shared"])}


FORWARD = {
    **dict.fromkeys(("attn_norm", "q_b_norm"), norm),
    "q_a": linear,
    "o_a": o_a,
    "rope_cache": rope_cache,
    "q_rope": rope,
    "attn_unrope": unrope,
    "attn_hc": hyper,
    "hc_head": hc_head,
    "attn_mix": mix,
    "compressor": compressor,
    "indexer": indexer,
    "attn_core": attn_core,
    "router": router,
    "experts": experts,
    "shared_expert": shared,
    "moe_sum": moe_sum,
}


def run(kind: str, m: Arithmetic, config: Any, params: Tensors, inputs: Tensors) -> dict[str, Tensor]:
    """The stage's outputs in `m`'s precision."""
    p = {k: m.take(t) for k, t in params.items()}
    i = {k: m.take(t) for k, t in inputs.items()}
    return FORWARD[kind](m, config, p, i)
