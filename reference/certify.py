"""Certification: that the reference of a run is the unmodified Hugging Face model, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from harness.types import Check, UsageError, one_line
from reference import hf, pristine
from reference.capture import Capture, capture, forward
from reference.net import Net
from reference.stages.attention import check_lengths

#: outputs that the model never holds in a tensor that a hook can see
UNSEEN = {
    "attn_hc": ("pre",),
    "ffn_hc": ("pre",),
    "hc_head": ("pre",),
    "attn_core": ("lse", "entropy", "sink_mass"),
    "experts": ("gate", "up", "act", "down"),
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def certify(net: Net, case: Mapping[str, Tensor], wires: Mapping[str, Tensor]) -> Iterator[Check]:
    """Run the model twice, untapped and tapped, and compare what it computed with the composed ``wires``.

    ``case`` holds ``input_ids``, ``positions`` and ``lengths`` by bare name. Only the wires given are compared, and the
    model is run no further than the last layer among them. Each check has a detail in words when it fails. UsageError
    if the case is not complete.
    """
    missing = {"input_ids", "positions", "lengths"} - set(case)
    if missing:
        raise UsageError(
            f"case: expected input_ids, positions and lengths, came no {', '.join(sorted(missing))}; add it"
        )
    ids, positions = case["input_ids"], case["positions"]
    check_lengths(case["lengths"], ids.shape[1])
    yield settings(net)
    yield sources(net)
    run = net.cut(reach(net, wires))
    check_positions(run, positions)
    try:
        with ThreadPoolExecutor(1) as beside:  # the same code on the same tensors, one on each core
            untapped = beside.submit(forward, run, ids, positions)
            seen = capture(run.twin(run.depth), ids, positions)
            plain = untapped.result()
    except Exception as error:  # patched code may fail in any way
        yield Check("the model runs", False, f"its forward raised {one_line(error)}")
        return
    assert seen.logits is not None
    difference = first_difference(plain, seen.logits)
    yield Check("taps change nothing", difference is None, _said("logits", difference, "untapped", "tapped"))
    yield masks(seen)
    yield from compared(seen, wires)


def check_positions(net: Net, positions: Tensor) -> None:
    """UsageError unless every row counts from 0, where the model compresses.

    Without a cache its compressors place keys from position 0 whatever ``positions`` say: with an offset, queries would
    see compressed keys of their future, and the reference itself would be wrong.
    """
    compresses = any(net.layer(n).self_attn.compressor is not None for n in range(net.depth))
    expected = torch.arange(positions.shape[1], device=positions.device)
    if compresses and not bool((positions == expected).all()):
        last, first = positions.shape[1] - 1, positions[:, 0].tolist()
        raise UsageError(
            f"case.positions: expected 0..{last} in every row, came rows that begin at {first} or leave gaps; let them "
            "count from 0, for the reference runs without a cache"
        )


def settings(net: Net) -> Check:
    """Eager attention, eager experts, eval mode, no cache."""
    config = net.model.config
    wrong = []
    for name in ("_attn_implementation", "_experts_implementation"):
        value = getattr(config, name)
        if value != hf.EAGER:
            wrong.append(f"{name.strip('_')} is {value!r}")
    if net.model.training:
        wrong.append("the model is in training mode")
    return Check("eager settings", not wrong, "; ".join(wrong))


def sources(net: Net) -> Check:
    """The code that runs is the code that was installed."""
    found = list(pristine.changes(net.model))
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return Check("unmodified Hugging Face code", not found, "; ".join(found[:3]) + more)


def masks(seen: Capture) -> Check:
    """Attention got a mask in every layer, and no query sees a later token through it."""
    for layer, mask in sorted(seen.masks.items()):
        if mask is None:
            return Check("masks", False, f"layers.{layer}: attention was called without a mask: it is not causal")
        length = seen.past + mask.shape[-2]
        later = (mask[..., :length] == 0).triu(1 + seen.past).nonzero()
        if len(later):
            row, _, query, key = later[0].tolist()
            return Check("masks", False, f"layers.{layer}: row {row}: query {query} sees key {key}")
    return Check("masks", bool(seen.masks), "" if seen.masks else "no attention was seen")


def compared(seen: Capture, wires: Mapping[str, Tensor]) -> Iterator[Check]:
    """Composed wires against captured ones: a check for the model scope, then two for each layer.

    A layer's output has its own check: equal streams behind unequal inner wires mean another thing than the reverse.
    """
    groups: dict[int | None, dict[str, Tensor]] = {}
    for wire, value in wires.items():
        if not wire.startswith("case.") and not _unseen(wire):
            groups.setdefault(_layer(wire), {})[wire] = value
    if not groups:
        yield Check("wires", False, "nothing to compare: no composed wire can be captured")
    for layer in sorted(groups, key=lambda n: -1 if n is None else n):
        group = groups[layer]
        if layer is None:
            yield _group("wires: model scope", group, seen)
            continue
        closing = f"layers.{layer}.ffn_mix.streams"
        inner = {wire: value for wire, value in group.items() if wire != closing}
        if inner:
            yield _group(f"wires: layers.{layer}", inner, seen)
        if closing in group:
            yield _group(f"output: layers.{layer}", {closing: group[closing]}, seen)


def _group(name: str, group: Mapping[str, Tensor], seen: Capture) -> Check:
    for wire, composed in group.items():
        own = seen.wires.get(wire)
        if own is None and composed.numel() == 0:
            continue  # no compressed entry yet: the module had nothing to call
        if own is None:
            return Check(name, False, f"{wire}: the model has no such tensor")
        difference = first_difference(composed, own)
        if difference is not None:
            return Check(name, False, _said(wire, difference, "composed", "Hugging Face"))
    return Check(name, True)


def first_difference(ours: Tensor, theirs: Tensor) -> str | None:
    """Where two tensors first differ in a bit, as ``[index]: a, b``; None if they are equal."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{_sort(ours)}, {_sort(theirs)}"
    bits = _BITS[ours.element_size()]
    unequal = (ours.view(bits) != theirs.view(bits)).nonzero()
    if not len(unequal):
        return None
    where = tuple(unequal[0].tolist())
    return f"{list(where)}: {ours[where].item()!r}, {theirs[where].item()!r} ({len(unequal)} differ)"


def _said(wire: str, difference: str | None, first: str, second: str) -> str:
    return "" if difference is None else f"{wire}: {first} and {second} differ at {difference}"


def _sort(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _layer(wire: str) -> int | None:
    parts = wire.split(".")
    return int(parts[1]) if parts[0] == "layers" else None


def reach(net: Net, wires: Iterable[str]) -> int:
    """How many layers it takes to compute every wire: all of them for the head."""
    if any(wire.partition(".")[0] in {"hc_head", "final_norm", "lm_head"} for wire in wires):
        return net.depth
    return max((layer + 1 for wire in wires if (layer := _layer(wire)) is not None), default=1)


def _unseen(wire: str) -> bool:
    stage, _, output = wire.rpartition(".")
    return output in UNSEEN.get(stage.rpartition(".")[2], ())
