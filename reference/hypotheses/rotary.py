"""Mistakes in the rope tables and the rotations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from reference.hypotheses.base import Scene, Tensors, Variant, hypothesis
from reference.rope import one

ROTATIONS = "q_rope kv_rope attn_unrope"
POOLS = "compressor indexer"


def _tables(scene: Scene, change: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Tables of the ropes in ``change``, with some of their parameters replaced."""
    c, positions = scene.stage.config, scene.inputs["positions"]
    found: dict[str, Tensor] = {}
    for rope, parameters in change.items():
        now = cast(Mapping[str, Mapping[str, Any]], c["rope_parameters"])[rope]
        angle = positions.double().unsqueeze(-1) * one(int(str(c["qk_rope_head_dim"])), {**now, **parameters})
        found |= {f"{rope}_cos": angle.cos(), f"{rope}_sin": angle.sin()}
    return found


def _ropes(scene: Scene) -> Mapping[str, Mapping[str, Any]]:
    return cast(Mapping[str, Mapping[str, Any]], scene.stage.config["rope_parameters"])


@hypothesis("rope-plain-instead-of-yarn", "rope_cache", "plain rope frequencies where the config asks for YaRN")
def plain(scene: Scene) -> Iterator[Variant | Tensors]:
    yarn = [name for name, rope in _ropes(scene).items() if rope["rope_type"] == "yarn"]
    if yarn:
        yield _tables(scene, {name: {"rope_type": "default"} for name in yarn})


@hypothesis("yarn-on-sliding-layers", "rope_cache", "YaRN is applied to the rope of the sliding layers too")
def yarn_everywhere(scene: Scene) -> Iterator[Variant | Tensors]:
    ropes = _ropes(scene)
    if "main" in ropes and "compress" in ropes:
        theta = {"rope_theta": ropes["main"]["rope_theta"]}
        yield _tables(scene, {"main": {**ropes["compress"], **theta}})


@hypothesis(
    "rope-one-theta-for-all-layers", f"rope_cache {ROTATIONS} {POOLS}", "one rope base (or table) serves all layers"
)
def one_theta(scene: Scene) -> Iterator[Variant | Tensors]:
    i = scene.inputs
    if scene.stage.kind == "rope_cache":
        theta = {name: rope["rope_theta"] for name, rope in _ropes(scene).items()}
        yield _tables(scene, {"compress": {"rope_theta": theta["main"]}})
        yield _tables(scene, {"main": {"rope_theta": theta["compress"]}})
        return
    if scene.stage.kind in POOLS.split():
        yield _turned(scene, queries=True, rope="main")
        yield _turned(scene, rope="main")
        return
    pairs = {f"{a}_{part}": i[f"{b}_{part}"] for a, b in (("main", "compress"), ("compress", "main")) for part in PARTS}
    yield scene.again(None, **pairs)


PARTS = ("cos", "sin")


class _Table(torch.nn.Module):
    """A module's table with the positions of its keys (and, if asked, of its queries) or the rope changed."""

    def __init__(self, inner: torch.nn.Module, query: Tensor, queries: bool, rope: str | None, step: int | None):
        super().__init__()
        self.inner, self.query, self.queries, self.rope, self.step = inner, query, queries, rope, step

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> Any:
        if self.queries or not torch.equal(position_ids, self.query):  # a key's position is never its query's
            layer_type = self.rope or layer_type
            if self.step is not None:
                position_ids = position_ids // self.step if self.step else torch.zeros_like(position_ids)
        return self.inner(x, position_ids=position_ids, layer_type=layer_type)


def _turned(scene: Scene, *, queries: bool = False, rope: str | None = None, step: int | None = None) -> Tensors:
    """A compressor or indexer whose own table is changed: another rope, or positions over ``step`` (0: all zero)."""
    children = cast(Any, scene.stage.inner).module._modules
    right = children["rotary_emb"]
    children["rotary_emb"] = _Table(right, scene.inputs["positions"].long(), queries, rope, step)
    try:
        return scene.stage.evaluate(scene.inputs, None, scene.given)
    finally:
        children["rotary_emb"] = right


@hypothesis("compressed-rope-missing", POOLS, "compressed entries are not rotated")
def unturned(scene: Scene) -> Iterator[Variant | Tensors]:
    yield _turned(scene, step=0)
    yield _turned(scene, queries=True, step=0)


@hypothesis("compressed-rope-at-pool-index", POOLS, "an entry is rotated by its index, not by its window's position")
def pool_index(scene: Scene) -> Iterator[Variant | Tensors]:
    yield _turned(scene, step=int(cast(Any, scene.stage.inner).module.compress_rate))


@hypothesis("yarn-amplitude-on-cos-sin", "rope_cache", "YaRN's amplitude is multiplied into cosines and sines")
def amplitude(scene: Scene) -> Iterator[Variant | Tensors]:
    factor = float(_ropes(scene)["compress"].get("factor", 1.0))
    size = 1 + 0.1 * float(torch.tensor(factor).log())
    yield {name: t * size for name, t in scene.outputs.items() if name.startswith("compress")}


@hypothesis("inverse-rope-missing", "attn_unrope", "the output is not rotated back")
def not_back(scene: Scene) -> Iterator[Variant | Tensors]:
    yield {"out": scene.inputs["out"]}


@hypothesis("rope-applied-twice", ROTATIONS, "the rotation is applied twice")
def twice(scene: Scene) -> Iterator[Variant | Tensors]:
    name = next(iter(scene.outputs))
    yield scene.again(None, **{name: scene.outputs[name]})


@hypothesis("rope-half-split-pairing", ROTATIONS, "channels i and i + R/2 are paired in place of 2i and 2i + 1")
def halves(scene: Scene) -> Iterator[Variant | Tensors]:
    name, width = next(iter(scene.outputs)), int(str(scene.stage.config["qk_rope_head_dim"]))
    order = torch.arange(width).reshape(2, -1).T.flatten()  # 0, R/2, 1, R/2 + 1 ...
    x = scene.inputs[name].clone()
    x[..., -width:] = x[..., -width:][..., order]
    turned = scene.again(None, **{name: x}).outputs[name].clone()
    turned[..., -width:] = turned[..., -width:][..., torch.argsort(order)]
    yield {name: turned}


ALL = (plain, yarn_everywhere, one_theta, amplitude, not_back, twice, halves, unturned, pool_index)
