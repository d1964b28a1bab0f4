"""A small model with both sides and a float64 oracle, to test an engine that knows no model.

Two layers of: hyper-connection-like ``pre`` (with direct form), ``proj`` (a linear), ``attn`` (causal softmax with
entropy per head and an exact ``visible``), ``router`` (picks), ``experts``, ``post`` (direct form). Around them
``embed`` (exact), ``table`` (read by every layer) and ``head`` (logits). The reference rounds to bf16 in more places
than production. ``FAULTS`` mutates what a production stage returns; ``TWEAKS`` what the sides look like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.judge.ulp import DTYPES
from harness.types import Check, Judged

V, D, N, H, E, K, LAYERS = 16, 32, 2, 2, 6, 2, 2
UNIT = 2.0**-24
Tensors = dict[str, Tensor]

#: production stage -> function(outputs, inputs) -> outputs, applied to what the stage returns
FAULTS: dict[str, Callable[[Tensors, Tensors], Any]] = {}
#: "production" | "reference" -> function(list of stages) -> list of stages; "certify" -> bool; "build" -> exception
TWEAKS: dict[str, Any] = {}


@dataclass(frozen=True)
class Out:
    name: str
    wire: str
    dims: tuple[str, ...]
    dtype: str
    role: str = "value"


@dataclass(frozen=True)
class ToyStage:
    name: str
    layer: int | None
    inputs: Mapping[str, str]
    outputs: tuple[Out, ...]
    side: str
    params: Mapping[str, Tensor] = field(default_factory=dict)
    covers: tuple[str, ...] = ()
    plan: Mapping[str, str] = field(default_factory=lambda: {"acc": "fp32"})
    config: Mapping[str, object] = field(default_factory=dict)
    component: str = "tests.harness.toy:ToyStage"

    def decoded(self) -> Tensors:
        return {name: p.double() for name, p in self.params.items()}

    def run(self, *, params: Any = None, replay: Any = None, **inputs: Tensor) -> Tensors:
        kind = self.name.rpartition(".")[2]
        used = {**self.params, **(params or {})}
        outputs = compute(kind, self.side, inputs, used, (replay or {}).get("picks"))
        outputs = {o.name: outputs[o.name].to(dtype_of(o, self.side)) for o in self.outputs}
        fault = FAULTS.get(self.name) if self.side == "production" else None
        return fault(outputs, inputs) if fault else outputs


@dataclass(frozen=True)
class ToyDirect(ToyStage):
    direct_with: str = ""

    def direct(self, **inputs: Tensor) -> Tensors:
        kind = self.name.rpartition(".")[2]
        if kind == "pre":
            return {"x": wide(inputs["streams"], self.side).mean(2).to(inputs["streams"].dtype)}
        mixed = wide(inputs["streams"], self.side) + 0.1 * wide(inputs["out"], self.side)[:, :, None]
        return {"streams": mixed.to(inputs["streams"].dtype)}


@dataclass(frozen=True)
class FusedStage(ToyStage):
    """Stands for several stages and keeps what passes between them in the compute dtype."""

    parts: tuple[ToyStage, ...] = ()

    def decoded(self) -> Tensors:
        return {f"{p.name}.{k}": v for p in self.parts for k, v in p.decoded().items()}

    def run(self, *, params: Any = None, replay: Any = None, **inputs: Tensor) -> Tensors:
        wires = {self.inputs[name]: t for name, t in inputs.items()}
        for part in self.parts:
            kind = part.name.rpartition(".")[2]
            found = compute(kind, "production", {a: wires[w] for a, w in part.inputs.items()}, dict(part.params), None)
            wires |= {o.wire: found[o.name] for o in part.outputs}
        outputs = {o.name: wires[o.wire].to(DTYPES[o.dtype]) for o in self.outputs}
        fault = FAULTS.get(self.name)
        return fault(outputs, inputs) if fault else outputs


def dtype_of(o: Out, side: str) -> torch.dtype:
    dtype = DTYPES[o.dtype]
    return torch.float64 if side == "oracle" and dtype.is_floating_point else dtype


def wide(x: Tensor, side: str) -> Tensor:
    if not x.is_floating_point():
        return x
    return x.double() if side == "oracle" else x.float()


def compute(kind: str, side: str, raw: Tensors, raw_params: Tensors, picks: Tensor | None) -> Tensors:
    """One stage in the side's compute dtype. The reference rounds once more inside where a real one does."""
    i = {name: wide(t, side) for name, t in raw.items()}
    p = {name: wide(t, side) for name, t in raw_params.items()}
    coarse = side == "reference"
    if kind == "embed":
        return {"streams": p["weight"][i["input_ids"]][:, :, None].expand(-1, -1, N, -1)}
    if kind == "table":
        angle = i["positions"].to(torch.float64 if side == "oracle" else torch.float32)
        rate = torch.arange(1, D + 1, dtype=angle.dtype) / D
        return {"table": (angle[..., None] * rate).cos()}
    if kind == "pre":
        coef = (i["streams"] @ p["fn"]).squeeze(-1).sigmoid()
        return {"coef": coef, "x": (coef[..., None] * i["streams"]).sum(2)}
    if kind == "proj":
        return {"y": i["x"] @ p["weight"].T}
    if kind == "attn":
        return attention(i, coarse)
    if kind == "router":
        logits = i["x"] @ p["weight"].T
        logits = logits.bfloat16().float() if coarse else logits
        scores = logits.sigmoid()
        chosen = scores.topk(K, -1).indices if picks is None else picks
        weights = scores.gather(-1, chosen)
        return {"logits": logits, "weights": weights / weights.sum(-1, keepdim=True), "picks": chosen}
    if kind == "experts":
        each = torch.einsum("bsd,efd->bsef", i["x"], p["weight"]).gather(2, index(i["picks"]))
        return {"each": each, "out": (each * i["weights"][..., None]).sum(2)}
    if kind == "post":
        return {"streams": i["streams"] + i["coef"][..., None] * (i["out"] + i["routed"])[:, :, None]}
    return {"logits": i["streams"].sum(2) @ p["weight"].T}


def index(picks: Tensor) -> Tensor:
    return picks.long()[..., None].expand(-1, -1, -1, D)


def attention(i: Tensors, coarse: bool) -> Tensors:
    x, (b, s) = i["y"], i["y"].shape[:2]
    heads = (x * i["table"]).reshape(b, s, H, D // H)
    logits = torch.einsum("bshd,bthd->bsht", heads, heads) / math.sqrt(D // H)
    logits = logits.bfloat16().float() if coarse else logits
    visible = torch.ones(s, s, dtype=torch.bool).tril()[None].expand(b, s, s)
    probs = logits.masked_fill(~visible[:, :, None], -math.inf).softmax(-1)
    out = torch.einsum("bsht,bthd->bshd", probs, x.reshape(b, s, H, D // H)).reshape(b, s, D)
    return {"out": out, "visible": visible.contiguous(), "entropy": torch.special.entr(probs).sum(-1)}


def sizes(kind: str, i: Tensors, p: Tensors, value: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A generous sum of magnitudes behind every output: fp32 roundings are at most a few units of it."""
    wide_x = i.get("x", i.get("y", i.get("streams", torch.zeros(1)))).abs()
    if kind == "proj":
        return {"y": wide_x @ p["weight"].abs().T}
    if kind == "head":
        return {"logits": wide_x.sum(2) @ p["weight"].abs().T}
    if kind == "router":
        logits = wide_x @ p["weight"].abs().T
        largest = logits.amax(-1, keepdim=True)
        return {"logits": logits, "picks": logits, "weights": largest.expand(value["weights"].shape)}
    if kind == "experts":
        each = torch.einsum("bsd,efd->bsef", wide_x, p["weight"].abs()).gather(2, index(i["picks"]))
        return {"each": each, "out": (each * i["weights"][..., None]).sum(2)}
    if kind == "pre":
        coef = 1 + (wide_x @ p["fn"].abs()).squeeze(-1)
        return {"coef": coef, "x": (coef[..., None] * wide_x).sum(2)}
    if kind == "post":
        return {"streams": wide_x + (i["coef"][..., None] * (i["out"].abs() + i["routed"].abs())[:, :, None]).abs()}
    if kind == "attn":
        top = wide_x.amax().expand(1)
        return {"out": value["out"].abs() + top * 4, "entropy": value["entropy"].abs() + 8 * top}
    if kind == "table":
        return {"table": 1 + i["positions"].double()[..., None].expand(value["table"].shape)}
    return {"streams": value["streams"].abs() * 0}


@dataclass
class ToySide:
    stages: list[ToyStage]
    provenance: Mapping[str, str] = field(default_factory=lambda: {"toy": "1"})

    def oracle(self) -> ToyOracle:
        return ToyOracle(build("oracle"))

    def certify(self, case: Tensors, wires: Tensors) -> Iterable[Check]:
        assert "input_ids" in case
        yield Check("wires", TWEAKS.get("certify", True), f"{len(wires)} wires")

    def logical_dtype(self) -> str:
        return "bf16"


@dataclass
class ToyOracle(ToySide):
    def judge(
        self, stage: str, inputs: Tensors, *, plan: Mapping[str, str], given: Mapping[str, Tensor] | None = None
    ) -> dict[str, Judged]:
        own = next(s for s in self.stages if s.name == stage)
        kind = stage.rpartition(".")[2]
        i = {name: wide(t, "oracle") for name, t in inputs.items()}
        value = compute(kind, "oracle", i, dict(own.params), (given or {}).get("picks"))
        if kind == "router":
            value["picks"] = value["logits"].sigmoid()
        size = sizes(kind, i, {k: v.double() for k, v in own.params.items()}, value)
        found = {}
        for name, y in value.items():
            y = y.double() if y.is_floating_point() else y
            rss = 2 * UNIT * math.sqrt(D) * size.get(name, torch.zeros(y.shape)).double().broadcast_to(y.shape)
            found[name] = Judged(y, rss, rss * math.sqrt(D))
        return found


def build(side: str) -> list[ToyStage]:
    """The stages of one side; parameters come from one seed, so all sides agree."""
    g = torch.Generator().manual_seed(5)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g) / math.sqrt(shape[-1])).bfloat16()

    def fine(dtype: str) -> str:  # where the reference rounds to bf16 and production does not
        return "bf16" if side == "reference" else dtype

    found: list[ToyStage] = []

    def add(
        name: str, inputs: dict[str, str], outs: str, params: Tensors | None = None, partner: str | None = None
    ) -> None:
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        outputs = []
        for text in outs.split():
            label, dims, dtype, *role = text.split(":")
            outputs.append(Out(label, f"{name}.{label}", tuple(dims.split(",")), dtype, *role))
        cls: Any = ToyDirect if partner else ToyStage
        extra = {"direct_with": partner} if partner else {}
        found.append(cls(name, layer, inputs, tuple(outputs), side, params or {}, (name,), **extra))

    add("embed", {"input_ids": "case.input_ids"}, "streams:B,S,N,d:bf16:exact", {"weight": weight(V, D)})
    add("table", {"positions": "case.positions"}, f"table:B,S,d:{fine('fp32')}")
    streams = "embed.streams"
    for n in range(LAYERS):
        at = f"layers.{n}."
        fn, proj, router, experts = weight(D, 1), weight(D, D), weight(E, D), weight(E, D, D)
        add(at + "pre", {"streams": streams}, "coef:B,S,N:fp32 x:B,S,d:bf16", {"fn": fn.float()}, at + "post")
        add(at + "proj", {"x": at + "pre.x"}, "y:B,S,d:bf16", {"weight": proj})
        outs = "out:B,S,d:bf16 visible:B,S,J:bool:exact entropy:B,S,H:fp32:stat"
        add(at + "attn", {"y": at + "proj.y", "table": "table.table"}, outs)
        outs = f"logits:B,S,E:{fine('fp32')} weights:B,S,k:{fine('fp32')} picks:B,S,k:int64:picks"
        add(at + "router", {"x": at + "pre.x"}, outs, {"weight": router})
        reads = {"x": at + "pre.x", "weights": at + "router.weights", "picks": at + "router.picks"}
        add(at + "experts", reads, f"each:B,S,k,d:{fine('fp32')} out:B,S,d:bf16", {"weight": experts})
        reads = {"streams": streams, "coef": at + "pre.coef", "out": at + "attn.out", "routed": at + "experts.out"}
        add(at + "post", reads, "streams:B,S,N,d:bf16", None, at + "pre")
        streams = at + "post.streams"
    add("head", {"streams": streams}, f"logits:B,S,V:{fine('fp32')}", {"weight": weight(V, D)})
    return found


def fuse(stages: list[ToyStage], *names: str) -> list[ToyStage]:
    """Replace the named stages by one fused stage at the place of the last."""
    parts = tuple(s for s in stages if s.name in names)
    made = {o.wire for p in parts for o in p.outputs}
    outside = {w for s in stages if s.name not in names for w in s.inputs.values()}
    inputs = {w.replace(".", "_"): w for p in parts for w in p.inputs.values() if w not in made}
    outputs = tuple(replace(o, name=o.wire) for p in parts for o in p.outputs if o.wire in outside)
    name = "+".join(names)
    fused = FusedStage(name, parts[0].layer, inputs, outputs, "production", covers=names, parts=parts)
    return [fused if s.name == names[-1] else s for s in stages if s.name not in names[:-1]]


def reference(checkpoint: Path, *, dtype: str) -> ToySide:
    stages = build("reference")
    return ToySide(TWEAKS.get("reference", lambda s: s)(stages))


def production(checkpoint: Path, *, dtype: str) -> ToySide:
    if "build" in TWEAKS:
        raise TWEAKS["build"]
    return ToySide(TWEAKS.get("production", lambda s: s)(build("production")))
