"""The engine on the toy model: clean runs, planted faults, and who is blamed for what."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.records import Certification, Comparison, Config, Logits, Routing, Skip, Verdict, Weights
from tests.harness import toy
from tests.harness.conftest import Run, bump, changed, rows, summary

Outputs = dict[str, Tensor]


class TestClean:
    def test_every_stage_in_both_modes(self, run: Run) -> None:
        records = run()
        assert summary(records).exit_code == 0
        assert summary(records).line.startswith("PASS 15 stages")
        for mode in ("local", "free"):
            assert list(rows(records, mode)) == [s.name for s in toy.build("production")]
        assert isinstance(records[0], Config)
        assert records[0].planned == 30
        assert next(r for r in records if isinstance(r, Logits)).top1_agreement == 1
        assert len([r for r in records if isinstance(r, Routing)]) == 2
        assert all(r.verdict is Verdict.PASS for r in records if isinstance(r, Weights))
        assert all(r.ok for r in records if isinstance(r, Certification))

    def test_one_layer_starts_from_the_references_wires(self, run: Run) -> None:
        records = run(layers="1")
        assert summary(records).exit_code == 0
        assert list(rows(records, "free")) == ["table", *(s.name for s in toy.build("production") if s.layer == 1)]

    @pytest.mark.parametrize("changes", [{"length": 1}, {"length": 2}, {"batch": 3}, {"length": 70}, {"positions": 5}])
    def test_shapes(self, run: Run, changes: dict[str, int]) -> None:
        assert summary(run(**changes)).exit_code == 0

    def test_phases_are_timed(self, run: Run) -> None:
        done = summary(run())
        assert {"load", "audit", "reference", "certify", "local", "free", "oracle", "total"} <= set(done.seconds)
        assert done.peak_rss_bytes > 1 << 20

    def test_rows_carry_what_a_reader_needs(self, run: Run) -> None:
        found = rows(run(), "local")["layers.0.attn"]
        assert found.entropy is not None
        assert len(found.entropy.production) == toy.H
        assert found.entropy.uniform is not None
        out = next(t for t in found.tensors if t.tensor == "out")
        assert out.formula
        assert out.threshold["lambda"] == 5
        assert out.threshold["plan"] == "acc:fp32"
        assert found.reproduce == "harness diff --case toy.toml --layer 0 --stage layers.0.attn --mode local"
        assert rows(run(), "free")["layers.1.post"].stream_rms["production"]

    def test_experts_are_sliced_by_expert(self, run: Run) -> None:
        each = rows(run(), "local")["layers.0.experts"].tensors[0]
        assert "expert" in [s.dim for s in each.slices]


class TestProductionFaults:
    """Each fault is named at its own stage, and local rows go on behind it."""

    @pytest.mark.parametrize(
        ("stage", "output", "change", "words"),
        [
            ("layers.0.proj", "y", bump((0, 3, 4), 1.05), "x the margin at [0, 3, 4]"),
            ("layers.0.proj", "y", lambda x: x * 0, "zero everywhere"),
            ("layers.0.proj", "y", lambda x: x * math.nan, "NaN"),
            ("layers.0.proj", "y", lambda x: x.float(), "dtype fp32"),
            ("layers.0.proj", "y", lambda x: x[:, 1:], "shape [1, 23, 32]"),
            ("layers.0.proj", "y", lambda x: None, "never written"),
            ("layers.0.attn", "visible", lambda x: ~x, "elements differ"),
            ("layers.0.attn", "entropy", lambda x: x * 1.5, "RMS error"),
            ("layers.0.router", "picks", lambda x: (x + 1) % toy.E, "a pick that no rounding explains"),
            ("layers.0.router", "picks", lambda x: x * 0, "the same id twice"),
            ("layers.0.router", "picks", lambda x: x + 100, "out of range"),
            ("layers.0.router", "weights", bump((0, 0, 0), 1.01), "x the margin"),
            ("embed", "streams", bump((0, 0, 0, 0), 1.1), "elements differ"),
            ("table", "table", bump((0, 20, 5), 1.01), "x the margin"),
            ("head", "logits", lambda x: x * 1.01, "x the margin"),
        ],
    )
    def test_named_at_its_own_stage(self, run: Run, stage: str, output: str, change: Any, words: str) -> None:
        toy.FAULTS[stage] = changed(output, change)
        records = run()
        done = summary(records)
        assert done.exit_code == 1
        assert done.first_fault is not None
        assert (done.first_fault.stage, done.first_fault.mode) == (stage, "local")
        assert words in str(rows(records, "local")[stage].reason)
        assert done.line.startswith(f"FIRST FAULT: {stage} (local, ")
        others = [s for s, r in rows(records, "local").items() if r.verdict is not Verdict.PASS]
        assert others == [stage]

    def test_an_exception_is_a_finding(self, run: Run) -> None:
        def broken(outputs: Outputs, inputs: Outputs) -> Any:
            raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")

        toy.FAULTS["layers.0.attn"] = broken
        records = run()
        found = rows(records, "local")
        reason = "raised RuntimeError: CUDA error: an illegal memory access was encountered"
        assert (found["layers.0.attn"].verdict, found["layers.0.attn"].reason) == (Verdict.FAIL, reason)
        assert found["layers.1.attn"].verdict is Verdict.PASS
        assert rows(records, "free")["layers.0.attn"].reason == reason

    def test_free_rows_below_an_unusable_tensor_are_skipped_with_the_reason(self, run: Run) -> None:
        toy.FAULTS["layers.0.proj"] = changed("y", lambda x: x * math.nan)
        records = run()
        skipped = {r.stage: r.reason for r in records if isinstance(r, Skip)}
        assert "layers.0.attn" in skipped
        assert "head" in skipped
        assert "layers.0.router" not in skipped  # it reads another wire
        assert "layers.0.proj.y: " in skipped["head"]
        assert rows(records, "free")["layers.0.proj"].verdict is Verdict.FAIL
        assert rows(records, "local")["head"].verdict is Verdict.PASS

    def test_an_input_changed_in_place(self, run: Run) -> None:
        def scribble(outputs: Outputs, inputs: Outputs) -> Outputs:
            inputs["x"].mul_(2)
            return outputs

        toy.FAULTS["layers.0.proj"] = scribble
        assert "in place" in str(rows(run(modes=("local",)), "local")["layers.0.proj"].reason)

    def test_a_result_that_is_no_dict(self, run: Run) -> None:
        toy.FAULTS["layers.0.proj"] = lambda outputs, inputs: outputs["y"]
        assert "expected a dict" in str(rows(run(), "local")["layers.0.proj"].reason)

    def test_a_fault_that_only_free_rows_see(self, run: Run) -> None:
        """Right on the reference's inputs, wrong on its own: state that leaks from call to call."""
        calls: list[int] = []

        def second_call_is_wrong(outputs: Outputs, inputs: Outputs) -> Outputs:
            calls.append(1)
            return {"y": outputs["y"] * 1.5} if len(calls) == 2 else outputs

        toy.FAULTS["layers.1.proj"] = second_call_is_wrong
        fault = summary(run()).first_fault
        assert fault is not None
        assert (fault.stage, fault.mode) == ("layers.1.proj", "free")

    def test_picks_that_ignore_the_replay(self, run: Run) -> None:
        first = toy.build("production")

        class Deaf(toy.ToyStage):
            def run(self, *, params: Any = None, replay: Any = None, **inputs: Tensor) -> Outputs:
                outputs = super().run(params=params, **inputs)
                return {**outputs, "picks": (outputs["picks"] + (replay is not None)) % toy.E}

        def tweak(stages: list[toy.ToyStage]) -> list[toy.ToyStage]:
            return [Deaf(**vars(s)) if s.name == "layers.0.router" else s for s in stages]

        assert any(s.name == "layers.0.router" for s in first)
        toy.TWEAKS["production"] = tweak
        found = rows(run(), "free")["layers.0.router"]
        assert found.verdict is Verdict.FAIL
        assert "not the replayed ones" in str(found.reason)

    def test_a_zero_output_fails_every_stage(self, run: Run) -> None:
        for stage in toy.build("production"):
            toy.FAULTS[stage.name] = lambda outputs, inputs: {n: torch.zeros_like(t) for n, t in outputs.items()}
        found = rows(run(), "local")
        assert {r.verdict for r in found.values()} == {Verdict.FAIL}
        assert len(found) == 15


class TestSidesDisagree:
    def test_never_produced(self, run: Run) -> None:
        toy.TWEAKS["production"] = lambda stages: [s for s in stages if s.name != "layers.0.attn"]
        records = run()
        fault = summary(records).first_fault
        assert fault is not None
        assert fault.stage == "layers.0.attn"
        assert "never produced" in str(fault.reason)
        assert rows(records, "local")["layers.1.attn"].verdict is Verdict.PASS
        assert any(isinstance(r, Skip) and r.stage == "layers.0.post" and r.mode == "free" for r in records)

    def test_other_dims(self, run: Run) -> None:
        def swap(stages: list[toy.ToyStage]) -> list[toy.ToyStage]:
            out = replace(stages[3].outputs[0], dims=("S", "B", "d"))
            return [*stages[:3], replace(stages[3], outputs=(out,)), *stages[4:]]

        toy.TWEAKS["production"] = swap
        assert "has dims [S,B,d]" in str(rows(run(), "local")["layers.0.proj"].reason)


class TestInvalid:
    def test_an_uncertified_reference_compares_nothing(self, run: Run) -> None:
        toy.TWEAKS["certify"] = False
        records = run()
        done = summary(records)
        assert (done.exit_code, done.verdict) == (3, Verdict.INVALID)
        assert "wires" in str(done.reason)
        assert not rows(records)
        assert next(r for r in records if isinstance(r, Certification)).ok is False

    @pytest.mark.parametrize(
        ("change", "words"), [(lambda x: x * math.nan, "not finite"), (torch.ones_like, "one value everywhere")]
    )
    def test_a_broken_reference(self, run: Run, change: Callable[[Tensor], Tensor], words: str) -> None:
        class Broken(toy.ToyStage):
            def run(self, *, params: Any = None, replay: Any = None, **inputs: Tensor) -> Outputs:
                return {"y": change(super().run(**inputs)["y"])}

        toy.TWEAKS["reference"] = lambda stages: [Broken(**vars(s)) if s.name == "layers.1.proj" else s for s in stages]
        done = summary(run(layers="1", stages=("proj",), modes=("local",)))
        assert done.exit_code == 3
        assert words in str(done.reason)

    def test_shared_storage(self, run: Run) -> None:
        shared: Outputs = {}

        class Keeps(toy.ToyStage):
            def run(self, *, params: Any = None, replay: Any = None, **inputs: Tensor) -> Outputs:
                shared.update(super().run(**inputs))
                return dict(shared)

        toy.TWEAKS["reference"] = lambda stages: [Keeps(**vars(s)) if s.name == "layers.1.proj" else s for s in stages]
        toy.FAULTS["layers.1.proj"] = lambda outputs, inputs: dict(shared)
        done = summary(run(layers="1", modes=("local",)))
        assert done.exit_code == 3
        assert "shares its storage with layers.1.proj.y" in str(done.reason)

    def test_an_oracle_that_breaks_is_no_verdict_on_production(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        judge = toy.ToyOracle.judge

        def breaks(self: toy.ToyOracle, stage: str, *args: Any, **kwargs: Any) -> Any:
            if stage == "layers.0.proj":
                raise KeyError("no bound")
            return judge(self, stage, *args, **kwargs)

        monkeypatch.setattr(toy.ToyOracle, "judge", breaks)
        records = run()
        assert rows(records, "local")["layers.0.proj"].verdict is Verdict.INVALID
        assert rows(records, "local")["head"].verdict is Verdict.PASS
        assert summary(records).exit_code == 3

    def test_nothing_compared(self, run: Run) -> None:
        done = summary(run(layers="1", modes=("local",), stages=("proj",), bypass=("proj=reference",)))
        assert (done.exit_code, done.reason) == (3, "nothing was compared")


class TestWeights:
    def tweak(self, name: str, change: Callable[[Tensor], Tensor]) -> Callable[[list[Any]], list[Any]]:
        def go(stages: list[Any]) -> list[Any]:
            return [
                replace(s, params={k: change(p) for k, p in s.params.items()}) if s.name == name else s for s in stages
            ]

        return go

    def audit(self, records: list[Any], stage: str) -> Weights:
        return next(r for r in records if isinstance(r, Weights) and r.stage == stage)

    def test_one_factor_is_named(self, run: Run) -> None:
        toy.TWEAKS["production"] = self.tweak("layers.0.proj", lambda p: p * 0.25)
        found = self.audit(run(), "layers.0.proj")
        assert found.verdict is Verdict.FAIL
        assert found.slope == pytest.approx(0.25)
        assert "one factor explains it" in str(found.reason)

    def test_the_first_differing_coordinate_is_named(self, run: Run) -> None:
        toy.TWEAKS["production"] = self.tweak("layers.0.proj", bump((3, 5), 2.0))
        found = self.audit(run(), "layers.0.proj")
        assert (found.mismatches, found.slope) == (1, None)
        assert found.worst is not None
        assert found.worst.index == (3, 5)

    def test_a_transposed_expert_stack(self, run: Run) -> None:
        toy.TWEAKS["production"] = self.tweak("layers.0.router", lambda p: p.T)
        assert "transposed" in str(self.audit(run(), "layers.0.router").reason)

    def test_missing_and_unknown_parameters(self, run: Run) -> None:
        toy.TWEAKS["production"] = lambda stages: [
            replace(s, params={"wait": s.params["weight"], **dict(s.params)}) if s.name == "layers.0.proj" else s
            for s in stages
        ]
        found = [r for r in run(modes=("local",)) if isinstance(r, Weights) and r.stage == "layers.0.proj"]
        assert [(r.parameter, r.verdict) for r in found] == [("weight", Verdict.PASS), ("wait", Verdict.FAIL)]

    def test_weights_come_first_only_if_nothing_local_fails(self, run: Run) -> None:
        toy.TWEAKS["production"] = self.tweak("layers.1.proj", bump((0, 0), 1.0 + 2**-7))
        toy.FAULTS["layers.0.attn"] = changed("out", lambda x: x * 2)
        done = summary(run())
        assert done.first_fault is not None
        assert (done.first_fault.stage, done.first_fault.mode) == ("layers.0.attn", "local")

    def test_an_unused_wrong_weight_is_named_by_the_audit(self, run: Run) -> None:
        """A decode that is wrong where the case does not look (a row of the embedding that no token uses)."""

        class Decodes(toy.ToyStage):
            def decoded(self) -> Outputs:
                return {"weight": super().decoded()["weight"] + 1}

        toy.TWEAKS["production"] = lambda stages: [Decodes(**vars(s)) if s.name == "head" else s for s in stages]
        done = summary(run())
        assert done.first_fault is not None
        assert (done.exit_code, done.first_fault.stage, done.first_fault.mode) == (1, "head", "weights")


def test_a_row_is_made_of_one_comparison_a_mode(run: Run) -> None:
    seen = [(r.stage, r.mode) for r in run() if isinstance(r, Comparison)]
    assert len(seen) == len(set(seen)) == 30
