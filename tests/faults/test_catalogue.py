"""The catalogue is well formed, and every fault of the project's history is caught in its stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import cases.faults.declared
from cases.faults.catalogue import CATALOGUE, DERIVED, HISTORY, Fault, Scenario, add
from cases.faults.run import choose, result
from cases.faults.stand import Stand
from harness import case as cases
from harness.types import UsageError

NAMED = [
    "nvfp4-weights-not-permuted",
    "nvfp4-scales-transposed",
    "nvfp4-ws2-dropped",
    "nvfp4-input-scale-folded",
    "fp4-viewed-as-integers",
    "experts-stacked-in-wrong-order",
    "sink-as-zero-key",
    "sink-in-value-sum",
    "kv-length-padded-to-128",
    "hc-split-pre-comb-post",
    "comb-not-transposed",
    "sinkhorn-from-exp",
    "pre-eps-missing",
    "q-b-norm-missing",
    "rope-plain-instead-of-yarn",
    "hyper-head-stream-0",
    "o-a-projection-missing",
]
FAMILY = [*NAMED, "nvfp4-ws2-dropped-in-experts", "nvfp4-ws2-dropped-in-shared-expert"]


def test_history_is_there_by_name() -> None:
    assert len(NAMED) == 17
    assert sorted(i for i, f in CATALOGUE.items() if f.origin == HISTORY) == sorted(FAMILY)


def test_entries_are_well_formed() -> None:
    for name, entry in CATALOGUE.items():
        assert name == entry.id == "".join(name.split())
        assert entry.origin in (HISTORY, DERIVED) or entry.origin.startswith("https://"), name
        assert bool(entry.stress) == bool(entry.stressed), name
        assert entry.waits_for or entry.scenario.case in cases.bundled(), name


def test_the_catalogue_reads_neither_reference_nor_oracle() -> None:
    for file in Path(cases_folder()).glob("*.py"):
        assert "import reference" not in (text := file.read_text()), file
        assert "from reference" not in text, file


def cases_folder() -> Path:
    return Path(cases.__file__).parent.parent / "cases" / "faults"


def test_every_stage_exists(stand: Callable[[Scenario], Stand]) -> None:
    """Cheaply: production's stage names are the same in every scenario, but for the caches."""
    known = {*stand(Scenario()).bench.production, *(f"layers.{n}.kv_cache" for n in range(6))}
    for entry in CATALOGUE.values():
        if entry.function is not None:
            assert {entry.stage, *entry.expected} <= known, entry.id


def test_two_of_one_id_are_refused() -> None:
    entry = next(iter(CATALOGUE.values()))
    with pytest.raises(ValueError, match="declared twice"):
        add(entry)


@pytest.mark.parametrize("change", [{"origin": ""}, {"function": None}, {"waits_for": "a GPU"}])
def test_incomplete_entries_are_refused(change: dict[str, object]) -> None:
    whole = {"id": "x", "stage": "q_a", "cause": "c", "origin": DERIVED, "function": lambda stage: {}}
    with pytest.raises(ValueError, match="expected"):
        Fault(**(whole | change))  # type: ignore[arg-type]


def test_a_glob_without_match_is_bad_input() -> None:
    with pytest.raises(UsageError, match="matches no fault"):
        choose("no-such-*")


@pytest.mark.parametrize("name", FAMILY)
def test_history_is_caught_and_placed(name: str, stand: Callable[[Scenario], Stand]) -> None:
    entry = CATALOGUE[name]
    found = result(stand(entry.scenario), entry, with_gates=False)
    assert found.caught
    assert found.stage_found == entry.stage


@pytest.mark.parametrize("stage", ["layers.2.attn_core", "layers.2.experts", "layers.2.attn_hc", "layers.2.indexer"])
def test_no_fault_is_no_fault(stage: str, stand: Callable[[Scenario], Stand]) -> None:
    nothing = Fault("nothing", stage, "none", DERIVED, function=lambda stage, **inputs: stage.run(**inputs))
    found = result(stand(nothing.scenario), nothing)
    assert (found.caught, found.stage_found, found.placed) == (False, None, False)
    assert {g: v.passed for g, v in found.gates.items()} == found.gates_clean


def test_a_fault_elsewhere_is_not_counted_as_placed(stand: Callable[[Scenario], Stand]) -> None:
    real = CATALOGUE["sink-as-zero-key"]
    wrong = Fault("wrong", real.stage, "c", DERIVED, expected=("layers.2.q_a",), function=real.function)
    found = result(stand(wrong.scenario), wrong, with_gates=False)
    assert found.caught
    assert not found.placed
