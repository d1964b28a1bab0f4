"""Faults of quantised weights: packing, scales, layouts; of linears, of the routed experts and of the shared expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cases.faults.catalogue import HISTORY, bf16, fault, swapped
from production import nvfp4

LINEAR, O_A, EXPERTS, SHARED = "layers.2.q_a", "layers.2.o_a", "layers.2.experts", "layers.2.shared_expert"


def _params(stage: Any, inputs: dict[str, Tensor], leaf: str, change: Any) -> dict[str, Tensor]:
    """Run with every parameter of that last name changed."""
    params = {n: change(t) for n, t in stage.params.items() if n.rpartition(".")[2] == leaf}
    return stage.run(params=params, **inputs)  # type: ignore[no-any-return]


def _transposed(t: Tensor) -> Tensor:
    return t.view(torch.uint8).mT.reshape(t.shape).contiguous().view(t.dtype)


@fault("nvfp4-weights-not-permuted", LINEAR, "the packed weight is read as (K, N): N and K were not exchanged", HISTORY)
def not_permuted(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _params(stage, inputs, "weight", _transposed)


@fault("nvfp4-scales-transposed", LINEAR, "the block scales are read as (K/16, N)", HISTORY)
def scales_transposed(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _params(stage, inputs, "weight_scale", _transposed)


def _no_ws2(stage: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return _params(stage, inputs, "weight_scale_2", torch.ones_like)


@fault("nvfp4-ws2-dropped", LINEAR, "weight_scale_2 is not applied", HISTORY)
def ws2_linear(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _no_ws2(stage, inputs)


@fault("nvfp4-ws2-dropped-in-experts", EXPERTS, "weight_scale_2 is not applied", HISTORY, cause_id="nvfp4-ws2-dropped")
def ws2_experts(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _no_ws2(stage, inputs)


@fault(
    "nvfp4-ws2-dropped-in-shared-expert",
    SHARED,
    "weight_scale_2 is not applied",
    HISTORY,
    cause_id="nvfp4-ws2-dropped",
)
def ws2_shared(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _no_ws2(stage, inputs)


@fault("nvfp4-input-scale-folded", LINEAR, "input_scale is folded into a product of 16-bit activations", HISTORY)
def input_scale(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _params(stage, inputs, "weight_scale_2", lambda t: t * stage.params["input_scale"])


@fault("fp4-viewed-as-integers", LINEAR, "the 4-bit codes are read as integers 0 to 15", HISTORY)
def integers(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    with swapped(nvfp4, unpack=lambda w: torch.stack((w & 15, w >> 4), -1).flatten(-2).float()):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault("experts-stacked-in-wrong-order", EXPERTS, "experts are stacked in the order of the shards, not by id", HISTORY)
def stacked(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    params = {
        n: t.view(torch.uint8)[order].view(t.dtype) if t.element_size() == 1 else t[order]
        for n, t in stage.params.items()
    }
    return stage.run(params=params, **inputs)  # type: ignore[no-any-return]


@fault("o-a-projection-missing", O_A, "the grouped projection is skipped: its input's first channels go on", HISTORY)
def no_projection(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    like = stage.run(**inputs)["o_a"]
    groups = inputs["out"].flatten(2).unflatten(2, (like.shape[2], -1))
    return {"o_a": groups[..., : like.shape[3]].contiguous()}


@fault("o-a-groups-exchanged", O_A, "group g is projected by the weight of the next group")
def groups(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(out=inputs["out"].roll(inputs["out"].shape[2] // 2, 2))  # type: ignore[no-any-return]


@fault(
    "nvfp4-global-scale-reciprocal",
    LINEAR,
    "weight_scale_2 divides instead of multiplying",
    "https://github.com/modular/modular/issues/6600",
)
def reciprocal(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _params(stage, inputs, "weight_scale_2", torch.reciprocal)


@fault("nvfp4-ws2-in-bf16", LINEAR, "weight_scale_2 is rounded to bf16")
def ws2_bf16(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _params(stage, inputs, "weight_scale_2", bf16)


@fault("nvfp4-ws2-rounded-in-experts", EXPERTS, "weight_scale_2 is rounded to bf16", cause_id="nvfp4-ws2-in-bf16")
def ws2_bf16_experts(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _params(stage, inputs, "weight_scale_2", bf16)


@fault(
    "nvfp4-scale-from-other-expert",
    EXPERTS,
    "expert e uses weight_scale_2 of expert e - 1",
    "https://github.com/flashinfer-ai/flashinfer/issues/3103",
)
def other_expert(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _params(stage, inputs, "weight_scale_2", lambda t: t.roll(1))


@fault(
    "nvfp4-scale-maximum-over-experts",
    EXPERTS,
    "every expert uses the largest weight_scale_2",
    "https://github.com/NVIDIA/Model-Optimizer/pull/2276",
)
def maximum(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _params(stage, inputs, "weight_scale_2", lambda t: t.amax().expand_as(t).clone())


@fault("fp4-nibble-order", LINEAR, "the high nibble is the even channel", "https://github.com/kekzl/imp/pull/567")
def nibbles(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _params(stage, inputs, "weight", lambda t: (t << 4) | (t >> 4))


@fault("fp4-nibble-order-in-experts", EXPERTS, "the high nibble is the even channel",
       "https://github.com/Comfy-Org/comfy-kitchen/pull/41", cause_id="fp4-nibble-order")  # fmt: skip
def nibbles_experts(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _params(stage, inputs, "weight", lambda t: (t << 4) | (t >> 4))


@fault("fp4-split-halves", LINEAR, "low nibbles hold the first half of the channels, high ones the second",
       "https://github.com/kekzl/imp/pull/567")  # fmt: skip
def halves(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    real = nvfp4.unpack

    def split(w: Tensor) -> Tensor:
        return real(w).unflatten(-1, (-1, 2)).mT.flatten(-2).contiguous()

    with swapped(nvfp4, unpack=split):
        return stage.run(**inputs)  # type: ignore[no-any-return]


def _codes(stage: Any, inputs: dict[str, Tensor], change: Any) -> dict[str, Tensor]:
    """Run with the unsigned 4-bit codes (..., K) read by another rule."""

    def unpack(w: Tensor) -> Tensor:
        return change(torch.stack((w & 15, w >> 4), -1).flatten(-2).int())  # type: ignore[no-any-return]

    with swapped(nvfp4, unpack=unpack):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault("fp4-twos-complement", LINEAR, "the codes are read as two's complement integers",
       "https://github.com/1bit-MONSTER/1bit-MONSTER/pull/572")  # fmt: skip
def complement(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _codes(stage, inputs, lambda c: torch.where(c > 7, c - 16, c).float())


@fault(
    "packed-integer-decode-errors",
    LINEAR,
    "a negative low nibble borrows from its neighbour: the code above it is one too small",
    "https://github.com/gittensor-ai-lab/sparkinfer/pull/761",
)
def borrow(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _params(stage, inputs, "weight", lambda t: torch.where((t & 8 > 0) & (t >> 4 > 0), t - 16, t))


@fault("nvfp4-scales-shifted-by-one-block", LINEAR, "block b uses the scale of block b - 1")
def shifted(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _params(stage, inputs, "weight_scale", lambda t: t.view(torch.uint8).roll(1, -1).view(t.dtype))


@fault(
    "nvfp4-scale-swizzle",
    EXPERTS,
    "the scales are left in tiles of 128 x 4",
    "https://github.com/vllm-project/vllm/pull/23140",
)
def swizzle(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def tiles(t: Tensor) -> Tensor:
        n, k = t.shape[-2:]
        bits = t.view(torch.uint8).reshape(-1, n // 128, 4, 32, k // 4, 4)
        return bits.permute(0, 1, 4, 3, 2, 5).reshape(t.shape).contiguous().view(t.dtype)

    return _params(stage, inputs, "weight_scale", tiles)


def _scales(stage: Any, inputs: dict[str, Tensor], values: Tensor) -> dict[str, Tensor]:
    with swapped(nvfp4, _scale_values=lambda device: values):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault(
    "scale-dtype-confusion-e8m0",
    LINEAR,
    "E4M3 scales are read as E8M0",
    "https://github.com/Avarok-Cybersecurity/atlas/pull/293",
    cause_id="scale-dtype-confusion",
)
def as_e8m0(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _scales(stage, inputs, torch.exp2(torch.arange(256.0) - 127))


@fault(
    "scale-dtype-confusion-raw-byte",
    LINEAR,
    "E4M3 scales are read as numbers 0 to 255",
    "https://github.com/vllm-project/vllm/pull/51946",
    cause_id="scale-dtype-confusion",
)
def as_byte(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _scales(stage, inputs, torch.arange(256.0))


@fault("nvfp4-scale-per-32-values", LINEAR, "one scale for 32 values, as in MXFP4: the odd ones are not read")
def wide_blocks(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _params(
        stage,
        inputs,
        "weight_scale",
        lambda t: t.view(torch.uint8)[..., ::2].repeat_interleave(2, -1).contiguous().view(t.dtype),
    )


@fault("gemm-last-k-tile-dropped", LINEAR, "the last 16 channels are not summed")
def short_k(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    x = inputs["x"].clone()
    x[..., -16:] = 0
    return stage.run(x=x)  # type: ignore[no-any-return]


@fault("gemm-accumulates-in-bf16", LINEAR, "partial sums of 16 channels are kept in bf16")
def bf16_sum(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    total = None
    for start in range(0, inputs["x"].shape[-1], 16):
        part = torch.zeros_like(inputs["x"])
        part[..., start : start + 16] = inputs["x"][..., start : start + 16]
        made = stage.run(x=part)["q_a"]
        total = made if total is None else total + made
    return {"q_a": total}  # type: ignore[dict-item]
