"""Mistakes in reading NVFP4 weights: the stage is computed with weights decoded in a wrong way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from reference import nvfp4
from reference.hypotheses.base import Scene, Tensors, Variant, hypothesis
from reference.manifest import Entry

LINEARS = "q_a q_b kv o_a o_b experts shared_expert"
Parts = Mapping[str, Tensor]


def _read(scene: Scene, decode: Callable[[Parts], Tensor]) -> Iterator[Variant | Tensors]:
    """The stage with every NVFP4 weight decoded by ``decode`` (which may refuse with ValueError)."""
    checkpoint = scene.stage.inner.net.checkpoint

    def value(entry: Entry) -> Tensor:
        return decode(checkpoint.parts(entry))

    params: dict[str, Tensor] = {}
    for leaf, group in checkpoint.leaves(scene.stage.name).items():
        if checkpoint.storage[group[0].name].form == "nvfp4":
            try:
                found = [value(entry).reshape(group[0].shape) for entry in group]
            except (ValueError, RuntimeError):
                return  # no such reading of these shapes
            params[leaf] = found[0] if group[0].expert is None else torch.stack(found)
    if params:
        yield scene.again(params)


def _blocks(codes: Tensor, parts: Parts) -> Tensor:
    """Values ``[N, K]`` of codes under the right scales."""
    steps = parts["scale"].double() * parts["scale_2"].double()  # [N, K/16]
    return (codes.view(*steps.shape, nvfp4.BLOCK) * steps.unsqueeze(-1)).flatten(-2)


def _codes(packed: Tensor) -> Tensor:
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).to(torch.float64)


def _right(parts: Parts) -> Tensor:
    return nvfp4.decode(parts["weight"], parts["scale"], parts["scale_2"])


def _with_scale(change: Callable[[Tensor], Tensor]) -> Callable[[Parts], Tensor]:
    def decode(parts: Parts) -> Tensor:
        scale = parts["scale"]
        moved = change(scale.view(torch.uint8)).contiguous().view(scale.dtype).view(scale.shape)
        return nvfp4.decode(parts["weight"], moved, parts["scale_2"])

    return decode


@hypothesis("nvfp4-ws2-dropped", LINEARS, "weight_scale_2 is not applied to an NVFP4 weight")
def ws2_dropped(scene: Scene) -> Iterator[Variant | Tensors]:
    yield from _read(scene, lambda p: nvfp4.decode(p["weight"], p["scale"], torch.ones(())))


@hypothesis("nvfp4-global-scale-reciprocal", LINEARS, "an NVFP4 weight is divided by weight_scale_2")
def ws2_reciprocal(scene: Scene) -> Iterator[Variant | Tensors]:
    yield from _read(scene, lambda p: _right(p) / p["scale_2"].double() ** 2)


@hypothesis("nvfp4-input-scale-folded", LINEARS, "input_scale, which belongs to activations, is folded into the weight")
def input_scale_folded(scene: Scene) -> Iterator[Variant | Tensors]:
    yield from _read(scene, lambda p: _right(p) * _input_scale(p))
    yield from _read(scene, lambda p: _right(p) / _input_scale(p))


def _input_scale(parts: Parts) -> Tensor:
    if "input_scale" not in parts:
        raise ValueError("this checkpoint has no input_scale")
    return parts["input_scale"].double()


@hypothesis("fp4-viewed-as-integers", LINEARS, "the four-bit codes are read as integers, not as E2M1 values")
def integers(scene: Scene) -> Iterator[Variant | Tensors]:
    yield from _read(scene, lambda p: _blocks(_codes(p["weight"]), p))
    yield from _read(scene, lambda p: _blocks((_codes(p["weight"]) + 8) % 16 - 8, p))
    yield from _read(scene, lambda p: _blocks((c := _codes(p["weight"])) % 8 * torch.where(c < 8, 1.0, -1.0), p))


@hypothesis("fp4-nibble-order", LINEARS, "the two four-bit values of a byte are taken in the wrong order")
def nibbles(scene: Scene) -> Iterator[Variant | Tensors]:
    yield from _read(scene, lambda p: nvfp4.decode(p["weight"] >> 4 | p["weight"] << 4, p["scale"], p["scale_2"]))


@hypothesis("nvfp4-scales-transposed", LINEARS, "the block scales are read in transposed order")
def scales_transposed(scene: Scene) -> Iterator[Variant | Tensors]:
    yield from _read(scene, _with_scale(lambda s: s.T.reshape(s.shape)))
    yield from _read(scene, _with_scale(lambda s: s.reshape(s.shape[::-1]).T))


@hypothesis("nvfp4-scale-swizzle", LINEARS, "the block scales are read in (or out of) the 128 x 4 swizzle by mistake")
def swizzle(scene: Scene) -> Iterator[Variant | Tensors]:
    # A tile of 128 rows x 4 columns is stored as [32, 4 (row / 32), 4 (column)].
    def into(s: Tensor) -> Tensor:
        n, k = s.shape
        return s.reshape(n // 128, 4, 32, k // 4, 4).permute(0, 3, 2, 1, 4)

    def out_of(s: Tensor) -> Tensor:
        n, k = s.shape
        return s.reshape(n // 128, k // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)

    yield from _read(scene, _with_scale(into))
    yield from _read(scene, _with_scale(out_of))


@hypothesis("nvfp4-weights-not-permuted", LINEARS, "a weight is used in its stored order where another was expected")
def not_permuted(scene: Scene) -> Iterator[Variant | Tensors]:
    yield from _read(scene, lambda p: (w := _right(p)).T.reshape(w.shape))
    yield from _read(scene, lambda p: (w := _right(p)).reshape(w.shape[::-1]).T)
    # Bytes [N, K/2] taken for [K/2, N], under the right scales: the packed axis moves with them.
    yield from _read(scene, lambda p: _blocks(_values((w := p["weight"]).T.reshape(w.shape)), p))
    yield from _read(scene, lambda p: _blocks(_values((w := p["weight"]).reshape(w.shape[::-1]).T), p))
    if scene.stage.kind in ("experts", "shared_expert"):
        for interleave in (True, False):  # rows of gate and up, one after the other or stacked
            params = dict(scene.stage.params)
            gate, up = params["gate_proj.weight"], params["up_proj.weight"]
            if interleave:
                both = torch.stack((gate, up), dim=-2).flatten(-3, -2)
                gate, up = both.chunk(2, dim=-2)
            else:
                both = torch.cat((gate, up), dim=-2)
                gate, up = both[..., 0::2, :], both[..., 1::2, :]
            yield scene.again({"gate_proj.weight": gate.contiguous(), "up_proj.weight": up.contiguous()})


def _values(packed: Tensor) -> Tensor:
    table = torch.tensor(nvfp4.E2M1, dtype=torch.float64)
    return table[_codes(packed.contiguous()).long()]


@hypothesis("gate-up-halves-swapped", "experts shared_expert", "gate and up are exchanged")
def halves(scene: Scene) -> Iterator[Variant | Tensors]:
    params = scene.stage.params
    gate, up = params["gate_proj.weight"], params["up_proj.weight"]
    yield scene.again({"gate_proj.weight": up.clone(), "up_proj.weight": gate.clone()})


@hypothesis(
    "experts-stacked-in-wrong-order", "experts", "the experts' weights are stacked in another order than their ids"
)
def stacked(scene: Scene) -> Iterator[Variant | Tensors]:
    params, count = dict(scene.stage.params), scene.stage.params["gate_proj.weight"].shape[0]
    orders = [sorted(range(count), key=str), list(range(count))[::-1]]
    orders += [[(e + shift) % count for e in range(count)] for shift in (1, -1)]
    gate = scene.produced.get("gate")
    if gate is not None and gate.shape == scene.outputs["gate"].shape:
        orders.append(_nearest(scene, gate.double(), params["gate_proj.weight"]))
    for order in orders:
        if order != list(range(count)):
            yield scene.again({leaf: weight[order] for leaf, weight in params.items()})


def _nearest(scene: Scene, gate: Tensor, weight: Tensor) -> list[int]:
    """For each expert, whose gate projection its rows are closest to."""
    order = []
    for expert in range(weight.shape[0]):
        token = scene.inputs["picks"].long() == expert  # [B, S, k]
        rows = scene.inputs["x"].unsqueeze(2).expand(*token.shape, -1)[token]
        far = [float((rows @ other.T - gate[token]).square().sum()) for other in weight]
        order.append(min(range(len(far)), key=far.__getitem__) if len(rows) else expert)
    return order


ALL = (
    ws2_dropped,
    ws2_reciprocal,
    input_scale_folded,
    integers,
    nibbles,
    scales_transposed,
    swizzle,
    not_permuted,
    halves,
    stacked,
)
