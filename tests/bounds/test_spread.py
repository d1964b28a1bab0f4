"""The interface of reference.bounds: shapes, plans, refusals and the corners where a spread must be zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.judge.margin import LAMBDA
from harness.types import InvalidRun, UsageError
from reference.bounds import spread
from reference.bounds.algebra import REACH, coherent, exact, rounding_key
from reference.bounds.plan import POINTS
from reference.bounds.stages import RULES
from tests.bounds.emulate import Arithmetic, run
from tests.bounds.plans import PRODUCTION, REFERENCE, plan
from tests.bounds.scenes import MAKE, Scene, scene


def judge(
    s: Scene, points: dict[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    oracle = run(s.kind, Arithmetic(), s.config, s.params, s.inputs)
    given = {"picks": s.config["picks"]} if s.kind == "router" else None
    return oracle, spread(s, s.inputs, oracle, points, given)


@pytest.mark.parametrize("stage", list(MAKE))
@pytest.mark.parametrize("which", ["reference", "production", "fp32"])
def test_every_output_has_a_float64_spread(stage: str, which: str) -> None:
    s = scene(stage, "normal", 33, 0, "bf16")
    oracle, found = judge(s, plan(s.kind, which))
    assert set(found) == set(oracle)
    for name, (rss, total) in found.items():
        assert rss.shape == total.shape == oracle[name].shape
        assert rss.dtype == total.dtype == torch.float64
        assert bool((rss >= 0).all())
        assert bool((total >= rss).all())
        assert bool(rss.isfinite().all())
        assert bool(total.isfinite().all())
        if not oracle[name].is_floating_point():
            assert not bool(rss.any())


def test_every_kind_has_points_and_a_rule() -> None:
    assert set(POINTS) == set(RULES)
    for table in (REFERENCE, PRODUCTION):
        for kind, points in table.items():
            assert set(points) <= set(POINTS[kind])


def test_unknown_points_are_refused_with_the_valid_ones() -> None:
    s = scene("linear", "normal", 3, 0, "bf16")
    with pytest.raises(UsageError, match="valid points: weight, acc, out"):
        judge(s, {"wieght": "bf16"})
    with pytest.raises(UsageError, match="valid dtypes: bf16, fp32, exact"):
        judge(s, {"weight": "tf32"})
    with pytest.raises(UsageError, match="cannot be bf16"):
        judge(s, {"acc": "bf16"})


def test_a_point_may_carry_the_stage_in_front() -> None:
    s = scene("linear", "normal", 3, 0, "bf16")
    _, bare = judge(s, {"weight": "bf16"})
    _, full = judge(s, {f"{s.name}.weight": "bf16"})
    assert torch.equal(bare["y"][0], full["y"][0])


def test_an_oracle_of_another_function_is_invalid() -> None:
    s = scene("mix", "normal", 3, 0, "bf16")
    oracle = run(s.kind, Arithmetic(), s.config, s.params, {**s.inputs, "comb": s.inputs["comb"].mT})
    with pytest.raises(InvalidRun, match=r"attn_mix\.streams"):
        spread(s, s.inputs, oracle, plan(s.kind, "production"))


@pytest.mark.parametrize("stage", ["norm", "head_norm", "linear", "o_a", "rope", "mix", "moe_sum", "shared", "experts"])
def test_zero_inputs_have_no_spread(stage: str) -> None:
    s = scene(stage, "normal", 3, 0, "bf16")
    kept = ("post", "comb", "weights", "compress_cos", "compress_sin", "main_cos", "main_sin")
    zeros = {k: t if k in kept or not t.is_floating_point() else torch.zeros_like(t) for k, t in s.inputs.items()}
    for which in ("reference", "production", "fp32"):
        _, found = judge(replace(s, inputs=zeros), plan(s.kind, which))
        assert all(not bool(total.any()) for _, total in found.values())


def test_scores_that_are_not_eligible_have_none() -> None:
    s = scene("indexer", "normal", 9, 0, "bf16")
    oracle, found = judge(s, plan("indexer", "production"))
    late = oracle["scores"] == float("-inf")
    assert bool(late.any())
    assert not bool(found["scores"][1][late].any())
    assert not bool(found["picks"][1][late].any())


@pytest.mark.parametrize("stage", ["csa", "hca", "indexer"])
def test_no_compressed_entry_yet(stage: str) -> None:
    s = scene(stage, "normal", 3, 0, "bf16")
    oracle, found = judge(s, plan(s.kind, "reference"))
    assert oracle["keys"].shape[1] == 0
    assert found["keys"][0].shape == oracle["keys"].shape


def test_one_visible_key_and_none() -> None:
    s = scene("attention", "normal", 9, 0, "bf16")
    visible = torch.zeros_like(s.config["visible"])
    visible[:, 1:, 0] = True  # the first query sees nothing, the others one key
    s = replace(s, config={**s.config, "visible": visible})
    oracle, found = judge(s, plan("attn_core", "production"))
    assert not bool(oracle["out"][:, 0].any())
    assert not bool(found["out"][1][:, 0].any())
    assert float(found["lse"][1][:, 0].max()) < 1e-5  # the sink alone
    assert float(found["entropy"][1][:, 1:].max()) < 1e-4


def test_weights_follow_the_given_picks() -> None:
    s = scene("router", "normal", 9, 0, "bf16")
    _, found = judge(s, plan("router", "production"))
    turned = replace(s, config={**s.config, "picks": s.config["picks"].flip(-1)})
    _, flipped = judge(turned, plan("router", "production"))
    assert torch.allclose(found["weights"][0], flipped["weights"][0].flip(-1), rtol=1e-12)


def test_a_representable_weight_costs_nothing() -> None:
    s = scene("linear", "normal", 9, 0, "bf16")
    s = replace(s, params={"weight": s.params["weight"].to(torch.bfloat16).double()})
    _, exactly = judge(s, {"out": "bf16"})
    _, rounded = judge(s, {"weight": "bf16", "out": "bf16"})
    assert torch.equal(exactly["y"][0], rounded["y"][0])


def test_the_engine_and_the_bounds_mean_the_same_lambda() -> None:
    """A known error enters rss as a fifth, so that the margin counts it once."""
    assert REACH == LAMBDA


def test_a_known_rounding_counts_once_and_a_tie_counts_as_unknown() -> None:
    one = torch.tensor([1.0 + 2.0**-10, 1.0 + 2.0**-8], dtype=torch.float64)  # a quarter ulp above 1, and a tie
    noise = torch.full_like(one, 1e-6)
    found = exact(one).plus(noise).fixed("bf16")
    assert found.bias.tolist() == [-(2.0**-10), 0.0]
    assert float(found.var[0]) == 0.0
    assert float(found.rss[1]) == pytest.approx(2.0**-8, rel=0.01)
    rss, total = found.result()
    assert float(torch.minimum(LAMBDA * rss, total)[0]) == pytest.approx(2.0**-10)


def test_equal_values_err_alike() -> None:
    """128 equal terms: the errors add up plainly; 128 different ones: as a root of squares."""
    amplitude = torch.full((128,), 1e-3, dtype=torch.float64)
    same, apart = torch.full((128,), 3.0, dtype=torch.float64), torch.linspace(1.0, 2.0, 128, dtype=torch.float64)
    assert float(coherent(amplitude, rounding_key(same), 0).sqrt()) == pytest.approx(0.128)
    assert float(coherent(amplitude, rounding_key(apart), 0).sqrt()) == pytest.approx(1e-3 * 128**0.5)
