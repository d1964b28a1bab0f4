"""What CI reads: JUnit XML, a step summary, and the exit code of a comparison of two runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness import jsonl, junit
from harness.cli import main
from harness.records import Certification, Comparison, Record, Skip, Verdict, Weights
from tests.harness import toy


@pytest.fixture
def runs(toy_case: str, tmp_path: Path) -> tuple[str, str]:
    """Record files of a clean and of a faulty run."""
    good, bad = str(tmp_path / "good.jsonl"), str(tmp_path / "bad.jsonl")
    assert main(["diff", "--case", toy_case, "--json", good]) == 0
    toy.FAULTS["layers.1.attn"] = lambda outputs, inputs: {**outputs, "out": outputs["out"] * 1.5}
    assert main(["diff", "--case", toy_case, "--json", bad]) == 1
    return good, bad


class TestCompare:
    def test_a_regression(self, runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
        capsys.readouterr()
        assert main(["report", *runs]) == 1
        out = capsys.readouterr().out
        assert "worse   layers.1.attn (local)  verdict PASS -> FAIL" in out
        assert out.splitlines()[-1].startswith("WORSE: ")

    def test_none(self, runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
        capsys.readouterr()
        assert main(["report", runs[0], runs[0]]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "NO REGRESSION in 30 shared comparisons"
        assert main(["report", *reversed(runs)]) == 0
        assert "better  layers.1.attn (local)  verdict FAIL -> PASS" in capsys.readouterr().out

    def test_nothing_shared(self, runs: tuple[str, str], toy_case: str, tmp_path: Path) -> None:
        toy.FAULTS.clear()
        other, less = str(tmp_path / "other.jsonl"), str(tmp_path / "less.jsonl")
        assert main(["diff", "--case", toy_case, "--stage", "layers.0.proj", "--mode", "local", "--json", less]) == 0
        assert main(["diff", "--case", toy_case, "--stage", "layers.0.pre", "--mode", "free", "--json", other]) == 0
        assert main(["report", less, other]) == 3

    def test_in_the_step_summary(self, runs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target = tmp_path / "summary.md"
        target.write_text("before\n")
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(target))
        assert main(["report", *runs]) == 1
        text = target.read_text()
        assert text.startswith("before\n<pre><code>")
        assert "WORSE" in text


class TestStepSummary:
    def test_where_github_says(self, toy_case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target = tmp_path / "summary.md"
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(target))
        assert main(["diff", "--case", toy_case]) == 0
        assert "PASS" in target.read_text()

    def test_an_option_comes_first(self, toy_case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "a.md"))
        assert main(["diff", "--case", toy_case, "--step-summary", str(tmp_path / "b.md")]) == 0
        assert not (tmp_path / "a.md").exists()
        assert (tmp_path / "b.md").exists()

    def test_a_stale_variable_is_no_bad_input(self, toy_case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/nowhere/summary.md")
        assert main(["diff", "--case", toy_case]) == 0


def verdict_of(record: Record) -> Verdict | None:
    """What a record counts as in JUnit."""
    match record:
        case Certification():
            return Verdict.PASS if record.ok else Verdict.INVALID
        case Skip():
            return Verdict.SKIPPED
        case Weights():
            return record.verdict
        case Comparison():
            soft = record.mode == "free" and record.verdict is Verdict.INCONCLUSIVE
            return Verdict.SKIPPED if soft else record.verdict
        case _:
            return None


class TestJUnit:
    @pytest.fixture
    def records(self, runs: tuple[str, str]) -> list[Record]:
        return jsonl.read(Path(runs[1]))

    def parsed(self, records: list[Record], tmp_path: Path) -> Any:
        junit.write(records, tmp_path / "x.xml")
        return ElementTree.parse(tmp_path / "x.xml").getroot()

    def test_counts(self, records: list[Record], tmp_path: Path) -> None:
        """The numbers that CI systems show are those of the elements, and those of the records."""
        root = self.parsed(records, tmp_path)
        (suite,) = root
        verdicts = [v for r in records if (v := verdict_of(r)) is not None]
        assert (root.tag, suite.tag) == ("testsuites", "testsuite")
        assert int(suite.get("tests")) == len(suite.findall("testcase")) == len(verdicts)
        for attribute, tag, meant in (
            ("failures", "failure", {Verdict.FAIL}),
            ("errors", "error", {Verdict.INVALID, Verdict.INCONCLUSIVE}),
            ("skipped", "skipped", {Verdict.SKIPPED}),
        ):
            assert (
                int(suite.get(attribute)) == len(suite.findall(f"testcase/{tag}")) == sum(v in meant for v in verdicts)
            )
        for attribute in ("name", "tests", "failures", "errors", "time"):
            assert root.get(attribute) == suite.get(attribute)
        assert float(suite.get("time")) > 0
        assert int(suite.get("failures")) > 0

    def test_every_case(self, records: list[Record], tmp_path: Path) -> None:
        suite = self.parsed(records, tmp_path)[0]
        names = [(case.get("classname"), case.get("name")) for case in suite]
        assert len(set(names)) == len(names)
        for case in suite:
            assert set(case.attrib) == {"classname", "name", "time"}
            assert len(case) <= 1
            for child in case:
                assert {"message", "type"} <= set(child.attrib)
        assert ("toy.L1", "layers.1.attn-local") in names

    def test_any_text(self, records: list[Record], tmp_path: Path) -> None:
        """Markup, quotes, control characters and lone surrogates in a reason; all of Unicode stays."""
        reason = '<b> & "quoted" ]]> \x00\x08\x1b[31m\x7f\ud800\ufffe\U0001f600 é\nnext'
        at = next(i for i, r in enumerate(records) if isinstance(r, Comparison) and r.verdict is Verdict.FAIL)
        row = records[at]
        assert isinstance(row, Comparison)
        records[at] = replace(row, reason=reason, stage="a<b>\x01")
        failure = self.parsed(records, tmp_path)[0].find("testcase/failure")
        assert failure.text.startswith('<b> & "quoted" ]]> ???[31m\x7f??\U0001f600 é\nnext')
        assert failure.get("message") == failure.text

    def test_a_run_that_was_stopped(self, records: list[Record], tmp_path: Path) -> None:
        """It has no failing row, but must not look green."""
        cut = Path(tmp_path / "cut.jsonl")
        cut.write_text("\n".join(jsonl.encode(r) for r in records[:5]) + "\n")
        assert main(["report", str(cut), "--junit", str(tmp_path / "x.xml")]) == 0
        suite = ElementTree.parse(tmp_path / "x.xml").getroot()[0]
        assert suite.get("errors") == "1"
        assert suite.find("testcase/error").get("message") == "interrupted"  # type: ignore[union-attr]
