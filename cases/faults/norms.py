"""Faults of RMS norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cases.faults.catalogue import HISTORY, Scenario, configured, fault, swapped
from production import norms

ATTN, Q_A, Q_B, KV, FINAL = (
    "layers.2.attn_norm",
    "layers.2.q_a_norm",
    "layers.2.q_b_norm",
    "layers.2.kv_norm",
    "final_norm",
)
SMALL = {"stress": {"x": lambda t: t * 2**-9}, "stressed": "activations scaled by 2^-9"}


@fault("q-b-norm-missing", Q_B, "the heads of the query are not normed", HISTORY)
def q_b_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return {"q": inputs["q"].clone()}


@fault("q-b-norm-over-all-heads", Q_B, "one norm over all heads instead of one each")
def all_heads(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    q = inputs["q"]
    return {"q": norms.rms_norm(q.flatten(2), None, stage.config["rms_norm_eps"]).view_as(q).to(q.dtype)}


@fault(
    "rmsnorm-offset-convention",
    "layers.0.kv_norm",
    "weights are stored as bf16(w - 1) for a kernel that adds one",
    "https://github.com/Avarok-Cybersecurity/atlas/pull/315",
)
def offset(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    weight = stage.params["weight"]
    return stage.run(params={"weight": (1 + (weight.float() - 1).bfloat16()).to(weight.dtype)}, **inputs)  # type: ignore[no-any-return]


@fault(
    "rmsnorm-rounding-order",
    ATTN,
    "the normed activation is rounded to bf16 before the weight is applied",
    "https://github.com/ByteDance-Seed/VeOmni/pull/928",
)
def rounding_order(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    plain = norms.rms_norm(inputs["x"], None, stage.config["rms_norm_eps"]).bfloat16()
    return {"x": plain * stage.params["weight"].bfloat16()}


@fault("rmsnorm-eps-missing", ATTN, "nothing is added to the mean square", **SMALL)
def eps_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, rms_norm_eps=0.0)


@fault("rmsnorm-eps-of-another-norm", ATTN, "the epsilon is 1e-5", **SMALL)
def eps_other(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, rms_norm_eps=1e-5)


@fault("rmsnorm-eps-outside-the-root", ATTN, "the epsilon is added to the root of the mean square", **SMALL)
def eps_outside(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def inverse(x: Tensor, eps: float) -> Tensor:
        return 1 / (x.square().mean(-1, keepdim=True).sqrt() + eps)

    with swapped(norms, inverse_rms=inverse):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault("rmsnorm-weight-missing", Q_A, "the norm's weight is one")
def weight_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(params={"weight": torch.ones_like(stage.params["weight"])}, **inputs)  # type: ignore[no-any-return]


@fault(
    "kv-norm-gamma-skipped-on-rope-slice",
    KV,
    "the last R channels of the key keep a weight of one",
    "https://github.com/hw-native-sys/pypto-lib/pull/205",
)
def gamma_slice(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    weight = stage.params["weight"].clone()
    weight[-64:] = 1
    return stage.run(params={"weight": weight}, **inputs)  # type: ignore[no-any-return]


@fault("layernorm-instead-of-rmsnorm", ATTN, "the mean is subtracted first")
def layernorm(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    x = inputs["x"].float()
    return stage.run(x=(x - x.mean(-1, keepdim=True)).to(inputs["x"].dtype))  # type: ignore[no-any-return]


@fault("rmsnorm-weight-shifted", ATTN, "channel c reads the weight of channel c - 1")
def weight_shifted(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(params={"weight": stage.params["weight"].roll(1)}, **inputs)  # type: ignore[no-any-return]


@fault("rmsnorm-sum-in-bf16", ATTN, "the mean square is kept in bf16")
def sum_bf16(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    def inverse(x: Tensor, eps: float) -> Tensor:
        return torch.rsqrt(x.square().mean(-1, keepdim=True).bfloat16().float() + eps)

    with swapped(norms, inverse_rms=inverse):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault("final-norm-missing", FINAL, "the last norm is skipped", scenario=Scenario("fp32", dtype="fp32"))
def final_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return {"x": inputs["x"].clone()}
