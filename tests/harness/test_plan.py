"""The planner, on metadata alone: no tensor exists here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from harness import select
from harness.plan import NEVER, Plan, Request, Step, make_plan
from harness.types import UsageError


@dataclass(frozen=True)
class Out:
    name: str
    wire: str
    dims: tuple[str, ...] = ("B", "S")
    dtype: str = "bf16"
    role: str = "value"


@dataclass(frozen=True)
class Meta:
    """A stage without tensors."""

    name: str
    layer: int | None
    inputs: Mapping[str, str]
    outputs: tuple[Out, ...]
    covers: tuple[str, ...] = ()
    direct_with: str = ""
    plan: Mapping[str, str] = field(default_factory=dict)


def meta(name: str, *reads: str, partner: str = "") -> Meta:
    layer = int(name.split(".")[1]) if "." in name else None
    return Meta(name, layer, {r: r for r in reads}, (Out("x", f"{name}.x"),), (name,), partner)


def model() -> list[Meta]:
    stages = [meta("embed", "case.input_ids"), meta("table", "case.positions")]
    last = "embed.x"
    for n in range(3):
        at = f"layers.{n}."
        stages += [
            meta(at + "hc", last, partner=at + "mix"),
            meta(at + "a", at + "hc.x"),
            meta(at + "b", at + "a.x", "table.x"),
            meta(at + "mix", last, at + "b.x", partner=at + "hc"),
        ]
        last = at + "mix.x"
    return [*stages, meta("head", last)]


def plan(reference: Sequence[Meta] | None = None, production: Sequence[Meta] | None = None, **wishes: object) -> Plan:
    return make_plan(reference or model(), production or model(), Request(**wishes))  # type: ignore[arg-type]


def names(found: Plan) -> list[str]:
    return [s.stage for s in found.steps]


def step(found: Plan, name: str) -> Step:
    return next(s for s in found.steps if s.stage == name)


LAYER_1 = ["table", "layers.1.hc", "layers.1.a", "layers.1.b", "layers.1.mix"]


class TestScope:
    def test_a_layer_brings_the_shared_stages_it_reads(self) -> None:
        found = plan(layers="1")
        assert names(found) == LAYER_1
        assert found.compose == tuple(s.name for s in model()[:10])  # from the start to the layer's end
        assert found.oracle == tuple(LAYER_1)
        assert found.rows == 10

    def test_the_first_layer_brings_the_embedding(self) -> None:
        assert names(plan(layers="0"))[:2] == ["embed", "table"]

    def test_all_is_everything(self) -> None:
        assert names(plan()) == [s.name for s in model()]

    def test_a_stage_filter_runs_upstream_but_compares_only_itself(self) -> None:
        found = plan(layers="1", stages=("layers.1.b",))
        assert [s.stage for s in found.steps if s.compared] == ["layers.1.b"]
        assert [s.stage for s in found.steps if s.free_run] == LAYER_1[:4]
        assert not [s for s in plan(layers="1", stages=("b",), modes=("local",)).steps if s.free_run]

    def test_wires_live_until_their_last_reader(self) -> None:
        found = plan(layers="1")
        assert found.last_use["table.x"] == names(found).index("layers.1.b")
        assert found.last_use["layers.0.mix.x"] == names(found).index("layers.1.mix")

    @pytest.mark.parametrize(
        ("text", "layers"),
        [("0", (0,)), ("0-2", (0, 1, 2)), ("2,0", (0, 2)), ("all", (0, 1, 2)), ("0, 1-2", (0, 1, 2))],
    )
    def test_layer_syntax(self, text: str, layers: tuple[int, ...]) -> None:
        assert select.layers(text, [0, 1, 2]) == layers

    @pytest.mark.parametrize("text", ["3", "-1", "x", "", "0-", "2-1", "0-9", "1.0", "²", "0-1-2", "9" * 400, "all,1"])
    def test_wrong_layers_are_bad_input(self, text: str) -> None:
        with pytest.raises(UsageError, match="layer"):
            select.layers(text, [0, 1, 2])


class TestNames:
    @pytest.mark.parametrize("option", ["stages", "bypass", "replace"])
    def test_a_glob_that_matches_nothing_names_a_close_match(self, option: str) -> None:
        value = {"stages": "layers.1.hx", "bypass": "layers.1.hx=reference", "replace": "layers.1.hx=f.py:g"}[option]
        with pytest.raises(UsageError, match=r"matches no stage; did you mean 'layers\.1\.hc'"):
            plan(layers="1", **{option: (value,)})

    def test_a_stage_outside_the_run_says_so(self) -> None:
        with pytest.raises(UsageError, match="that this run leaves out"):
            plan(layers="1", stages=("layers.2.a",))

    @pytest.mark.parametrize("value", ["layers.1.a", "=reference", "layers.1.a=", "layers.1.a=nothing"])
    def test_malformed_bypass(self, value: str) -> None:
        with pytest.raises(UsageError, match=r"expected .*production"):
            plan(layers="1", bypass=(value,))

    def test_replacing_what_is_bypassed_is_a_contradiction(self) -> None:
        with pytest.raises(UsageError, match="bypassed too"):
            plan(layers="1", bypass=("a=reference",), replace=("a=f.py:g",))


class TestBypass:
    def test_reference_skips_the_local_row_only(self) -> None:
        found = plan(layers="1", bypass=("layers.1.*=reference", "layers.1.a=production"))
        assert {s.stage: s.bypass for s in found.steps}["layers.1.a"] == "production"
        assert step(found, "layers.1.b").skips_local == "bypassed: reference"
        assert step(found, "layers.1.a").skips_local is None
        assert step(found, "layers.1.b").free_run

    def test_direct_sets_both_partners(self) -> None:
        found = plan(layers="1", bypass=("layers.1.mix=direct",))
        assert found.direct == ("layers.1.hc", "layers.1.mix")
        assert [s.stage for s in found.steps if s.bypass == "direct"] == ["layers.1.hc", "layers.1.mix"]
        assert step(found, "layers.1.hc").skips_local

    def test_direct_residual_reaches_the_layers_before(self) -> None:
        assert len(plan(layers="1", direct_residual=True).direct) == 6

    def test_a_stage_without_a_direct_form(self) -> None:
        with pytest.raises(UsageError, match="no direct-residual form"):
            plan(layers="1", bypass=("a=direct",))


class TestDisagreement:
    def test_a_stage_that_nothing_covers_was_never_produced(self) -> None:
        found = plan(production=[s for s in model() if s.name != "layers.1.a"], layers="1")
        assert names(found) == LAYER_1  # at its place in execution order
        lonely = step(found, "layers.1.a")
        assert (lonely.fault, lonely.produced, lonely.free_run) == (NEVER, False, False)
        assert step(found, "layers.1.b").free_run

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"outputs": (Out("x", "layers.1.a.x", dims=("S", "B")),)}, "has dims"),
            ({"outputs": (Out("x", "layers.1.a.x", role="exact"),)}, "has role"),
            ({"outputs": (Out("y", "layers.1.a.y"),)}, "does not return 'layers.1.a.x'"),
            ({"covers": ("layers.1.a", "layers.1.zz")}, "covers 'layers.1.zz'"),
            ({"inputs": {"x": "nobody.x"}}, "reads 'nobody.x'"),
        ],
    )
    def test_a_difference_is_the_fault_of_that_stage(self, change: dict[str, object], words: str) -> None:
        odd = [replace(s, **change) if s.name == "layers.1.a" else s for s in model()]  # type: ignore[arg-type]
        found = plan(production=odd, layers="1")
        assert words in str(step(found, "layers.1.a").fault)
        assert not step(found, "layers.1.b").fault

    def test_a_name_listed_twice(self) -> None:
        with pytest.raises(UsageError, match="twice"):
            plan(production=[*model(), model()[0]])

    def test_a_fused_stage_stands_for_what_it_covers(self) -> None:
        parts = ("layers.1.a", "layers.1.b")
        fused = Meta("ab", 1, {"x": "layers.1.hc.x", "t": "table.x"}, (Out("x", "layers.1.b.x"),), parts)
        production = [fused if s.name == parts[1] else s for s in model() if s.name != parts[0]]
        found = plan(production=production, layers="1")
        assert names(found) == ["table", "layers.1.hc", "ab", "layers.1.mix"]
        assert step(found, "ab").covers == parts
        assert step(found, "ab").fault is None
        assert [s.stage for s in plan(production=production, stages=("layers.1.a",)).steps if s.compared] == ["ab"]

    def test_a_fused_stage_may_reach_into_the_next_layer(self) -> None:
        parts = ("layers.0.mix", "layers.1.hc")
        outputs = (Out("x", "layers.0.mix.x"), Out("y", "layers.1.hc.x"))
        fused = Meta("mix_hc", 1, {"s": "embed.x", "b": "layers.0.b.x"}, outputs, parts)
        production = [fused if s.name == parts[1] else s for s in model() if s.name != parts[0]]
        assert step(plan(production=production, layers="1"), "mix_hc").fault is None
        hidden = replace(fused, outputs=outputs[1:])  # the streams are read outside, so they must come out
        production = [hidden if s.name == "mix_hc" else s for s in production]
        assert "does not return 'layers.0.mix.x'" in str(step(plan(production=production), "mix_hc").fault)
