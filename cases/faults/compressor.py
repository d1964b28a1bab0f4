"""Faults of the compressors: pooling, overlap, norm and rotation of the entries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cases.faults.catalogue import configured, fault, hadamard, swapped
from production import compressor

CSA, HCA = "layers.2.compressor", "layers.3.compressor"
finish, windows, gated_mean, overlapping = (
    compressor.finish,
    compressor.windows,
    compressor.gated_mean,
    compressor.pool_overlapping,
)


def _swap(stage: Any, inputs: dict[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    with swapped(compressor, **attributes):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault(
    "compressed-rope-missing",
    CSA,
    "the entries are not rotated",
    "https://github.com/ml-explore/mlx-lm/pull/1189",
)
def rope_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, rotate=lambda x, cos, sin: x)


@fault(
    "compressed-rope-at-pool-index",
    CSA,
    "entry e is rotated at position e, not e times the rate",
    "https://github.com/AMD-AGI/Primus/pull/949",
)
def pool_index(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, finish=lambda p, w, eps, rope, rate, first=0: finish(p, w, eps, rope, 1, first))


@fault("compressed-rope-at-window-end", HCA, "an entry is rotated at its window's last token")
def window_end(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    real = compressor.table
    rate = stage.config["compress_rate"]
    return _swap(stage, inputs, table=lambda rope, positions: real(rope, positions + rate - 1))


@fault("compressed-rope-by-main-table", CSA, "entries are rotated by the main table",
       cause_id="rope-one-theta-for-all-layers")  # fmt: skip
def main_table(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, rope=replace(stage.op.rope, theta=10000.0, yarn=None))


def _bias(stage: Any, inputs: dict[str, Tensor], change: Any) -> dict[str, Tensor]:
    return stage.run(params={"position_bias": change(stage.params["position_bias"])}, **inputs)  # type: ignore[no-any-return]


@fault("position-bias-missing", CSA, "the gates have no position bias", "https://github.com/ROCm/ATOM/issues/664")
def bias_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _bias(stage, inputs, torch.zeros_like)


@fault("position-bias-shifted", CSA, "slot j reads the bias of slot j - 1", "https://github.com/ROCm/ATOM/issues/664")
def bias_shifted(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _bias(stage, inputs, lambda t: t.roll(1, 0))


@fault("position-bias-twice", HCA, "the bias is added to gates that have it", "https://github.com/ROCm/ATOM/issues/664")
def bias_twice(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _bias(stage, inputs, lambda t: t * 2)


@fault("gate-softmax-over-channels", CSA, "the gate's softmax runs over channels, not over slots")
def over_channels(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, gated_mean=lambda kv, gate: (torch.softmax(gate, -1) * kv).sum(2))


@fault("gate-ignored", HCA, "a plain mean over the window")
def plain_mean(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, gated_mean=lambda kv, gate: gated_mean(kv, torch.zeros_like(gate)))


@fault("overlap-missing", CSA, "an entry pools its own window only")
def no_overlap(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def own(kv: Tensor, gate: Tensor, prior: Any = None) -> Tensor:
        half = kv.shape[-1] // 2
        return gated_mean(kv[..., half:], gate[..., half:])

    return _swap(stage, inputs, pool_overlapping=own)


@fault("overlap-halves-exchanged", CSA, "the first half of the channels belongs to the own window")
def exchanged(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def swap(kv: Tensor, gate: Tensor, prior: Any = None) -> Tensor:
        half = kv.shape[-1] // 2
        return overlapping(kv.roll(half, -1), gate.roll(half, -1), prior)

    return _swap(stage, inputs, pool_overlapping=swap)


@fault("first-window-zero-instead-of-minus-inf", CSA, "the missing window before the first takes part with gate zero")
def zero_gate(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def zero(kv: Tensor, gate: Tensor, prior: Any = None) -> Tensor:
        none = torch.zeros_like(kv[:, 0, :, : kv.shape[-1] // 2])
        return overlapping(kv, gate, (none, none))

    return _swap(stage, inputs, pool_overlapping=zero)


@fault(
    "hadamard-on-attention-compressor",
    CSA,
    "the indexer's Hadamard transform is applied to the entries of the attention",
    "https://github.com/hw-native-sys/pypto-lib/pull/424",
)
def transformed(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    return {**made, "keys": hadamard(made["keys"])}


@fault(
    "norm-skipped-for-ratio-128",
    HCA,
    "entries of rate 128 are not normed",
    "https://github.com/hw-native-sys/pypto-lib/pull/442",
)
def norm_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, rms_norm=lambda x, weight, eps: x)


@fault(
    "rope-skipped-for-ratio-128",
    HCA,
    "entries of rate 128 are not rotated",
    "https://github.com/hw-native-sys/pypto-lib/pull/442",
    cause_id="compressed-rope-missing",
)
def rope_skipped(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, rotate=lambda x, cos, sin: x)


@fault(
    "compressor-accumulation-precision",
    HCA,
    "keys and gates are kept in bf16 before they are pooled",
    "https://github.com/sgl-project/sglang/pull/27277",
)
def state_bf16(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _swap(stage, inputs, windows=lambda x, b, p: tuple(t.bfloat16().float() for t in windows(x, b, p)))


@fault("compressor-windows-shifted-by-one", CSA, "windows begin one token late")
def shifted(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(**(inputs | {"x": inputs["x"].roll(-1, 1)}))  # type: ignore[no-any-return]


@fault("compressor-last-entries-unwritten", CSA, "the last entries are left as zeros")
def last_entries(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    keys = made["keys"].clone()
    keys[:, -3:] = 0
    return {**made, "keys": keys}
