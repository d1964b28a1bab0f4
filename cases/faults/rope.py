"""Faults of rotary embeddings: tables, pairing, direction."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cases.faults.catalogue import HISTORY, Scenario, bf16, configured, fault, swapped
from production import rope

TABLE, Q, KV, UNROPE = "rope_cache", "layers.2.q_rope", "layers.2.kv_rope", "layers.2.attn_unrope"
frequencies, rotate = rope.frequencies, rope.rotate


def _frequencies(stage: Any, inputs: dict[str, Tensor], change: Any) -> dict[str, Tensor]:
    """Run with the compress table's frequencies changed."""
    compress = stage.config["compress"]["theta"]

    def changed(r: Any, device: Any) -> Tensor:
        found = frequencies(r, device)
        return change(r, found) if r.theta == compress else found  # type: ignore[no-any-return]

    with swapped(rope, frequencies=changed):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault("rope-plain-instead-of-yarn", TABLE, "the compress table has plain frequencies: YaRN is not applied", HISTORY)
def plain(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, compress=replace(stage.op.compress, yarn=None))


@fault(
    "yarn-on-sliding-layers",
    TABLE,
    "the main table gets YaRN frequencies too",
    "https://github.com/sgl-project/sglang/pull/34788",
)
def sliding(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, main=replace(stage.op.main, yarn=stage.op.compress.yarn))


@fault(
    "yarn-amplitude-on-cos-sin",
    TABLE,
    "cosine and sine of the compress table are multiplied by 0.1 ln(16) + 1",
    "https://github.com/Avarok-Cybersecurity/atlas/pull/342",
)
def amplitude(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    factor = 0.1 * math.log(16) + 1
    return {n: t * factor if n.startswith("compress") else t for n, t in stage.run(**inputs).items()}


@fault(
    "yarn-range-rounding",
    TABLE,
    "the ramp's ends are not rounded outwards",
    "https://github.com/vllm-project/vllm/issues/27722",
)
def range_rounding(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    numbers = SimpleNamespace(**{n: getattr(math, n) for n in ("log", "pi")}, floor=lambda x: x, ceil=lambda x: x)
    with swapped(rope, math=numbers, frequencies=frequencies.__wrapped__):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault("yarn-linear-interpolation", TABLE, "every frequency is divided by the factor")
def linear(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    compress = stage.op.compress
    base = replace(compress, yarn=None)
    return _frequencies(stage, inputs, lambda r, f: frequencies(base, f.device) / compress.yarn.factor)


@fault("yarn-betas-exchanged-range", TABLE, "the ramp ends where a dim turns twice, not once, within the length")
def beta(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    compress = stage.op.compress
    return configured(stage, inputs, compress=replace(compress, yarn=replace(compress.yarn, beta_slow=4)))


@fault("rope-bf16-table", TABLE, "cosine and sine are stored in bf16", "https://github.com/1CatAI/1Cat-vLLM/pull/162")
def table_bf16(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return {n: bf16(t) for n, t in stage.run(**inputs).items()}


@fault("rope-bf16-phase", TABLE, "the phase is computed in bf16")
def phase_bf16(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _frequencies(stage, inputs, lambda r, f: f.bfloat16().double())


@fault("rope-positions-from-one", TABLE, "positions count from one")
def from_one(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(positions=inputs["positions"] + 1)  # type: ignore[no-any-return]


@fault(
    "chunk-relative-rope",
    TABLE,
    "positions start at zero in every chunk",
    scenario=Scenario("chunks"),
)
def chunk_relative(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    positions = inputs["positions"]
    return stage.run(positions=positions - positions[:, :1])  # type: ignore[no-any-return]


@fault("rope-exchanged-cos-and-sin", TABLE, "cosine and sine of the main table change places")
def exchanged(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    return {**made, "main_cos": made["main_sin"], "main_sin": made["main_cos"]}


def _rotating(stage: Any, inputs: dict[str, Tensor], other: Any) -> dict[str, Tensor]:
    with swapped(rope, rotate=other):
        return stage.run(**inputs)  # type: ignore[no-any-return]


def half_split(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Pairs (i, i + R/2) instead of (2i, 2i + 1)."""
    width = cos.shape[-1]
    rest, a, b = x.float().split([x.shape[-1] - 2 * width, width, width], dim=-1)
    s = -sin if inverse else sin
    return torch.cat((rest, a * cos - b * s, b * cos + a * s), dim=-1).to(x.dtype)


@fault(
    "rope-half-split-pairing",
    Q,
    "channels i and i + R/2 form a pair",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/2039",
)
def pairing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _rotating(stage, inputs, half_split)


@fault(
    "rope-half-split-on-keys", KV, "channels i and i + R/2 of the key form a pair", cause_id="rope-half-split-pairing"
)
def pairing_keys(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _rotating(stage, inputs, half_split)


@fault(
    "rope-one-theta-for-all-layers",
    Q,
    "compressed layers use the main table",
    "https://github.com/Avarok-Cybersecurity/atlas/pull/276",
)
def one_theta(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, table="main")


@fault("rope-missing-on-keys", KV, "the keys are not rotated")
def keys_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return {"kv": inputs["kv"].clone()}


@fault("rope-wrong-sign-on-keys", KV, "the keys are rotated the other way")
def keys_sign(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, inverse=True)


@fault("rope-on-leading-channels", Q, "the first R channels are rotated, not the last")
def leading(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def first(x: Tensor, cos: Tensor, sin: Tensor, **k: Any) -> Tensor:
        width = 2 * cos.shape[-1]
        return torch.cat((rotate(x[..., :width], cos, sin, **k), x[..., width:]), dim=-1)

    return _rotating(stage, inputs, first)


@fault(
    "rope-table-write-race",
    Q,
    "a copy of all channels overtakes the rotation: some rotated channels keep what they were",
    "https://github.com/1CatAI/1Cat-vLLM/pull/162",
)
def race(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)["q"]
    lost = torch.rand(made.shape, generator=torch.Generator().manual_seed(3)) < 1e-3
    return {"q": torch.where(lost, inputs["q"], made)}


@fault(
    "inverse-rope-missing",
    UNROPE,
    "the attention output keeps the rotation of its values",
    "https://github.com/Avarok-Cybersecurity/atlas/pull/186",
)
def inverse_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return {"out": inputs["out"].clone()}


@fault("inverse-rope-wrong-sign", UNROPE, "the attention output is rotated once more instead of back")
def inverse_sign(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, inverse=False)


@fault(
    "inverse-rope-zero-or-twice-in-mixed-batch",
    UNROPE,
    "only the first 64 rows are rotated back",
    "https://github.com/vllm-project/vllm/pull/57451",
)
def inverse_rows(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)["out"].clone()
    made[:, 64:] = inputs["out"][:, 64:]
    return {"out": made}


@fault("inverse-rope-by-main-table", UNROPE, "the output of a compressed layer is rotated back by the main table",
       cause_id="rope-one-theta-for-all-layers")  # fmt: skip
def inverse_theta(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, table="main")
