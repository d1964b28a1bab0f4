"""The smallest faults that must be seen, on inputs built to show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.faults.catalogue import CATALOGUE, DERIVED, Fault, Function, Scenario
from cases.faults.stand import Stand
from harness.records import Verdict

FP32, NATIVE = Scenario("fp32", dtype="fp32"), Scenario("fp32")
Prepare = Callable[[Scenario], Stand]


def verdicts(stand: Stand, stage: str, function: Function, stress: Any = None) -> set[Verdict]:
    words = "built" if stress else ""
    made, _ = stand.planted(Fault("probe", stage, "c", DERIVED, stress=stress, stressed=words, function=function))
    return {row.verdict for row in made.values()}


def clean(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
    made: dict[str, Tensor] = stage.run(**inputs)
    return made


def one_element(output: str, change: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """Change the first element of at least RMS size: change(element, rms)."""

    def function(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
        made = clean(stage, **inputs)
        flat = made[output].clone().flatten()
        finite = torch.nan_to_num(flat.float(), 0.0, 0.0, 0.0)
        rms = finite.square().mean().sqrt()
        at = int((finite.abs() >= rms).nonzero()[0])
        flat[at] = change(flat[at], rms)
        return {**made, output: flat.view(made[output].shape)}

    return function


def value_outputs(stand: Stand, layers: set[int | None]) -> list[tuple[str, str]]:
    names = [s.stage for s in stand.bench.plan.steps if s.layer in layers]
    stages = [stand.bench.production[n] for n in names]
    return [(s.name, o.name) for s in stages for o in s.outputs if o.role == "value"]


def test_one_element_two_percent_off_in_fp32(stand: Prepare) -> None:
    ready = stand(FP32)
    seen = {
        (stage, output): verdicts(ready, stage, one_element(output, lambda x, rms: x * 1.02))
        for stage, output in value_outputs(ready, {2, None})
    }
    assert len(seen) > 40
    assert [k for k, v in seen.items() if v != {Verdict.FAIL}] == []


def test_one_element_a_tenth_of_rms_off_in_bf16(stand: Prepare) -> None:
    ready = stand(NATIVE)
    seen = {
        (stage, output): verdicts(ready, stage, one_element(output, lambda x, rms: x + 0.1 * rms))
        for stage, output in value_outputs(ready, {2, None})
    }
    assert [k for k, v in seen.items() if v != {Verdict.FAIL}] == []


@pytest.mark.parametrize("stage", ["layers.2.attn_norm", "layers.2.q_a"])
@pytest.mark.parametrize("scenario", [FP32, NATIVE], ids=["fp32", "native"])
def test_one_wrong_token_in_4096(stage: str, scenario: Scenario, stand: Prepare) -> None:
    ready = stand(scenario)
    long = {"x": lambda t: t.repeat(1, 4096 // t.shape[1] + 1, 1)[:, :4096].contiguous()}

    def wrong(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
        made = {name: t.clone() for name, t in clean(stage, **inputs).items()}
        for t in made.values():
            assert t.shape[1] == 4096
            t[:, 4001] = t[:, 4000]
        return made

    assert verdicts(ready, stage, clean, long) == {Verdict.PASS}
    assert verdicts(ready, stage, wrong, long) == {Verdict.FAIL}


@pytest.mark.parametrize("stage", ["layers.2.q_a", "layers.2.experts", "layers.2.shared_expert", "layers.2.o_a"])
def test_one_ulp_in_one_percent_of_the_block_scales(stage: str, stand: Prepare) -> None:
    def shifted(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
        params = {}
        for name, t in stage.params.items():
            if name.endswith("weight_scale"):
                codes = t.contiguous().view(torch.uint8).clone().flatten()
                codes[::100] += torch.where(codes[::100] < 0x7E, 1, -1).to(torch.uint8)
                params[name] = codes.view(t.shape).view(t.dtype)
        assert params
        made: dict[str, Tensor] = stage.run(params=params, **inputs)
        return made

    assert verdicts(stand(FP32), stage, shifted) == {Verdict.FAIL}


@pytest.mark.parametrize("stage", ["layers.2.q_a", "layers.2.q_b", "layers.2.kv", "layers.2.o_b"])
def test_one_swapped_nibble(stage: str, stand: Prepare) -> None:
    def swapped(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
        codes = stage.params["weight"].clone()
        at = tuple(((codes & 7) != (codes >> 4 & 7)).nonzero()[0])
        codes[at] = (codes[at] << 4) | (codes[at] >> 4)
        made: dict[str, Tensor] = stage.run(params={"weight": codes}, **inputs)
        return made

    assert verdicts(stand(FP32), stage, swapped) == {Verdict.FAIL}


@pytest.mark.parametrize(
    "name", ["yarn-on-sliding-layers", "sinkhorn-19-iterations", "sink-rounded-to-bf16", "rope-bf16-table"]
)
def test_faults_of_the_catalogue_in_fp32(name: str, stand: Prepare) -> None:
    entry = CATALOGUE[name]
    assert entry.function is not None
    assert verdicts(stand(FP32), entry.stage, entry.function) == {Verdict.FAIL}


def test_yarn_on_a_sliding_layer(stand: Prepare) -> None:
    """The table is right and the layer takes the other one."""
    from cases.faults.catalogue import configured

    def compress(stage: Any, **inputs: Tensor) -> dict[str, Tensor]:
        return configured(stage, inputs, table="compress")

    for stage in ("layers.0.q_rope", "layers.0.kv_rope", "layers.0.attn_unrope"):
        assert verdicts(stand(FP32), stage, compress) == {Verdict.FAIL}
