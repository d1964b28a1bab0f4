"""Faults of the attention sink."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cases.faults.catalogue import HISTORY, Scenario, bf16, fault

CORE = "layers.2.attn_core"


def _sinks(stage: Any, inputs: dict[str, Tensor], value: Tensor) -> dict[str, Tensor]:
    return stage.run(params={"sinks": value}, **inputs)  # type: ignore[no-any-return]


@fault("sink-as-zero-key", CORE, "the sink is a key of zeros: its logit is 0 for every head", HISTORY)
def zero_key(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _sinks(stage, inputs, torch.zeros_like(stage.params["sinks"]))


@fault("sink-in-value-sum", CORE, "the sink's probability multiplies the first value row", HISTORY)
def value_sum(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    row = inputs["kv"][:, :1].float().unsqueeze(2)
    out = made["out"].float() + made["sink_mass"].unsqueeze(-1) * row
    return {**made, "out": out.to(made["out"].dtype)}


@fault(
    "sink-fp32-read-as-bf16",
    CORE,
    "the fp32 buffer of sinks is indexed as bf16: every head reads half a word",
    "https://github.com/Avarok-Cybersecurity/atlas/pull/341",
)
def half_words(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    sinks = stage.params["sinks"]
    read = sinks.view(torch.bfloat16)[: len(sinks)].float()
    return _sinks(stage, inputs, torch.nan_to_num(read, nan=0.0))


@fault(
    "sink-dropped-on-one-path",
    CORE,
    "a plain softmax without the sink's column",
    "https://github.com/vllm-project/vllm/pull/54568",
    cause_id="sink-dropped",
)
def dropped(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _sinks(stage, inputs, torch.full_like(stage.params["sinks"], -1e30))


@fault(
    "sink-dropped-after-softmax",
    CORE,
    "the sink's column is cut off and the rest renormalised; the log-sum-exp is right",
    "https://github.com/sgl-project/sgl-kernel-npu/pull/216",
    cause_id="sink-dropped",
)
def renormalised(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    rest = (1 - made["sink_mass"]).clamp(min=1e-30).unsqueeze(-1)
    return {**made, "out": (made["out"].float() / rest).to(made["out"].dtype)}


@fault(
    "sink-counted-twice",
    CORE,
    "two key splits both seed their denominator with the sink",
    "https://github.com/ROCm/rocm-libraries/issues/12227",
    cause_id="sink-counted-n-times",
)
def twice(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _sinks(stage, inputs, stage.params["sinks"] + math.log(2))


@fault(
    "sink-seeded-per-split",
    CORE,
    "four key splits all seed their denominator with the sink",
    "https://github.com/NVIDIA/cudnn-frontend/pull/768",
    cause_id="sink-counted-n-times",
)
def per_split(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _sinks(stage, inputs, stage.params["sinks"] + math.log(4))


@fault(
    "sink-tp-slice-wrong",
    CORE,
    "every rank reads the first rank's sinks",
    "https://github.com/lightseekorg/tokenspeed/pull/254",
)
def first_slice(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    half = stage.params["sinks"][: len(stage.params["sinks"]) // 2]
    return _sinks(stage, inputs, half.repeat(2))


@fault("sink-shifted-by-one-head", CORE, "head h reads the sink of head h - 1")
def shifted(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _sinks(stage, inputs, stage.params["sinks"].roll(1))


@fault("sink-not-in-base-2", CORE, "the exponent is taken in base 2 and the sink was not converted")
def base_two(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _sinks(stage, inputs, stage.params["sinks"] * math.log(2))


@fault(
    "sink-uninitialised",
    CORE,
    "the checkpoint's sinks are never loaded: the buffer holds what was there",
    "https://github.com/radixark/miles/pull/1045",
)
def unloaded(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    noise = torch.randn(stage.params["sinks"].shape, generator=torch.Generator().manual_seed(11))
    return _sinks(stage, inputs, noise * 3)


@fault("sink-rounded-to-bf16", CORE, "the sinks are kept in bf16", scenario=Scenario("fp32", dtype="fp32"))
def rounded(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _sinks(stage, inputs, bf16(stage.params["sinks"]))
