"""Which class implements which component, by kind and variant.

A linear's variant is the format of its weight in the checkpoint; a router's is its scoring; the others have one. A
kind or variant that is not here is an error that names the stage: nothing falls back to something else.
"""

from __future__ import annotations

from typing import Any

from production.attention import SinkAttention
from production.component import Component
from production.compressor import CsaCompressor, HcaCompressor
from production.embed import Embedding
from production.errors import ProductionError
from production.experts import Bf16MoE, CtNvfp4MoE, Fp8MoE, Mxfp4MoE, Nvfp4MoE
from production.grouped_linear import (
    Bf16GroupedLinear,
    CtNvfp4GroupedLinear,
    Fp8GroupedLinear,
    Mxfp4GroupedLinear,
    Nvfp4GroupedLinear,
)
from production.head import LmHead
from production.hyper_connection import HyperConnection, ResidualMix
from production.hyper_head import HyperHead
from production.indexer import LightningIndexer
from production.linear import Bf16Linear, CtNvfp4Linear, Fp8Linear, Mxfp4Linear, Nvfp4Linear
from production.norms import HeadNorm, RmsNorm
from production.rope import RopeCache, Rotation
from production.router import HashRouter, TopKRouter
from production.shared_expert import (
    Bf16SharedExpert,
    CtNvfp4SharedExpert,
    Fp8SharedExpert,
    MoeSum,
    Mxfp4SharedExpert,
    Nvfp4SharedExpert,
)
from production.weights import FORMS


def by_format(kind: str, *classes: type[Component]) -> dict[tuple[str, str], type[Component]]:
    """One class for each of weights.FORMS, in its order."""
    return {(kind, form): cls for form, cls in zip(FORMS, classes, strict=True)}


IMPLEMENTATIONS: dict[tuple[str, str], type[Component]] = {
    ("embed", "bf16"): Embedding,
    ("rope_cache", "interleaved"): RopeCache,
    ("hyper_connection", "sinkhorn"): HyperConnection,
    ("residual_mix", "sinkhorn"): ResidualMix,
    ("hyper_head", "sigmoid"): HyperHead,
    ("norm", "rms"): RmsNorm,
    ("head_norm", "rms"): HeadNorm,
    ("rotation", "interleaved"): Rotation,
    ("compressor", "csa"): CsaCompressor,
    ("compressor", "hca"): HcaCompressor,
    ("attention", "sink"): SinkAttention,
    ("router", "dense sqrtsoftplus"): TopKRouter,
    ("router", "hash sqrtsoftplus"): HashRouter,
    **by_format("linear", Bf16Linear, Fp8Linear, Mxfp4Linear, Nvfp4Linear, CtNvfp4Linear),
    **by_format(
        "grouped_linear",
        Bf16GroupedLinear,
        Fp8GroupedLinear,
        Mxfp4GroupedLinear,
        Nvfp4GroupedLinear,
        CtNvfp4GroupedLinear,
    ),
    **by_format("experts", Bf16MoE, Fp8MoE, Mxfp4MoE, Nvfp4MoE, CtNvfp4MoE),
    **by_format(
        "shared_expert", Bf16SharedExpert, Fp8SharedExpert, Mxfp4SharedExpert, Nvfp4SharedExpert, CtNvfp4SharedExpert
    ),
    **by_format("indexer", *[LightningIndexer] * 5),
    ("moe_sum", "plain"): MoeSum,
    ("lm_head", "bf16"): LmHead,
}


def create(stage: str, kind: str, variant: str, **settings: Any) -> Component:
    """The component for a stage, or an error that names the stage and what there is."""
    implementation = IMPLEMENTATIONS.get((kind, variant))
    if implementation is None:
        there = ", ".join(v for k, v in IMPLEMENTATIONS if k == kind) or "none"
        raise ProductionError(
            stage,
            expected=f"a component for {kind} ({there})",
            came=f"{variant!r}, which has no implementation",
            fix=f"add one to production.registry under ({kind!r}, {variant!r})",
        )
    return implementation(**settings)
