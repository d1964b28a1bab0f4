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
from production.experts import Nvfp4MoE
from production.grouped_linear import Bf16GroupedLinear, Nvfp4GroupedLinear
from production.head import LmHead
from production.hyper_connection import HyperConnection, ResidualMix
from production.hyper_head import HyperHead
from production.indexer import LightningIndexer
from production.linear import Bf16Linear, Nvfp4Linear
from production.norms import HeadNorm, RmsNorm
from production.rope import RopeCache, Rotation
from production.router import HashRouter, TopKRouter
from production.shared_expert import MoeSum, Nvfp4SharedExpert

IMPLEMENTATIONS: dict[tuple[str, str], type[Component]] = {
    ("embed", "bf16"): Embedding,
    ("rope_cache", "interleaved"): RopeCache,
    ("hyper_connection", "sinkhorn"): HyperConnection,
    ("residual_mix", "sinkhorn"): ResidualMix,
    ("hyper_head", "sigmoid"): HyperHead,
    ("norm", "rms"): RmsNorm,
    ("head_norm", "rms"): HeadNorm,
    ("linear", "nvfp4"): Nvfp4Linear,
    ("linear", "bf16"): Bf16Linear,
    ("grouped_linear", "nvfp4"): Nvfp4GroupedLinear,
    ("grouped_linear", "bf16"): Bf16GroupedLinear,
    ("rotation", "interleaved"): Rotation,
    ("compressor", "csa"): CsaCompressor,
    ("compressor", "hca"): HcaCompressor,
    ("indexer", "nvfp4"): LightningIndexer,
    ("indexer", "bf16"): LightningIndexer,
    ("attention", "sink"): SinkAttention,
    ("router", "dense sqrtsoftplus"): TopKRouter,
    ("router", "hash sqrtsoftplus"): HashRouter,
    ("experts", "nvfp4"): Nvfp4MoE,
    ("shared_expert", "nvfp4"): Nvfp4SharedExpert,
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
