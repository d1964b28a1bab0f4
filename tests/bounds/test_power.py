"""What the margin catches: the figures of docs/numerics.md, as lower limits."""

from __future__ import annotations

import pytest

from tests.bounds.clean import rows
from tests.bounds.faults import FAULTS
from tests.bounds.scenes import MAKE

#: fault -> least share of instances caught under the production's plan and in an fp32 run
LEAST: dict[str, tuple[float, float]] = {
    "comb transposed, in comb": (1.0, 1.0),
    "comb transposed, in the mix": (1.0, 1.0),
    "comb transposed, in the mix of equal streams": (0.2, 0.4),
    "19 Sinkhorn iterations, comb logits sigma 2": (0.3, 0.3),
    "no eps on pre, logit <= -10": (1.0, 1.0),
    "sink in bf16, in lse": (0.75, 0.75),
    "sink in bf16, in out": (0.3, 0.7),
    "cos/sin table in bf16": (0.95, 0.95),
    "YaRN mscale on the table": (1.0, 1.0),
    "1 % of block scales one ulp off": (1.0, 1.0),
    "one block scale one ulp off": (1.0, 1.0),
    "one nibble off by one": (1.0, 1.0),
    "weight_scale_2 in bf16": (1.0, 1.0),
    "weight_scale_2 in bf16, shared down": (0.95, 1.0),
    "TF32 operands": (0.95, 1.0),
}
#: stages with one GEMM, or none, whose bf16 outputs have one rounding under the production's plan
SINGLE = ("norm", "head_norm", "linear", "o_a", "rope_cache", "rope", "unrope", "hyper", "hc_head", "mix", "moe_sum")


@pytest.mark.parametrize("fault", list(FAULTS))
def test_fault_is_caught(fault: str) -> None:
    check, _ = FAULTS[fault]
    for which, least in zip(("production", "fp32"), LEAST[fault], strict=True):
        share, worst = check(which)
        assert share >= least, f"{fault}, {which} plan: {share:.3f} caught, worst {worst:.2f} x the bound"


@pytest.mark.parametrize("stage", list(MAKE))
def test_two_percent_of_one_element_in_fp32(stage: str) -> None:
    for output, row in rows(stage, "normal", 33, 5, "fp32", "native"):
        assert row.caught == 1.0, f"{stage}.{output}: {row.caught:.4f} of the elements of at least RMS size"


@pytest.mark.parametrize("stage", SINGLE)
def test_two_percent_of_one_element_in_bf16(stage: str) -> None:
    for output, row in rows(stage, "normal", 33, 5, "production", "native"):
        assert row.caught == 1.0, f"{stage}.{output}: {row.caught:.4f} of the elements of at least RMS size"


def test_a_bf16_sink_hides_from_the_reference_plan() -> None:
    """Why production rounds once: under the reference's plan the same fault is invisible."""
    share, _ = FAULTS["sink in bf16, in out"][0]("reference")
    assert share < 0.05


def test_faults_and_limits_name_the_same() -> None:
    assert set(LEAST) == set(FAULTS)
