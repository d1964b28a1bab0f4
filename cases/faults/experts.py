"""Faults of the routed experts, of the shared expert and of their sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases.faults.catalogue import configured, fault, swapped
from production import experts, shared_expert

ROUTED, SHARED, SUM = "layers.2.experts", "layers.2.shared_expert", "layers.2.moe_sum"
LARGE = {"stress": {"x": lambda t: t * 16}, "stressed": "activations scaled by 16"}


def _act(stage: Any, inputs: dict[str, Tensor], module: Any, act: Any) -> dict[str, Tensor]:
    """Run with another activation between the projections: act(gate, up, limit), fp32."""
    with swapped(module, clamped_swiglu=act):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault(
    "swiglu-clamp-missing-routed",
    ROUTED,
    "gate and up are not clamped",
    "https://github.com/vllm-project/vllm-ascend/issues/14363",
    cause_id="swiglu-clamp-missing",
    **LARGE,
)
def no_clamp(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, swiglu_limit=1e30)


@fault(
    "swiglu-clamp-missing-shared",
    SHARED,
    "gate and up are not clamped",
    "https://github.com/Blaizzy/mlx-vlm/pull/1469",
    cause_id="swiglu-clamp-missing",
    **LARGE,
)
def no_clamp_shared(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, swiglu_limit=1e30)


@fault("swiglu-up-clamped-above-only", ROUTED, "up has no lower clamp", **LARGE)
def one_sided(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _act(stage, inputs, experts, lambda g, u, limit: F.silu(g.clamp(max=limit)) * u.clamp(max=limit))


@fault("swiglu-gate-clamped-below-too", ROUTED, "the gate is clamped on both sides", **LARGE)
def gate_clamped(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _act(stage, inputs, experts, lambda g, u, limit: F.silu(g.clamp(-1, limit)) * u.clamp(-limit, limit))


@fault(
    "clamp-after-activation",
    ROUTED,
    "the limit is applied to the product, not to gate and up",
    "https://github.com/vllm-project/vllm-ascend/pull/9590",
    **LARGE,
)
def clamp_late(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _act(stage, inputs, experts, lambda g, u, limit: (F.silu(g) * u).clamp(-limit, limit))


def _exchanged(stage: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj", "down_proj": "down_proj"}
    params = {f"{other[n.split('.')[0]]}.{n.split('.')[1]}": t for n, t in stage.params.items()}
    return stage.run(params=params, **inputs)  # type: ignore[no-any-return]


@fault(
    "gate-up-halves-swapped",
    ROUTED,
    "gate and up change places",
    "https://github.com/sgl-project/sglang/pull/32430",
)
def halves(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _exchanged(stage, inputs)


@fault("gate-up-halves-swapped-in-shared", SHARED, "gate and up change places",
       "https://github.com/NVIDIA/Megatron-LM/pull/6045", cause_id="gate-up-halves-swapped")  # fmt: skip
def halves_shared(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _exchanged(stage, inputs)


@fault("silu-approximation", ROUTED, "silu is the tanh form of gelu", "https://github.com/vllm-project/vllm/pull/24833")
def gelu(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _act(
        stage,
        inputs,
        experts,
        lambda g, u, limit: F.gelu(g.clamp(max=limit), approximate="tanh") * u.clamp(-limit, limit),
    )


@fault("silu-rounded-to-bf16-in-shared", SHARED, "silu of the gate is rounded to bf16 before the product",
       "https://github.com/sgl-project/sglang/pull/33533")  # fmt: skip
def silu_bf16(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _act(
        stage,
        inputs,
        shared_expert,
        lambda g, u, limit: F.silu(g.clamp(max=limit)).bfloat16().float() * u.clamp(-limit, limit),
    )


@fault(
    "router-weight-on-input",
    ROUTED,
    "the routing weight multiplies the expert's input",
    "https://github.com/radixark/Megatron-LM/pull/79",
)
def on_input(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    count, parts = inputs["picks"].shape[-1], []
    for slot in range(count):
        weight = inputs["weights"][..., slot : slot + 1].float()
        x = (inputs["x"].float() * weight).to(inputs["x"].dtype)
        parts.append(stage.run(**(inputs | {"x": x})))
    names = ("gate", "up", "act", "down")
    made = {n: torch.stack([p[n][:, :, slot] for slot, p in enumerate(parts)], 2) for n in names}
    return {**made, "out": made["down"].sum(2).to(inputs["x"].dtype)}


def _weights(stage: Any, inputs: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    return stage.run(**(inputs | {"weights": weights}))  # type: ignore[no-any-return]


@fault(
    "router-weight-twice",
    ROUTED,
    "the routing weight is applied twice",
    "https://github.com/vllm-project/vllm/pull/43694",
)
def weight_twice(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _weights(stage, inputs, inputs["weights"].square())


@fault("router-weight-missing", ROUTED, "the experts' outputs are added without their weights")
def weight_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _weights(stage, inputs, torch.ones_like(inputs["weights"]))


@fault("router-weights-in-reverse-order", ROUTED, "slot i is weighted by another slot's weight")
def weight_order(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _weights(stage, inputs, inputs["weights"].flip(-1))


@fault(
    "moe-combine-race",
    ROUTED,
    "one of a token's experts is lost when several add to one row",
    "https://github.com/Avarok-Cybersecurity/atlas/pull/1099",
)
def race(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made, weights = stage.run(**inputs), inputs["weights"].float().clone()
    weights[:, ::97, 1] = 0
    return {**made, "out": (weights.unsqueeze(-1) * made["down"]).sum(2).to(made["out"].dtype)}


@fault(
    "expert-id-space",
    ROUTED,
    "ids of another space: token goes to expert e + 1",
    "https://github.com/ROCm/aiter/issues/3995",
)
def id_space(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    count = stage.params["gate_proj.weight"].shape[0]
    return stage.run(**(inputs | {"picks": (inputs["picks"] + 1) % count}))  # type: ignore[no-any-return]


@fault("expert-activation-in-fp8", ROUTED, "the activation goes through fp8 before the last projection",
       "https://github.com/Comfy-Org/comfy-kitchen/pull/124")  # fmt: skip
def act_fp8(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    real = experts.clamped_swiglu
    return _act(stage, inputs, experts, lambda g, u, limit: real(g, u, limit).to(torch.float8_e4m3fn).float())


@fault("shared-expert-missing", SUM, "the shared expert is not added")
def shared_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return {"out": inputs["routed"].clone()}


@fault(
    "shared-expert-reduced-wrong-number-of-times",
    SUM,
    "the shared expert is summed over two ranks that both hold it",
    "https://github.com/sgl-project/sglang/pull/35535",
)
def shared_twice(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(**(inputs | {"shared": inputs["shared"] * 2}))  # type: ignore[no-any-return]
