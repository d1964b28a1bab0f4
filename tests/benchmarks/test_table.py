"""The README's table of costs is what the stored measurement says, a missed limit included."""

from __future__ import annotations

from benchmarks import table


def test_readme_shows_the_stored_figures() -> None:
    text = (table.ROOT / "README.md").read_text()
    assert table.BEGIN in text
    assert table.placed(text) == text, "run python -m benchmarks.table"


def test_a_missed_limit_shows() -> None:
    machine = {"cores": 2, "machine": "x86_64", "torch": "2", "transformers": "5"}
    figures = {
        "a": {"value": 1.4, "limit": 1.5, "ok": True, "meaning": "m"},
        "b": {"value": 1.6, "limit": 1.5, "ok": False, "meaning": "m"},
    }
    lines = table.table({"figures": figures, "machine": machine}).splitlines()
    assert "exceeded" not in lines[2]
    assert "**1.6, exceeded**" in lines[3]
