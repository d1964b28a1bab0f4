"""The README's GPU table is what the evidence says, and says so when the kernels have changed since."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import evidence
from production.cuda import loader


def test_readme_shows_the_evidence() -> None:
    text = (evidence.ROOT / "README.md").read_text()
    assert evidence.BEGIN in text
    assert evidence.placed(text) == text, "run python -m benchmarks.evidence"


def test_changed_sources_make_it_stale() -> None:
    now = loader.unit_hashes()
    fresh = evidence.table().count("stale")
    changed = evidence.table(now=dict.fromkeys(now, "0" * 16)).count("stale")
    rows = sum(line.startswith("| ") for line in evidence.table().splitlines()) - 1
    assert changed == 2 * rows + evidence.table().count("compute-sanitizer") > fresh


def test_only_a_units_own_sources_make_it_stale(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "a.cuh").write_text("1")
    (tmp_path / "x.cu").write_text('#include "include/a.cuh"\n')
    (tmp_path / "y.cu").write_text("#include <math.h>\n")
    first = loader.unit_hashes(tmp_path)
    (tmp_path / "include" / "a.cuh").write_text("2")
    second = loader.unit_hashes(tmp_path)
    assert first["x.cu"] != second["x.cu"]
    assert first["y.cu"] == second["y.cu"]


def test_every_file_says_what_it_was_made_from() -> None:
    for path in evidence.FOLDER.glob("*.jsonl"):
        header, *lines = map(json.loads, path.read_text().splitlines())
        assert {"command", "sources", "gpu", "driver", "torch"} <= header.keys(), path
        assert {line["unit"] for line in lines} <= header["sources"].keys(), path
