"""Faults of the lightning indexer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cases.faults.catalogue import configured, fault, hadamard, swapped
from cases.faults.rope import half_split
from production import indexer

STAGE = "layers.2.indexer"
choose, relu_scores, ready_entries, rotate = (
    indexer.choose,
    indexer.relu_scores,
    indexer.ready_entries,
    indexer.rotate,
)


def _swap(stage: Any, inputs: dict[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    with swapped(indexer, **attributes):
        return stage.run(**inputs)  # type: ignore[no-any-return]


def _picking(stage: Any, inputs: dict[str, Tensor], picks: Any) -> dict[str, Tensor]:
    """Right scores, other picks: picks(scores, count)."""
    return _swap(stage, inputs, choose=picks)


@fault(
    "indexer-relu-missing",
    STAGE,
    "negative products of query and key count",
    "https://github.com/1CatAI/1Cat-vLLM/pull/250",
)
def no_relu(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def scores(q: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("bsh,bshd,btd->bst", weight, q.float(), keys.float())

    return _swap(stage, inputs, relu_scores=scores)


@fault(
    "indexer-hadamard-one-sided",
    STAGE,
    "queries are transformed and keys are not",
    "https://github.com/ROCm/ATOM/issues/1507",
)
def one_sided(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, relu_scores=lambda q, keys, weight: relu_scores(hadamard(q), keys, weight))


@fault(
    "indexer-rope-half-split",
    STAGE,
    "channels i and i + R/2 of the index queries form a pair",
    "https://github.com/vllm-project/vllm-ascend/pull/4641",
)
def pairing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, rotate=half_split)


@fault("indexer-rope-missing-on-queries", STAGE, "the index queries are not rotated")
def no_rope(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, rotate=lambda x, cos, sin: x)


@fault("indexer-rope-by-main-table", STAGE, "keys and queries are rotated by the main table",
       cause_id="rope-one-theta-for-all-layers")  # fmt: skip
def main_table(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, rope=replace(stage.op.rope, theta=10000.0, yarn=None))


@fault(
    "indexer-topk-constant-mismatch",
    STAGE,
    "half as many entries are picked",
    "https://github.com/ROCm/ATOM/pull/1591",
)
def half(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def picks(scores: Tensor, count: int) -> Tensor:
        found = choose(scores, count).clone()
        found[..., count // 2 :] = -1
        return found

    return _picking(stage, inputs, picks)


@fault(
    "indexer-shortcut-baked-into-graph",
    STAGE,
    "the first k entries are taken, whatever their scores",
    "https://github.com/local-inference-lab/vllm/pull/429",
)
def first_k(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def picks(scores: Tensor, count: int) -> Tensor:
        index = torch.arange(count).expand(*scores.shape[:2], count)
        return torch.where(scores[..., :count] == -torch.inf, -1, index)

    return _picking(stage, inputs, picks)


@fault(
    "indexer-causality-after-topk",
    STAGE,
    "the best of all entries are picked, then those of the future dropped",
    "https://github.com/huggingface/transformers/issues/45820",
)
def late_mask(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    count, entries = made["picks"].shape[-1], made["keys"].shape[1]
    with swapped(indexer, ready_entries=lambda p, r, n: ready_entries(p, r, n).fill_(True)):
        everything = stage.run(**inputs)["scores"]
    picks = choose(everything, count)
    ready = ready_entries(inputs["positions"], stage.config["compress_rate"], entries)
    return {**made, "picks": torch.where(ready.gather(-1, picks), picks, -1)}


@fault(
    "indexer-not-causal",
    STAGE,
    "entries of the future are scored and picked",
    "https://github.com/huggingface/transformers/issues/45820",
)
def not_causal(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, ready_entries=lambda p, r, n: ready_entries(p, r, n).fill_(True))


@fault("indexer-entry-visible-too-late", STAGE, "an entry may be picked one token after its window has closed")
def too_late(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, ready_entries=lambda p, r, n: ready_entries(p - 1, r, n))


@fault("indexer-scale-missing", STAGE, "scores are not divided by the root of the head's size")
def no_scale(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    factor = stage.config["index_head_dim"] ** 0.5
    return _swap(stage, inputs, relu_scores=lambda q, keys, weight: relu_scores(q, keys, weight * factor))


@fault("indexer-head-weights-missing", STAGE, "all index heads weigh alike")
def no_weights(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(
        stage,
        inputs,
        relu_scores=lambda q, keys, weight: relu_scores(q, keys, weight.mean(-1, keepdim=True).expand_as(weight)),
    )


@fault(
    "indexer-reduction-returns-zero",
    STAGE,
    "the sum over heads returns zeros",
    "https://github.com/ml-explore/mlx-lm/pull/1454",
    cause_id="indexer-scores-zero",
)
def zero_scores(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, relu_scores=lambda q, keys, weight: relu_scores(q, keys, weight) * 0)


@fault(
    "indexer-address-overflow",
    STAGE,
    "entries from some address on score zero",
    "https://github.com/vllm-project/vllm/issues/52109",
    cause_id="indexer-scores-zero",
)
def overflow(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def scores(q: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
        found = relu_scores(q, keys, weight)
        found[..., 60:] = 0
        return found

    return _swap(stage, inputs, relu_scores=scores)


@fault(
    "indexer-scale-view-aliased",
    STAGE,
    "the keys are multiplied by scales of zero",
    "https://github.com/ROCm/ATOM/pull/1466",
    cause_id="indexer-scores-zero",
)
def aliased(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, relu_scores=lambda q, keys, weight: relu_scores(q, keys * 0, weight))


@fault(
    "indexer-fp8-encoding-fnuz-vs-ocp",
    STAGE,
    "keys are read with another exponent bias: twice as large",
    "https://github.com/vllm-project/vllm/pull/42893",
)
def fnuz(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, relu_scores=lambda q, keys, weight: relu_scores(q, keys * 2, weight))


@fault(
    "indexer-cache-layout-mismatch",
    STAGE,
    "keys of four entries are written interleaved and read as rows",
    "https://github.com/vllm-project/vllm/issues/52109",
)
def layout(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def scores(q: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
        whole = keys.shape[1] // 4 * 4
        mixed = keys[:, :whole].unflatten(1, (-1, 4)).transpose(-1, -2).flatten(2).unflatten(2, (4, -1)).flatten(1, 2)
        return relu_scores(q, torch.cat((mixed, keys[:, whole:]), 1), weight)

    return _swap(stage, inputs, relu_scores=scores)


@fault(
    "indexer-workspace-units",
    STAGE,
    "three quarters of the score buffer are never written",
    "https://github.com/vllm-project/vllm/pull/51252",
)
def workspace(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def scores(q: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
        found = relu_scores(q, keys, weight)
        rest = found[..., found.shape[-1] // 4 :]
        rest.copy_(torch.rand(rest.shape, generator=torch.Generator().manual_seed(5)))
        return found

    return _swap(stage, inputs, relu_scores=scores)


@fault(
    "indexer-precision-flips-selection",
    STAGE,
    "queries go through fp8",
    "https://github.com/AMD-AGI/Primus/pull/928",
)
def fp8(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(
        stage,
        inputs,
        relu_scores=lambda q, keys, weight: relu_scores(q.float().to(torch.float8_e4m3fn).float(), keys, weight),
    )


@fault("indexer-first-window-zero-instead-of-minus-inf", STAGE, "the window before the first takes part with gate zero",
       cause_id="first-window-zero-instead-of-minus-inf")  # fmt: skip
def zero_gate(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    real = indexer.pool_overlapping

    def zero(kv: Tensor, gate: Tensor, prior: Any = None) -> Tensor:
        none = torch.zeros_like(kv[:, 0, :, : kv.shape[-1] // 2])
        return real(kv, gate, (none, none))

    return _swap(stage, inputs, pool_overlapping=zero)
