"""The README's GPU table is what the evidence says, and says so when the kernels have changed since."""

from __future__ import annotations

from benchmarks import evidence
from production.cuda import loader


def test_readme_shows_the_evidence() -> None:
    text = (evidence.ROOT / "README.md").read_text()
    assert evidence.BEGIN in text
    assert evidence.placed(text) == text, "run python -m benchmarks.evidence"


def test_changed_sources_make_it_stale() -> None:
    made_from = evidence._read(evidence.FOLDER / "parity.jsonl")[0]["sources"]
    assert "stale" not in evidence.table(sources=made_from)
    assert evidence.table(sources="0" * 16).count("stale") == 7  # parity and time of three kernels, and the sanitizer


def test_every_line_is_shown_whatever_it_says() -> None:
    for name in ("parity", "bench", "sanitizer"):
        header = evidence._read(evidence.FOLDER / f"{name}.jsonl")[0]
        assert {"command", "sources", "gpu", "driver", "torch"} <= header.keys()
    assert len(loader.source_hash()) == 16
