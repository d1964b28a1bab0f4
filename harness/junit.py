"""JUnit XML from records: one test case a row, so that a CI system shows stages as it shows tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

from harness.records import Certification, Comparison, Config, Record, Skip, Summary, Verdict, Weights
from harness.types import UsageError

#: verdict -> element below the test case
ELEMENTS = {
    Verdict.FAIL: "failure",
    Verdict.INVALID: "error",
    Verdict.INCONCLUSIVE: "error",
    Verdict.SKIPPED: "skipped",
}


def write(records: Iterable[Record], path: Path) -> None:
    """Write all rows as one suite. A free row that is inconclusive is skipped: it does not decide a run."""
    suite = Element("testsuite", name="harness")
    counts = {"tests": 0, "failure": 0, "error": 0, "skipped": 0}

    def case(scope: str, name: str, verdict: Verdict, reason: str | None, seconds: float = 0.0) -> None:
        element = SubElement(suite, "testcase", classname=f"{suite.get('name')}.{scope}", name=_clean(name))
        element.set("time", f"{seconds:.6f}")
        counts["tests"] += 1
        if tag := ELEMENTS.get(verdict):
            text = _clean(reason or str(verdict))
            SubElement(element, tag, message=text, type=str(verdict)).text = text
            counts[tag] += 1

    for record in records:
        if isinstance(record, Config):
            suite.set("name", _clean(record.case))
        elif isinstance(record, Certification):
            verdict = Verdict.PASS if record.ok else Verdict.INVALID
            case("certification", record.name, verdict, record.detail)
        elif isinstance(record, Weights):
            case(_scope(record.layer), f"{record.stage}.{record.parameter}-weights", record.verdict, record.reason)
        elif isinstance(record, Comparison):
            soft = record.mode == "free" and record.verdict == Verdict.INCONCLUSIVE
            verdict = Verdict.SKIPPED if soft else record.verdict
            reason = "; ".join(filter(None, [record.reason, *(f"{c.id}: {c.line}" for c in record.causes)])) or None
            case(_scope(record.layer), f"{record.stage}-{record.mode}", verdict, reason, record.seconds)
        elif isinstance(record, Skip):
            case(_scope(record.layer), f"{record.stage}-{record.mode}", Verdict.SKIPPED, record.reason)
        elif isinstance(record, Summary):
            suite.set("time", f"{record.seconds.get('total', 0.0):.3f}")
            if record.verdict == Verdict.INVALID:
                case("run", "valid", Verdict.INVALID, record.reason)
    for key, name in (("tests", "tests"), ("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(name, str(counts[key]))
    root = Element("testsuites", {k: v for k, v in suite.attrib.items() if k != "skipped"})
    root.append(suite)
    indent(root)
    try:
        ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _scope(layer: int | None) -> str:
    return "model" if layer is None else f"L{layer}"


def _clean(text: str) -> str:
    """Text without the control characters that XML 1.0 cannot hold."""
    return "".join(c if _allowed(c) else "?" for c in text)


def _allowed(c: str) -> bool:
    return c in "\t\n" or " " <= c < "\ud800" or "\ue000" <= c <= "\ufffd" or c > "\uffff"
