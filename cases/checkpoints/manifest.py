"""Every parameter of a DeepSeek-V4 model, and the tensors by which a layout stores it.

A *part* is one logical matrix, vector or table under DeepSeek's own name. A *spec* is one tensor that a file must hold:
a part has one (BF16), two (FP8, MXFP4) or up to four (NVFP4) of them; a fused expert tensor stands for all experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cases.checkpoints.layout import Layout, names_of
from cases.checkpoints.model import ATTENTION, Model

#: families of linears that a layout may quantise; all other parts are stored plainly
QUANTISED = ("attention", "indexer query", "shared expert", "routed experts")
FLOATS = ("BF16", "F32")
SLIDING, SPARSE, _ = ATTENTION.values()


@dataclass(frozen=True)
class Part:
    """``family`` groups parts in reports; ``plain`` is the dtype in which an unquantised part is written."""

    key: str
    family: str
    shape: tuple[int, ...]
    plain: str = "BF16"
    layer: int | None = None
    expert: int | None = None
    linear: str = ""  # which of QUANTISED decides the format; "" for parts that are never quantised
    draft: bool = False

    @property
    def stem(self) -> str:
        return self.key.removesuffix(".weight")

    @property
    def leaf(self) -> str:
        """The last words of the name: ``w1``, ``attn_sink``, ``q_norm`` ..."""
        return self.stem.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Spec:
    """One tensor: ``names`` are what it may be called (the first is written), ``dtypes`` what it may be stored as."""

    part: Part
    role: str  # weight, scale, scale_2, input_scale, or fused
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool = False

    @property
    def name(self) -> str:
        return self.names[0]


def parts(model: Model, draft: bool = False) -> Iterator[Part]:
    """All parts in the order of a checkpoint; with ``draft`` also the next-token-prediction blocks ``mtp.N``."""
    d = model.hidden
    yield Part("embed.weight", "embedding", (model.vocab, d))
    for layer in range(model.layers):
        yield from _block(model, f"layers.{layer}.", layer, model.kinds[layer], model.hashed[layer])
    yield Part("norm.weight", "norms", (d,))
    yield from _hyper("hc_head", model.streams, 1, model.streams * d)
    yield Part("head.weight", "head", (model.vocab, d))
    if draft:
        for block in range(model.draft):
            yield from _draft(model, f"mtp.{block}.")


def specs(model: Model, layout: Layout, draft: bool = False) -> Iterator[Spec]:
    """All tensors of a checkpoint in ``layout``. Fused expert tensors come once, with their first expert."""
    for part in parts(model, draft):
        yield from stored_as(part, model, layout)


def stored_as(part: Part, model: Model, layout: Layout) -> Iterator[Spec]:
    """The tensors of one part; none for an expert that a fused tensor of an earlier part holds."""
    if part.linear == "routed experts" and layout.fused and not part.draft:
        yield from _fused(part, model)
        return
    form = layout.form(part.linear, part.draft)
    stems = [name.removesuffix(".weight") for name in names_of(part.key, layout.names)]

    def spec(role: str, leaf: str, dtypes: tuple[str, ...], shape: tuple[int, ...], optional: bool = False) -> Spec:
        return Spec(part, role, tuple(f"{stem}.{leaf}" for stem in stems), dtypes, shape, optional)

    if form == "plain":
        names = names_of(part.key, layout.names)
        others = ("I32", "I64") if part.plain == "I64" else FLOATS
        yield Spec(part, "weight", names, (part.plain, *(o for o in others if o != part.plain)), part.shape)
        return
    n, k = part.shape
    if form == "fp8":
        scales = tuple(dict.fromkeys((layout.fp8_scale, "F8_E8M0", "F32", "BF16")))
        yield spec("weight", "weight", ("F8_E4M3",), (n, k))
        yield spec("scale", "scale" if part.draft else layout.fp8_leaf, scales, (-(-n // 128), -(-k // 128)))
    elif form == "mxfp4":
        yield spec("weight", "weight", ("I8", "U8"), (n, k // 2))
        yield spec("scale", "scale", ("F8_E8M0",), (n, k // 32))
    elif form == "nvfp4":
        yield spec("weight", "weight", ("U8",), (n, k // 2))
        yield spec("scale", "weight_scale", ("F8_E4M3",), (n, k // 16))
        yield spec("scale_2", "weight_scale_2", ("F32",), ())
        yield spec("input_scale", "input_scale", ("F32",), (), optional=True)
    else:  # nvfp4-ct
        yield spec("weight", "weight_packed", ("U8",), (n, k // 2))
        yield spec("scale", "weight_scale", ("F8_E4M3",), (n, k // 16))
        yield spec("scale_2", "weight_global_scale", ("F32",), (1,))
        yield spec("input_scale", "input_global_scale", ("F32",), (1,), optional=True)


def _fused(part: Part, model: Model) -> Iterator[Spec]:
    """Hugging Face's stacks: gate and up in one tensor [E, 2F, H], down in [E, H, F]."""
    if part.expert != 0 or part.leaf == "w3":
        return
    stem = f"model.layers.{part.layer}.mlp.experts."
    shape = (model.experts, 2 * model.inner, model.hidden) if part.leaf == "w1" else (model.experts, *part.shape)
    yield Spec(part, "fused", (stem + ("gate_up_proj" if part.leaf == "w1" else "down_proj"),), FLOATS, shape)


def _block(model: Model, at: str, layer: int | None, kind: str, hashed: bool) -> Iterator[Part]:
    """One decoder layer (or, with ``layer`` None, the decoder layer inside a draft block)."""
    d, dim, draft = model.hidden, model.head, layer is None
    wide, ranks = model.heads * dim, model.groups * model.o_rank

    def part(key: str, family: str, shape: tuple[int, ...], plain: str = "BF16", linear: str = "") -> Part:
        return Part(at + key, "draft block" if draft else family, shape, plain, layer, None, linear, draft)

    yield part("attn_norm.weight", "norms", (d,))
    yield part("ffn_norm.weight", "norms", (d,))
    for half in ("attn", "ffn"):
        for hyper in _hyper(f"hc_{half}", (2 + model.streams) * model.streams, 3, model.streams * d):
            yield part(hyper.key, hyper.family, hyper.shape, "F32")
    yield part("attn.attn_sink", "sinks", (model.heads,), "F32")
    yield part("attn.q_norm.weight", "norms", (model.q_rank,))
    yield part("attn.kv_norm.weight", "norms", (dim,))
    for leaf, shape in (
        ("wq_a", (model.q_rank, d)),
        ("wq_b", (wide, model.q_rank)),
        ("wkv", (dim, d)),
        ("wo_a", (ranks, wide // model.groups)),
        ("wo_b", (d, ranks)),
    ):
        yield part(f"attn.{leaf}.weight", "attention", shape, linear="attention")
    ratio = 0 if layer is None else model.ratios[layer]
    if ratio:
        series = 2 if kind == SPARSE else 1  # sparse attention pools two overlapping series
        for key, shape, plain in _pooling("attn.compressor.", series * dim, dim, ratio, d):
            yield part(key, "compressor", shape, plain)
    if kind == SPARSE:
        rows = model.index_heads * model.index_head
        yield part("attn.indexer.wq_b.weight", "indexer", (rows, model.q_rank), linear="indexer query")
        yield part("attn.indexer.weights_proj.weight", "indexer", (model.index_heads, d))
        inner = _pooling("attn.indexer.compressor.", 2 * model.index_head, model.index_head, ratio, d)
        for key, shape, plain in inner:
            yield part(key, "indexer", shape, plain)
    yield part("ffn.gate.weight", "router", (model.experts, d))
    if hashed:
        yield part("ffn.gate.tid2eid", "router", (model.vocab, model.top_k), "I64")
    else:
        yield part("ffn.gate.bias", "router", (model.experts,), "F32")
    for leaf, shape in _mlp(model):
        yield part(f"ffn.shared_experts.{leaf}.weight", "shared expert", shape, linear="shared expert")
    family = "draft block" if draft else "routed experts"
    for expert in range(model.experts):
        for leaf, shape in _mlp(model):
            key = f"{at}ffn.experts.{expert}.{leaf}.weight"
            yield Part(key, family, shape, "BF16", layer, expert, "routed experts", draft)


def _draft(model: Model, at: str) -> Iterator[Part]:
    yield from _block(model, at, None, SLIDING, False)
    d = model.hidden
    for leaf in ("e_proj", "h_proj"):
        yield Part(f"{at}{leaf}.weight", "draft block", (d, d), linear="attention", draft=True)
    for leaf in ("enorm", "hnorm", "norm"):
        yield Part(f"{at}{leaf}.weight", "draft block", (d,), draft=True)
    for hyper in _hyper(f"{at}hc_head", model.streams, 1, model.streams * d):
        yield Part(hyper.key, "draft block", hyper.shape, "F32", draft=True)


def _mlp(model: Model) -> tuple[tuple[str, tuple[int, int]], ...]:
    d, f = model.hidden, model.inner
    return ("w1", (f, d)), ("w3", (f, d)), ("w2", (d, f))


def _hyper(stem: str, rows: int, scales: int, channels: int) -> Iterator[Part]:
    for leaf, shape in (("fn", (rows, channels)), ("base", (rows,)), ("scale", (scales,))):
        yield Part(f"{stem}_{leaf}", "hyper-connections", shape, "F32")


def _pooling(at: str, wide: int, dim: int, rate: int, d: int) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return (
        (f"{at}wkv.weight", (wide, d), "BF16"),
        (f"{at}wgate.weight", (wide, d), "BF16"),
        (f"{at}ape", (rate, wide), "F32"),
        (f"{at}norm.weight", (dim,), "BF16"),
    )
