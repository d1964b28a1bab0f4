"""Faults of the attention core: masks, window, scale, softmax, storage."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cases.faults.catalogue import HISTORY, Scenario, configured, fault, swapped
from production import attention

CSA, HCA, SLIDING = (f"layers.{n}.attn_core" for n in (2, 3, 0))
attend, attend_block, visible_keys = attention.attend, attention.attend_block, attention.visible_keys


def _swap(stage: Any, inputs: dict[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    with swapped(attention, **attributes):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault("kv-length-padded-to-128", CSA, "the padded key length bounds the mask: zero keys take part", HISTORY)
def padded(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def wide(q: Tensor, keys: Tensor, visible: Tensor, sinks: Tensor, **sizes: Any) -> Any:
        extra = visible.new_ones(*visible.shape[:2], sizes["padded_len"] - sizes["logical_len"])
        return attend(q, keys, torch.cat((visible, extra), -1), sinks, **(sizes | {"logical_len": sizes["padded_len"]}))

    return _swap(stage, inputs, attend=wide)


def _scaled(factor: float, stage: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return _swap(stage, inputs, attend_block=lambda q, *rest: attend_block(q.float() * factor, *rest))


@fault(
    "softmax-scale-mscale",
    CSA,
    "YaRN's mscale multiplies the softmax scale",
    "https://github.com/AMD-AGI/Primus/pull/930",
)
def mscale(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _scaled(0.1 * math.log(16) + 1, stage, inputs)


@fault(
    "softmax-scale-mscale-squared",
    CSA,
    "YaRN's mscale, squared, multiplies the softmax scale",
    "https://github.com/NVIDIA/Megatron-LM/issues/1429",
)
def mscale_squared(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _scaled((0.1 * math.log(16) + 1) ** 2, stage, inputs)


@fault("softmax-scale-of-rope-less-head", CSA, "the scale is 1/sqrt(448): the rope channels are not counted")
def narrow_scale(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _scaled(math.sqrt(512 / 448), stage, inputs)


@fault(
    "softmax-or-P-in-bf16",
    SLIDING,
    "the logits are rounded to bf16 before the softmax",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/2201",
)
def bf16_softmax(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    real = torch.matmul

    class Rounded:
        """``torch`` as the core sees it, but for a product of queries and keys."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def matmul(a: Tensor, b: Tensor) -> Tensor:
            product = real(a, b)
            return product.bfloat16().float() if a.shape[-1] == 512 else product

    return _swap(stage, inputs, torch=Rounded())


def _window(change: int, stage: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return configured(stage, inputs, sliding_window=stage.config["sliding_window"] + change)


@fault(
    "window-plus-one",
    SLIDING,
    "a key at distance W is visible",
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/2656",
    scenario=Scenario("window_plus"),
)
def wider(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _window(1, stage, inputs)


@fault(
    "window-minus-one",
    SLIDING,
    "the key at distance W - 1 is not visible",
    "https://github.com/zml/zml/pull/763",
    scenario=Scenario("window"),
)
def narrower(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _window(-1, stage, inputs)


@fault("window-not-applied", SLIDING, "attention over the whole past", "https://github.com/onnxruntime/mobius/pull/596")
def unbounded(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _window(1 << 20, stage, inputs)


@fault(
    "prefill-branch-not-causal",
    SLIDING,
    "no causal mask when a call has more than one query",
    "https://github.com/lablup/mlxcel/pull/998",
)
def not_causal(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, visible_keys=lambda *a, **k: visible_keys(*a, **k).fill_(True))


@fault(
    "compressed-entry-visible-too-early",
    HCA,
    "a query sees the entry of its own unfinished window",
    "https://github.com/vllm-project/tpu-inference/issues/3536",
)
def too_early(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def ready(positions: Tensor, rate: int, entries: int) -> Tensor:
        return torch.arange(entries) < (positions // rate + 1).unsqueeze(-1)

    return _swap(stage, inputs, ready_entries=ready)


@fault("compressed-entry-visible-too-late", HCA, "an entry is visible one token after its window has closed")
def too_late(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def ready(positions: Tensor, rate: int, entries: int) -> Tensor:
        return torch.arange(entries) < (positions // rate).unsqueeze(-1)

    return _swap(stage, inputs, ready_entries=ready)


@fault(
    "compressed-mask-missing-in-prefill",
    HCA,
    "the mask is padded with 'visible' over the compressed entries",
    "https://github.com/huggingface/transformers/issues/45820",
)
def unmasked(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def ready(positions: Tensor, rate: int, entries: int) -> Tensor:
        return torch.ones(*positions.shape, entries, dtype=torch.bool)

    return _swap(stage, inputs, ready_entries=ready)


@fault(
    "compressed-branch-masked-off",
    HCA,
    "the mask is extended with 'hidden' over the compressed entries",
    "https://github.com/ml-explore/mlx-lm/pull/1189",
)
def masked_off(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def ready(positions: Tensor, rate: int, entries: int) -> Tensor:
        return torch.zeros(*positions.shape, entries, dtype=torch.bool)

    return _swap(stage, inputs, ready_entries=ready)


@fault("csa-picks-not-used", CSA, "every complete entry is visible, whatever the indexer chose")
def picks_unused(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, visible_keys=lambda *a, **k: visible_keys(*a, **(k | {"picks": None})))


@fault(
    "length-only-mask-on-holey-slots",
    CSA,
    "an absent pick (-1) reads entry 0",
    "https://github.com/hw-native-sys/pypto-lib/pull/1014",
)
def holes(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(**(inputs | {"picks": inputs["picks"].clamp(min=0)}))  # type: ignore[no-any-return]


@fault("picks-off-by-one-entry", CSA, "picks count from one")
def one_based(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    picks = inputs["picks"]
    return stage.run(**(inputs | {"picks": torch.where(picks > 0, picks - 1, picks)}))  # type: ignore[no-any-return]


@fault(
    "lse-in-base-2", CSA, "the log-sum-exp is returned in base 2", "https://github.com/sgl-project/sglang/pull/35045"
)
def base_two(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    return {**made, "lse": made["lse"] / math.log(2)}


@fault(
    "lse-base-mismatch-in-merge",
    CSA,
    "two key splits are merged with e to the power of a base-2 log-sum-exp",
    "https://github.com/sgl-project/sglang/pull/35045",
)
def merged(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def split(q: Tensor, values: Tensor, mask: Tensor, sinks: Tensor, detail: bool) -> Any:
        whole = attend_block(q, values, mask, sinks, True)
        first = torch.zeros_like(mask)
        first[..., : mask.shape[-1] // 2] = True
        none = torch.full_like(sinks, -1e30)
        a = attend_block(q, values, mask & first, sinks, True)
        b = attend_block(q, values, mask & ~first, none, True)
        weight = torch.softmax(torch.stack((a.lse, b.lse)) / math.log(2), 0).unsqueeze(-1)
        return whole._replace(out=weight[0] * a.out + weight[1] * b.out)

    return _swap(stage, inputs, attend_block=split)


@fault(
    "sequence-dimension-missing-in-mask",
    CSA,
    "rows of a batch read each other's compressed entries",
    "https://github.com/ggml-org/llama.cpp/pull/24162",
    scenario=Scenario("batch"),
)
def other_row(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(**(inputs | {"compressed": inputs["compressed"].roll(1, 0)}))  # type: ignore[no-any-return]


@fault("values-shifted-by-one-key", SLIDING, "the value row of key j is that of key j - 1")
def values_shifted(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    real, seen = torch.matmul, []

    class Shifted:
        """``torch`` as the core sees it, but for the product of probabilities and values."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def matmul(a: Tensor, b: Tensor) -> Tensor:
            seen.append(0)
            return real(a, b if len(seen) % 2 else b.roll(1, -2))

    return _swap(stage, inputs, torch=Shifted())


@fault("tail-tile-unwritten", CSA, "the last, partial tile of 64 queries is never written")
def tail(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    out = made["out"].clone()
    out[:, out.shape[1] // 64 * 64 :] = 0
    return {**made, "out": out}


@fault("heads-in-wrong-order", CSA, "heads are written pairwise exchanged")
def heads(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    return {**made, "out": made["out"].unflatten(2, (-1, 2)).flip(3).flatten(2, 3)}


@fault("one-nan-in-a-masked-key", CSA, "a NaN in the storage behind the keys reaches the sum with weight zero")
def nan_key(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    out = made["out"].clone()
    out[:, -1, 0] = torch.nan
    return {**made, "out": out}
