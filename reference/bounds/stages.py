"""From a stage of the oracle to the spreads of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from harness.types import InvalidRun, UsageError
from reference import rope as rope_frequencies

from . import attention, experts, hyper, router
from .algebra import Spread, V, exact
from .compressor import compress
from .indexer import index
from .linear import grouped, linear
from .norm import rms_norm
from .plan import Plan, parse
from .rope import apply, table

#: The oracle and the formulas here are both float64: what they may differ by, relative to a value and to its tensor,
#: and absolutely (the entropy of a certain choice is zero up to float64's own noise).
AGREEMENT = 1e-9
NOISE = 1e-13


class OracleStage(Protocol):
    """What is read of a stage: short kind, config numbers under Hugging Face's names, float64 parameters."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def config(self) -> Mapping[str, object]: ...
    @property
    def params(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Case:
    """One question: a stage, its float64 inputs and oracle outputs, and a plan."""

    name: str
    config: Mapping[str, Any]
    params: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    given: Mapping[str, Tensor]
    plan: Plan

    @property
    def x(self) -> Tensor:
        """The tensor of a stage that has one (beside tables, positions and ids)."""
        return next(t for t in self.inputs.values() if t.is_floating_point())

    @property
    def eps(self) -> float:
        return float(self.config["rms_norm_eps"])

    def inv_freq(self, which: str) -> Tensor:
        """float64 rope frequencies of `main` or `compress`."""
        known = self.config.get(f"inv_freq_{which}")
        if isinstance(known, Tensor):
            return known.double()
        geometry = SimpleNamespace(
            qk_rope_head_dim=self.config["qk_rope_head_dim"], rope=self.config["rope_parameters"]
        )
        return rope_frequencies.frequencies(cast(Any, geometry))[which]


Rule = Callable[[Case], Mapping[str, Spread]]


def spread(
    stage: OracleStage,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    plan: Mapping[str, str],
    given: Mapping[str, Tensor] | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """(rss, total) of every output of `stage`, float64 and of the outputs' shapes.

    `inputs` are exactly what production got, upcast; `outputs` the oracle's, with the selection score of every
    candidate under ``picks``; `given` picks that were made elsewhere. Outputs that are not floating point get zeros:
    they are exact. Scores of -inf get 0. Raises UsageError for a plan with unknown points, and InvalidRun when the
    oracle's values are not those of the formulas here: the bound would belong to another function.
    """
    kind = stage.kind
    upcast = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    params = {k: t.double() if t.is_floating_point() else t for k, t in stage.params.items()}
    case = Case(stage.name, stage.config, params, upcast, outputs, given or {}, parse(stage.name, kind, plan))
    with torch.no_grad():
        found = RULES[kind](case)
    result = {}
    for name, value in outputs.items():
        if not value.is_floating_point():
            zero = torch.zeros(value.shape, dtype=torch.float64, device=value.device)
            result[name] = (zero, zero)
            continue
        own = _checked(stage.name, name, found[name], value)
        result[name] = own.result()
    return result


def _checked(stage: str, name: str, own: Spread, oracle: Tensor) -> Spread:
    """`own` in the oracle's shape, once its value is the oracle's; -inf (not eligible) has no spread."""
    own = own.map(lambda t: t.reshape(oracle.shape))
    finite = oracle.isfinite()
    y = torch.where(finite, oracle, own.y).double()
    scale = y.abs() + (y.square().mean().sqrt() if y.numel() else 0.0)
    off = (own.y - y).abs() > AGREEMENT * scale + NOISE
    if bool((off & finite).any()):
        at = tuple(int(i) for i in torch.nonzero(off & finite)[0])
        raise InvalidRun(
            f"{stage}.{name}: the oracle has {float(oracle[at])!r} at {list(at)}, the formulas behind the margin "
            f"{float(own.y[at])!r}; they must be one function"
        )
    zero = torch.zeros((), dtype=torch.float64, device=oracle.device)
    return Spread(own.y, *(torch.where(finite, t, zero) for t in (own.var, own.lin, own.bias)))


def _only(case: Case, value: Spread) -> dict[str, Spread]:
    return dict.fromkeys(case.outputs, value)


def _embed(case: Case) -> dict[str, Spread]:
    return {name: exact(value.double()) for name, value in case.outputs.items() if value.is_floating_point()}


def _norm(case: Case) -> dict[str, Spread]:
    return _only(case, rms_norm(exact(case.x), case.params.get("weight"), case.eps, case.plan.dtype("rsqrt")))


def _linear(case: Case) -> dict[str, Spread]:
    weight = case.params["weight"]
    x = case.x.reshape(*case.x.shape[:2], -1) if case.x.shape[-1] != weight.shape[-1] else case.x
    return _only(case, linear(exact(x), weight, case.plan.dtype("weight")))


def _grouped(case: Case) -> dict[str, Spread]:
    flat = case.x.flatten(2)
    return _only(case, grouped(flat, case.params["weight"], int(case.config["o_groups"]), case.plan.dtype("weight")))


def _rope_cache(case: Case) -> dict[str, Spread]:
    found: dict[str, Spread] = {}
    for which in ("main", "compress"):
        pair = table(case.inputs["positions"], case.inv_freq(which), V, fp32_angle=case.plan.fp32_angle)
        found |= dict(zip((f"{which}_cos", f"{which}_sin"), pair, strict=True))
    return found


def _rotation(inverse: bool) -> Rule:
    def rule(case: Case) -> dict[str, Spread]:
        which = case.config["rope_layer_type"]
        name = next(iter(case.outputs))
        cos, sin = case.inputs[f"{which}_cos"], case.inputs[f"{which}_sin"]
        return _only(case, apply(case.inputs[name], cos, sin, case.plan.unit("table"), inverse=inverse))

    return rule


def _hyper(case: Case) -> dict[str, Spread]:
    p = case.params
    iterations = int(case.config["hc_sinkhorn_iters"])
    return hyper.connection(
        case.x, p["fn"], p["base"], p["scale"], eps=case.eps, hc_eps=float(case.config["hc_eps"]), iterations=iterations
    )


def _head(case: Case) -> dict[str, Spread]:
    p = case.params
    return hyper.head(case.x, p["fn"], p["base"], p["scale"], eps=case.eps, hc_eps=float(case.config["hc_eps"]))


def _mix(case: Case) -> dict[str, Spread]:
    i, plan = case.inputs, case.plan
    value = hyper.mix(i["streams"], i["post"], i["comb"], i["out"], coef=plan.dtype("coef"), terms=plan.unit("terms"))
    return _only(case, value)


def _compressor(case: Case) -> dict[str, Spread]:
    overlap = case.config["layer_type"] == "compressed_sparse_attention"
    rate = int(case.config["compress_rate"])
    pooled, keys = compress(
        case.x, case.params, case.inv_freq("compress"), case.plan, rate=rate, overlap=overlap, eps=case.eps
    )
    return {"pooled": pooled, "keys": keys}


def _indexer(case: Case) -> dict[str, Spread]:
    i = case.inputs
    keys, scores = index(
        i["x"],
        i["q_residual"],
        i["positions"],
        case.params,
        case.inv_freq("compress"),
        case.plan,
        rate=int(case.config["compress_rate"]),
        heads=int(case.config["index_n_heads"]),
        eps=case.eps,
    )
    return {"keys": keys, "scores": scores, "picks": scores}


def _attention(case: Case) -> dict[str, Spread]:
    keys = case.inputs["kv"]
    if "compressed" in case.inputs:
        keys = torch.cat((keys, case.inputs["compressed"]), 1)
    return attention.attention(
        case.inputs["q"],
        keys,
        case.outputs["visible"].bool(),
        case.params["sinks"],
        float(case.config["scaling"]),
        case.plan,
    )


def _router(case: Case) -> dict[str, Spread]:
    logits = router.logits(case.inputs["x"], case.params["weight"], case.plan)
    scores = router.scores(logits, case.plan)
    chosen = router.selection(scores, case.params.get("e_score_correction_bias"))
    factor = float(case.config["routed_scaling_factor"])
    return {"logits": logits, "weights": router.weights(scores, _picks(case), factor, case.plan), "picks": chosen}


def _picks(case: Case) -> Tensor:
    """The picks whose weights are judged: given ones, a hash table's, or the oracle's own, in its topk's order."""
    if "picks" in case.given:
        return case.given["picks"]
    if "tid2eid" in case.params:
        return case.params["tid2eid"][case.inputs["input_ids"]].long()
    own = case.outputs["picks"]
    if not own.is_floating_point():
        return own
    return torch.topk(own, int(case.config["num_experts_per_tok"]), dim=-1, sorted=False).indices


def _experts(case: Case) -> dict[str, Spread]:
    i, p = case.inputs, case.params
    picks, weights = i["picks"].flatten(0, 1), i["weights"].flatten(0, 1)
    block = experts.experts(
        i["x"].flatten(0, 1), picks, *_projections(p), limit=float(case.config["swiglu_limit"]), plan=case.plan
    )
    out = experts.combine(block.down, weights, picks, case.plan)
    return {"gate": block.gate, "up": block.up, "act": block.act, "down": block.down, "out": out}


def _shared(case: Case) -> dict[str, Spread]:
    limit = float(case.config["swiglu_limit"])
    block = experts.block(case.x.flatten(0, 1), *_projections(case.params), limit=limit, plan=case.plan)
    return {"gate": block.gate, "up": block.up, "act": block.act, "out": block.down}


def _projections(params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return params["gate_proj.weight"], params["up_proj.weight"], params["down_proj.weight"]


def _moe_sum(case: Case) -> dict[str, Spread]:
    """One addition. Its fp32 rounding counts beside the output's own, which may be coarser."""
    y = case.inputs["routed"] + case.inputs["shared"]
    return _only(case, exact(y).plus(V * y.abs()))


RULES: dict[str, Rule] = {
    "embed": _embed,
    "rope_cache": _rope_cache,
    "hc_head": _head,
    "attn_hc": _hyper,
    "ffn_hc": _hyper,
    "attn_mix": _mix,
    "ffn_mix": _mix,
    **dict.fromkeys(("final_norm", "attn_norm", "ffn_norm", "q_a_norm", "kv_norm", "q_b_norm"), _norm),
    **dict.fromkeys(("q_rope", "kv_rope"), _rotation(inverse=False)),
    "attn_unrope": _rotation(inverse=True),
    **dict.fromkeys(("lm_head", "q_a", "q_b", "kv", "o_b"), _linear),
    "o_a": _grouped,
    "compressor": _compressor,
    "indexer": _indexer,
    "attn_core": _attention,
    "router": _router,
    "experts": _experts,
    "shared_expert": _shared,
    "moe_sum": _moe_sum,
}


def kinds() -> list[str]:
    """Every stage kind that has a bound."""
    return sorted(RULES)


def require_known(kind: str) -> None:
    """UsageError for a kind without a bound."""
    if kind not in RULES:
        raise UsageError(f"no rounding bounds for stage kind {kind!r}; known kinds: {', '.join(kinds())}")
