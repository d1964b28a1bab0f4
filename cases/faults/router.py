"""Faults of the routers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases.faults.catalogue import bf16, configured, fault, swapped
from production import router

DENSE, HASH = "layers.2.router", "layers.0.router"


def _weigh(stage: Any, inputs: dict[str, Tensor], scores: Any, floor: float = 1e-20) -> dict[str, Tensor]:
    """The stage's logits and picks, its weights from other scores: scores(logits)."""
    made = stage.run(**inputs)
    picked = scores(made["logits"]).gather(-1, made["picks"])
    weights = picked / (picked.sum(-1, keepdim=True) + floor) * stage.config["routed_scaling_factor"]
    return {**made, "weights": weights}


def _bias(stage: Any) -> Tensor:
    return stage.params["e_score_correction_bias"].float()  # type: ignore[no-any-return]


@fault(
    "correction-bias-not-loaded",
    DENSE,
    "experts are chosen without the correction bias",
    "https://github.com/Avarok-Cybersecurity/atlas/pull/186",
)
def bias_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(params={"e_score_correction_bias": torch.zeros_like(_bias(stage))}, **inputs)  # type: ignore[no-any-return]


@fault(
    "correction-bias-in-weights",
    DENSE,
    "the weights are taken from score plus bias",
    "https://github.com/huggingface/transformers/pull/39581",
)
def bias_in_weights(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _weigh(stage, inputs, lambda z: router.sqrt_softplus(z) + _bias(stage))


@fault("correction-bias-subtracted", DENSE, "the correction bias has the wrong sign")
def bias_sign(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(params={"e_score_correction_bias": -_bias(stage)}, **inputs)  # type: ignore[no-any-return]


@fault("router-weights-not-renormalised", DENSE, "the weights are the scores themselves")
def no_renorm(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    picked = router.sqrt_softplus(made["logits"]).gather(-1, made["picks"])
    return {**made, "weights": picked * stage.config["routed_scaling_factor"]}


@fault(
    "routed-scale-twice",
    DENSE,
    "routed_scaling_factor is applied twice",
    "https://github.com/kvcache-ai/sglang/pull/86",
)
def scale_twice(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, routed_scaling_factor=stage.config["routed_scaling_factor"] ** 2)


@fault(
    "routed-scale-missing",
    DENSE,
    "routed_scaling_factor is not applied",
    "https://github.com/vllm-project/vllm/pull/45037",
)
def scale_missing(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return configured(stage, inputs, routed_scaling_factor=1.0)


@fault(
    "router-scores-low-precision",
    DENSE,
    "the scores are rounded to bf16",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/2201",
)
def scores_bf16(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    real = router.sqrt_softplus
    with swapped(router, sqrt_softplus=lambda z: bf16(real(z))):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault(
    "router-logits-low-precision",
    DENSE,
    "the logits are rounded to bf16",
    "https://github.com/sgl-project/sglang/pull/30323",
)
def logits_bf16(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    real = router.product
    with swapped(router, product=lambda x, p: bf16(real(x, p))):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault(
    "low-precision-gate-weights",
    DENSE,
    "the router's weight went through fp8",
    "https://github.com/Avarok-Cybersecurity/atlas/pull/186",
)
def gate_fp8(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    weight = stage.params["weight"]
    return stage.run(params={"weight": weight.float().to(torch.float8_e4m3fn).to(weight.dtype)}, **inputs)  # type: ignore[no-any-return]


@fault(
    "sqrtsoftplus-naive",
    HASH,
    "log(1 + exp(x)) without a branch: zero far below, infinite far above",
    "https://github.com/sgl-project/sglang/pull/34459",
    stress={"x": lambda t: t * 64},
    stressed="activations scaled by 64",
)
def naive(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    with swapped(router, sqrt_softplus=lambda z: torch.log(1 + torch.exp(z)).sqrt()):
        return stage.run(**inputs)  # type: ignore[no-any-return]


@fault("router-sigmoid-scores", DENSE, "scores are sigmoids, as in V3")
def sigmoid(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _weigh(stage, inputs, torch.sigmoid)


@fault("router-softmax-scores", DENSE, "scores are a softmax")
def softmax(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _weigh(stage, inputs, lambda z: torch.softmax(z, -1))


@fault("router-softplus-without-root", DENSE, "the root of the softplus is left out")
def no_root(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _weigh(stage, inputs, F.softplus)


@fault(
    "kernel-returned-weights-untrusted",
    HASH,
    "the weights come back in bf16, the ids are right",
    "https://github.com/vllm-project/vllm-ascend/pull/9831",
)
def weights_bf16(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    return {**made, "weights": bf16(made["weights"])}


@fault(
    "hash-layers-routed-by-score",
    HASH,
    "a hash layer takes the largest scores",
    "https://github.com/Avarok-Cybersecurity/atlas/pull/186",
)
def by_score(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    picks = made["logits"].topk(made["picks"].shape[-1], -1).indices
    return stage.run(replay={"picks": picks}, **inputs)  # type: ignore[no-any-return]


@fault("hash-weights-uniform", HASH, "a hash layer weights its experts alike")
def uniform(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return _weigh(stage, inputs, torch.ones_like)


@fault("hash-table-shifted-by-one-token", HASH, "a token reads the table row of the token before it")
def shifted(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    return stage.run(**(inputs | {"input_ids": inputs["input_ids"].roll(1, 1)}))  # type: ignore[no-any-return]


@fault("router-one-expert-twice", DENSE, "the second pick repeats the first")
def repeated(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made = stage.run(**inputs)
    picks = made["picks"].clone()
    picks[..., 1] = picks[..., 0]
    return stage.run(replay={"picks": picks}, **inputs)  # type: ignore[no-any-return]
