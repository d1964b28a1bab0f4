"""Mistakes in the attention core, its sink, its mask and the linears around it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from reference.hypotheses.base import Scene, Tensors, Variant, hypothesis

PAGE = 128


def _attend(
    scene: Scene,
    *,
    visible: Tensor | None = None,
    sink: Tensor | None = None,
    phantoms: Tensor | int = 0,
    factor: float = 1.0,
    counted: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """The core with another mask ``[B, S, J]``, sink ``[H]`` (-inf: none), zero keys or logit factor; and its keys.

    ``phantoms``: how many keys of zeros each query sees, one number or ``[B, S]``; ``counted``: entropy sees them too.
    """
    i = scene.inputs
    keys = torch.cat([i["kv"], i["compressed"]], dim=1) if "compressed" in i else i["kv"]  # [B, J, D]
    seen = scene.outputs["visible"] if visible is None else visible
    sinks = scene.stage.params["sinks"] if sink is None else sink
    scale = float(str(scene.stage.config["scaling"])) * factor
    logits = torch.einsum("bshd,bjd->bshj", i["q"], keys) * scale
    logits = logits.masked_fill(~seen.bool().unsqueeze(2), float("-inf"))
    real = torch.logsumexp(logits, dim=-1)  # [B, S, H]
    number = torch.as_tensor(phantoms, dtype=torch.float64).expand(seen.shape[:2]).unsqueeze(-1)
    total = torch.logaddexp(real, number.log())  # the logit of a key of zeros is 0
    lse = torch.logaddexp(total, sinks.expand_as(total))
    out = torch.einsum("bshj,bjd->bshd", torch.exp(logits - lse.unsqueeze(-1)), keys)
    base = total if counted else real
    entropy = torch.special.entr(torch.exp(logits - base.unsqueeze(-1))).sum(-1)
    if counted:
        entropy = entropy + number * torch.special.entr(torch.exp(-total))
    found = {"out": out, "visible": seen, "lse": lse, "entropy": entropy, "sink_mass": torch.exp(sinks - lse)}
    return found, keys


def _plain(scene: Scene) -> bool:
    """Whether the keys are tokens, the call's own last, and then compressed entries."""
    return set(scene.inputs) <= {"q", "kv", "compressed", "picks", "positions", "lengths"}


@hypothesis(
    "sink-as-zero-key", "attn_core", "the sink is taken for a key of zeros: its logit is 0 in place of its value"
)
def zero_key(scene: Scene) -> Iterator[Variant | Tensors]:
    if _plain(scene):
        yield _attend(scene, sink=torch.zeros_like(scene.stage.params["sinks"]))[0]
        yield _attend(scene, phantoms=1)[0]


@hypothesis("sink-in-value-sum", "attn_core", "sink enters the value sum")
def value_sum(scene: Scene) -> Iterator[Variant | Tensors]:
    if not _plain(scene):
        return
    found, keys = _attend(scene)
    mass = found["sink_mass"].unsqueeze(-1)  # [B, S, H, 1]
    own = scene.inputs["kv"][:, -mass.shape[1] :].unsqueeze(2)  # [B, S, 1, D]; from a cache, more keys come first
    for value in (keys[:, None, :1], keys[:, None, -1:], own, torch.ones_like(own)):
        yield {"out": found["out"] + mass * value}
    yield {"out": found["out"] / (1 - mass)}  # renormalised once the sink's column is gone


@hypothesis("sink-dropped-on-one-path", "attn_core", "the sink is left out of the softmax")
def no_sink(scene: Scene) -> Iterator[Variant | Tensors]:
    if _plain(scene):
        yield _attend(scene, sink=torch.full_like(scene.stage.params["sinks"], float("-inf")))[0]


@hypothesis("sink-counted-twice-or-never", "attn_core", "the sink is counted twice")
def two_sinks(scene: Scene) -> Iterator[Variant | Tensors]:
    if _plain(scene):
        yield _attend(scene, sink=scene.stage.params["sinks"] + torch.tensor(2.0).double().log())[0]


@hypothesis("sink-tp-slice-wrong", "attn_core", "later heads use the sinks of the first ones")
def sink_slice(scene: Scene) -> Iterator[Variant | Tensors]:
    sinks = scene.stage.params["sinks"]
    if _plain(scene) and len(sinks) % 2 == 0:
        yield _attend(scene, sink=sinks[: len(sinks) // 2].repeat(2))[0]


@hypothesis(
    "kv-length-padded-to-128", "attn_core", "the keys are padded to a multiple of 128 and the padding is visible"
)
def padded(scene: Scene) -> Iterator[Variant | Tensors]:
    if not _plain(scene):
        return
    seen, tokens = scene.outputs["visible"].bool(), scene.inputs["kv"].shape[1]
    joined = seen.shape[-1]
    length = int(scene.inputs["lengths"].max())  # of the whole sequence, where the call continues one
    constant = {-count % PAGE for count in (tokens, joined, joined - tokens, length)} - {0}
    own = (-part.sum(-1) % PAGE for part in (seen, seen[..., :tokens]))  # each query's list of keys, filled up
    numbers: list[Tensor | int] = [*sorted(constant), *own]
    for extra in numbers:
        for counted in (False, True):
            yield _attend(scene, phantoms=extra, counted=counted)[0]


@hypothesis(
    "softmax-scale-mscale", "attn_core", "YaRN's amplitude, or its square, is multiplied into the softmax scale"
)
def mscale(scene: Scene) -> Iterator[Variant | Tensors]:
    ropes = cast(Mapping[str, Mapping[str, float]], scene.stage.config["rope_parameters"])
    factor = max(float(rope.get("factor") or 1.0) for rope in ropes.values())
    if _plain(scene) and factor > 1:
        amplitude = 1 + 0.1 * math.log(factor)
        yield _attend(scene, factor=amplitude)[0]
        yield _attend(scene, factor=amplitude**2)[0]


def _window(scene: Scene, width: int) -> Iterator[Variant | Tensors]:
    if not _plain(scene):
        return
    seen, tokens = scene.outputs["visible"].bool().clone(), scene.inputs["kv"].shape[1]
    at = scene.inputs["positions"]
    earlier = torch.arange(at.shape[1] - tokens, 0) + at[:, :1]  # of keys from a cache, [B, L - S]
    back = at.unsqueeze(2) - torch.cat([earlier, at], dim=1).unsqueeze(1)  # [B, S, L]
    seen[..., :tokens] = (back >= 0) & (back < width)
    yield _attend(scene, visible=seen)[0]


@hypothesis("window-off-by-one", "attn_core", "the sliding window is one key too wide or too narrow")
def window_edge(scene: Scene) -> Iterator[Variant | Tensors]:
    width = int(str(scene.stage.config["sliding_window"]))
    yield from _window(scene, width + 1)
    yield from _window(scene, width - 1)


@hypothesis("window-not-applied", "attn_core", "the sliding window is not applied")
def no_window(scene: Scene) -> Iterator[Variant | Tensors]:
    yield from _window(scene, 1 << 60)


@hypothesis("compressed-branch-masked-off", "attn_core", "no compressed entry is visible")
def no_entries(scene: Scene) -> Iterator[Variant | Tensors]:
    if _plain(scene) and "compressed" in scene.inputs:
        seen = scene.outputs["visible"].bool().clone()
        seen[..., scene.inputs["kv"].shape[1] :] = False
        yield _attend(scene, visible=seen)[0]


@hypothesis("q-b-norm-missing", "q_b_norm", "the norm over each head's query is skipped")
def no_norm(scene: Scene) -> Iterator[Variant | Tensors]:
    yield {"q": scene.inputs["q"]}


@hypothesis("o-a-projection-missing", "o_a", "the grouped output projection is skipped: its input is cut to the rank")
def no_o_a(scene: Scene) -> Iterator[Variant | Tensors]:
    right = scene.outputs["o_a"]  # [B, S, G, OL]
    grouped = scene.inputs["out"].reshape(*right.shape[:3], -1)  # [B, S, G, H / G * D]
    rank = right.shape[-1]
    if grouped.shape[-1] < rank:
        return
    yield {"o_a": grouped[..., :rank]}
    yield {"o_a": grouped[..., -rank:]}
    yield {"o_a": grouped.flatten(2)[..., : right[0, 0].numel()].reshape(right.shape)}
    if grouped.shape[-1] % rank == 0:
        yield {"o_a": grouped.reshape(*right.shape[:3], -1, rank).mean(-2)}
        yield {"o_a": grouped.reshape(*right.shape[:3], -1, rank).sum(-2)}
        yield {"o_a": grouped.reshape(*right.shape[:3], rank, -1).mean(-1)}


ALL = (
    zero_key,
    value_sum,
    no_sink,
    two_sinks,
    sink_slice,
    padded,
    mscale,
    window_edge,
    no_window,
    no_entries,
    no_norm,
    no_o_a,
)
