"""Other ways to compute a stage: bypassed, direct-residual, fused, replaced; and sides that cannot be built."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from harness.records import Config, Skip
from harness.types import UsageError
from tests.harness import toy
from tests.harness.conftest import Run, bump, changed, rows, summary

Outputs = dict[str, Tensor]


class TestBypass:
    def test_reference_mends_a_broken_stage(self, run: Run) -> None:
        toy.FAULTS["layers.0.proj"] = changed("y", lambda x: x * 3)
        records = run(bypass=("layers.0.proj=reference",))
        assert summary(records).exit_code == 0
        assert any(isinstance(r, Skip) and r.stage == "layers.0.proj" and r.mode == "local" for r in records)
        assert rows(records, "free")["layers.0.proj"].bypass == "reference"
        assert isinstance(records[0], Config)
        assert records[0].bypass == {"layers.0.proj": "reference"}

    def test_reference_routes_with_the_replayed_picks(self, run: Run) -> None:
        assert summary(run(bypass=("layers.*=reference",))).exit_code == 0

    def test_direct_residual(self, run: Run) -> None:
        records = run(direct_residual=True)
        assert summary(records).exit_code == 0
        direct = [s for s, r in rows(records, "free").items() if r.bypass == "direct"]
        assert direct == ["layers.0.pre", "layers.0.post", "layers.1.pre", "layers.1.post"]
        assert [r.stage for r in records if isinstance(r, Skip) and r.mode == "local"] == direct

    def test_a_fault_in_the_direct_arithmetic_shows(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        direct = toy.ToyDirect.direct

        def wrong(self: toy.ToyDirect, **inputs: Tensor) -> Outputs:
            found = direct(self, **inputs)
            return {n: t * 1.2 for n, t in found.items()} if self.side == "production" else found

        monkeypatch.setattr(toy.ToyDirect, "direct", wrong)
        fault = summary(run(bypass=("layers.1.pre=direct",))).first_fault
        assert fault is not None
        assert (fault.stage, fault.mode) == ("layers.1.pre", "free")


class TestFused:
    def fuse(self, *names: str) -> None:
        toy.TWEAKS["production"] = lambda stages: toy.fuse(stages, *names)

    def test_a_clean_fused_stage_passes(self, run: Run) -> None:
        self.fuse("layers.0.pre", "layers.0.proj")
        records = run()
        assert summary(records).exit_code == 0
        row = rows(records, "local")["layers.0.pre+layers.0.proj"]
        assert row.covers == ("layers.0.pre", "layers.0.proj")
        assert {t.wire for t in row.tensors} == {"layers.0.pre.coef", "layers.0.pre.x", "layers.0.proj.y"}

    def test_across_layers(self, run: Run) -> None:
        self.fuse("layers.0.post", "layers.1.pre")
        assert summary(run()).exit_code == 0
        assert summary(run(layers="1")).exit_code == 0

    def test_a_fault_inside_is_found_at_the_boundary(self, run: Run) -> None:
        name = "layers.0.pre+layers.0.proj"
        self.fuse("layers.0.pre", "layers.0.proj")
        toy.FAULTS[name] = changed("layers.0.proj.y", bump((0, 3, 4), 1.1))
        fault = summary(run()).first_fault
        assert fault is not None
        assert (fault.stage, fault.tensor) == (name, "layers.0.proj.y")


class TestBadInput:
    def test_a_side_that_cannot_be_built(self, run: Run) -> None:
        toy.TWEAKS["build"] = ValueError("shard 2\nis truncated")
        with pytest.raises(UsageError, match=r"^production: shard 2 is truncated$"):
            run()

    def test_a_bug_in_a_builder_is_not_hidden(self, run: Run) -> None:
        toy.TWEAKS["build"] = RuntimeError("bug")
        with pytest.raises(RuntimeError):
            run()

    @pytest.mark.parametrize("spec", ["nowhere.at_all:model", "tests.harness.toy", "tests.harness.toy:V", ":x"])
    def test_import_strings(self, run: Run, spec: str) -> None:
        with pytest.raises(UsageError, match="production"):
            run(production=spec)


def write(folder: Path, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(body)
    return f"{path}:fn"


class TestReplace:
    def test_a_function_around_the_stage(self, run: Run, tmp_path: Path) -> None:
        target = write(tmp_path, "def fn(stage, x):\n    return {'y': stage.run(x=x)['y'] * 2}\n")
        records = run(layers="1", replace=(f"layers.1.proj={target}",))
        done = summary(records)
        assert done.first_fault is not None
        assert (done.first_fault.stage, done.first_fault.mode) == ("layers.1.proj", "local")
        assert rows(records, "free")["layers.1.proj"].replaced == target

    def test_parameters_can_be_overridden(self, run: Run, tmp_path: Path) -> None:
        target = write(
            tmp_path,
            "def fn(stage, x):\n    return stage.run(x=x, params={'weight': stage.params['weight'].flip(0)})\n",
        )
        fault = summary(run(layers="1", replace=(f"proj={target}",))).first_fault
        assert fault is not None
        assert fault.stage == "layers.1.proj"

    def test_a_correct_replacement_passes_even_if_it_picks_by_itself(self, run: Run, tmp_path: Path) -> None:
        target = write(
            tmp_path,
            "def fn(stage, x):\n"
            "    logits = x.float() @ stage.params['weight'].float().T\n"
            "    scores = logits.sigmoid()\n"
            "    picks = scores.topk(2, -1).indices.flip(-1)\n"
            "    weights = scores.gather(-1, picks)\n"
            "    return {'logits': logits, 'picks': picks, 'weights': weights / weights.sum(-1, keepdim=True)}\n",
        )
        records = run(replace=(f"router={target}",), length=200)
        assert summary(records).exit_code == 0

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ("def fn(stage, x):\n    return {'z': x}\n", "expected the outputs y"),
            ("def fn(stage, x):\n    return [x]\n", "expected a dict"),
            ("def fn(stage, x):\n    return {'y': 3}\n", "expected a tensor"),
            ("def fn(stage, x):\n    raise KeyError('oops')\n", "raised KeyError"),
            ("def fn(stage):\n    return {}\n", "raised TypeError"),
            ("def other():\n    pass\n", "no function 'fn' in it; it has other"),
            ("import nothing_like_this\n", "loading raised ModuleNotFoundError"),
            ("def fn(:\n", "loading raised SyntaxError"),
        ],
    )
    def test_what_is_wrong_with_it_is_the_users(self, run: Run, tmp_path: Path, body: str, words: str) -> None:
        with pytest.raises(UsageError, match="--replace") as caught:
            run(layers="1", replace=(f"layers.1.proj={write(tmp_path, body)}",))
        assert words in str(caught.value)

    @pytest.mark.parametrize("target", ["nofile.py:fn", "nofile", "x:y", ":"])
    def test_no_such_file(self, run: Run, target: str) -> None:
        with pytest.raises(UsageError, match="--replace"):
            run(layers="1", replace=(f"layers.1.proj={target}",))
