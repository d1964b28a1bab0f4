"""The page as text: complete, self-contained, escaped, within its budget. The browser tests look at it alive."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import typing
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.jsonl import encode
from harness.records import Comparison, Record
from harness.report import html, pack, text
from harness.report.load import KINDS, read
from tests.report.conftest import Variant
from tests.report.sample import HOSTILE, lines, records, write

VARIANTS = [
    "clean",
    "faulty",
    "stopped",
    "killed",
    "invalid",
    "bypass",
    "weights",
    "loading",
    "inconclusive",
    "generated",
    "hostile",
]


class Tags(HTMLParser):
    """Start tags with their attributes, and the text of scripts by id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: dict[str, str] = {}
        self.inside = False  # a script or a style
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag in {"script", "style"}

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        tag, attrs = self.tags[-1] if self.inside else ("", {})
        if tag == "script":
            name = attrs.get("id") or ""
            self.scripts[name] = self.scripts.get(name, "") + data
        elif tag != "style":
            self.words.append(data)

    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def inflate(blob: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(blob), -15))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_page_is_one_file_that_asks_for_nothing(page_file: Variant, variant: str) -> None:
    page = page_file(variant).read_text(encoding="utf-8")
    assert page_file(variant).stat().st_size < html.LIMIT
    assert set(re.findall(r"https?:[^\s\"'<]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"(?<!:)//[a-z0-9.-]+\.[a-z]{2,}/", page)
    tags = Tags(page)
    for tag, attrs in tags.tags:
        assert tag not in {"img", "iframe", "object", "embed", "base", "audio", "video", "source", "form-data"}
        assert not any(name.startswith("on") or name in {"src", "srcset", "action", "style"} for name in attrs), (
            tag,
            attrs,
        )
        href = attrs.get("href") or "#"
        assert href.startswith("data:" if tag == "link" else "#"), href


def test_the_policy_admits_this_script_and_style_only(page_file: Variant) -> None:
    page = page_file("faulty").read_text(encoding="utf-8")
    policy = next(a["content"] or "" for t, a in Tags(page).tags if "http-equiv" in a)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for kind, source in (("script", Tags(page).scripts[""]), ("style", page.split("<style>")[1].split("</style>")[0])):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize("variant", ["clean", "faulty", "killed"])
def test_every_comparison_has_a_row_a_command_and_its_detail(
    page_file: Variant, run_file: Variant, variant: str
) -> None:
    tags = Tags(page_file(variant).read_text(encoding="utf-8"))
    run = read(run_file(variant))
    rows = {a["id"]: int(a["data-i"] or 0) for t, a in tags.tags if t == "tr" and "data-i" in a}
    assert set(rows) == {text.slug(c.stage, c.mode) for c in run.comparisons}
    commands = {a["data-copy"] for t, a in tags.tags if "data-copy" in a}
    assert {c.reproduce for c in run.comparisons} <= commands
    blobs = json.loads(tags.scripts["blobs"])
    assert len(blobs) == len(run.comparisons)
    for c in run.comparisons:
        detail = inflate(blobs[rows[text.slug(c.stage, c.mode)]])
        assert (detail["stage"], detail["mode"], detail["reproduce"]) == (c.stage, c.mode, c.reproduce)
        assert [t["name"] for t in detail["tensors"]] == [t.tensor for t in c.tensors]
        assert [len(t["worst"]) for t in detail["tensors"]] == [len(t.worst) for t in c.tensors]
        assert [len(t["slices"]) for t in detail["tensors"]] == [len(t.slices) for t in c.tensors]


def test_links_lead_somewhere(page_file: Variant) -> None:
    tags = Tags(page_file("faulty").read_text(encoding="utf-8")).tags
    ids = {a["id"] for _, a in tags if "id" in a}
    assert {a["href"] for t, a in tags if t == "a"} <= {f"#{name}" for name in ids}
    assert len(ids) == sum("id" in a for _, a in tags)


def test_failures_come_first_and_the_first_fault_before_all(page_file: Variant) -> None:
    rows = [a for t, a in Tags(page_file("faulty").read_text(encoding="utf-8")).tags if t == "tr" and "data-v" in a]
    verdicts = [a["data-v"] for a in rows]
    assert verdicts == sorted(verdicts, key=lambda v: html.RANK[v or ""])
    assert rows[0]["id"] == "layers.2.attn_core/local"


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("clean", ["PASS", "No fault in 285 comparisons", "Closest call"]),
        ("faulty", ["FAIL", "First fault:", "layers.2.attn_core", "--dump fault/", "--bypass", "collapsed: head 1"]),
        ("stopped", ["INTERRUPTED", "did not finish", "SIGTERM after 6.2 s", "not reached"]),
        ("killed", ["INTERRUPTED", "Truncated:", "no summary record"]),
        (
            "invalid",
            ["INVALID", "This comparison means nothing", "logits differ: 7.02", "say nothing about production"],
        ),
        (
            "bypass",
            ["Direct-residual mode", "Bypassed:", "Replaced:", "layers.1.q_a = mine.py:q_a", "not production's own"],
        ),
        ("weights", ["Mend loading first", "one factor explains it: 16", "every element 16 x too large"]),
        ("loading", ["FAIL", "Loaded wrongly", "q_b.weight of layers.1.q_b", "Run again once it loads"]),
        (
            "inconclusive",
            ["The reference cannot decide: layers.4.compressor", "cancellation to 3 bits", "--dtype fp32"],
        ),
    ],
)
def test_the_page_says_what_the_run_is(page_file: Variant, variant: str, words: list[str]) -> None:
    said = Tags(page_file(variant).read_text(encoding="utf-8")).text()
    for word in words:
        assert word in said


def test_an_unfinished_run_is_never_a_pass(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(lines(records("clean", layers=2)[:-1])) + "\n")
    page = html.page(read(path))
    assert "<title>INTERRUPTED" in page
    assert '<p class="badge">INTERRUPTED</p>' in page


def test_a_record_of_an_unknown_kind_is_shown_beside_its_stage(tmp_path: Path) -> None:
    strange = {"kind": "diagnosis", "stage": "layers.2.attn_core", "cause": "phantom key", "share": 0.97}
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([*lines(records("faulty")), json.dumps(strange)]) + "\n")
    said = Tags(html.page(read(path))).text()
    assert said.index("cause phantom key share 0.97") < said.index("Next")
    assert "Other records" in said


def _hostile(value: Any, key: str = "") -> Any:
    """Every string of a record, verdicts and kinds excepted, with markup in front."""
    if isinstance(value, str):
        return value if key in {"kind", "verdict"} else HOSTILE + value
    if isinstance(value, list):
        return [_hostile(item, key) for item in value]
    if isinstance(value, dict):
        return (
            {k if key == "" else HOSTILE + k: _hostile(v, k) for k, v in value.items()}
            if key in MAPPINGS
            else {k: _hostile(v, k) for k, v in value.items()}
        )
    return value


MAPPINGS = {"bypass", "replace", "provenance", "plan", "threshold", "stream_rms", "seconds"}


def test_no_string_of_any_field_becomes_markup(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    strange = {"kind": "diagnosis", "stage": "layers.2.attn_core", "cause": "phantom key"}
    parts = [*map(json.loads, lines(records("bypass")[:120])), strange]
    path.write_text("\n".join(json.dumps(_hostile(part)) for part in parts) + "\n")
    run = read(path)
    assert run.problems == []
    tags = Tags(html.page(run))
    assert [t for t, _ in tags.tags if t == "img"] == []
    assert [t for t, _ in tags.tags].count("script") == 3
    assert "onerror" not in tags.scripts[""]
    assert not any(name.startswith("on") for _, attrs in tags.tags for name in attrs)
    assert "\u202e" not in "".join(tags.words)
    assert "phantom key" in tags.text()


def _bare(value: Any) -> Any:
    """The record with every optional value missing and every optional list empty."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return tuple(map(_bare, value)) if isinstance(value, tuple) else value
    hints = typing.get_type_hints(type(value))
    changes: dict[str, Any] = {}
    for f in dataclasses.fields(value):
        optional = type(None) in typing.get_args(hints[f.name])
        empty = f.default_factory is not dataclasses.MISSING or f.default == ()
        kept: dict[str, Any] | tuple[()] = {} if f.default_factory is not dataclasses.MISSING else ()
        changes[f.name] = None if optional else kept if empty else _bare(getattr(value, f.name))
    return dataclasses.replace(value, **changes)


def test_missing_values_are_shown_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    bare: list[Record] = [_bare(record) for record in records("faulty")]
    path.write_text("\n".join(map(encode, bare)) + "\n")
    run = read(path)
    assert run.problems == []
    said = Tags(html.page(run)).text()
    assert not re.search(r"\b(None|NaN|nan|inf|undefined)\b", said)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_run_that_ended_after_any_record_renders(tmp_path: Path, kind: str) -> None:
    parts = records("generated", layers=4)
    at = next(i for i, r in enumerate(parts) if r.kind == kind)
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(lines(parts[: at + 1])) + "\n")
    assert "</html>" in html.page(read(path))


def test_a_page_over_its_budget_drops_passing_detail_first_and_says_so(run_file: Variant) -> None:
    run = read(run_file("faulty"))
    full = len(html.page(run).encode())
    limit = full - 400_000
    page = html.page(run, limit)
    assert len(page.encode()) <= limit
    assert "To stay under 5 MB this page leaves out" in page
    blobs = json.loads(Tags(page).scripts["blobs"])
    cut = {inflate(blob)["verdict"] for blob in blobs if inflate(blob)["cut"]}
    assert cut == {"PASS"}


def test_the_smallest_detail_keeps_every_figure(run_file: Variant) -> None:
    run = read(run_file("faulty"))
    packed = pack.pack(run, 0)
    for c, blob in zip(run.comparisons, packed.blobs, strict=True):
        tensors = inflate(blob)["tensors"]
        assert [(t["verdict"], t["margin"], t["cost"]) for t in tensors] == [
            (t.verdict, t.margin, t.cost) for t in c.tensors
        ]


def test_a_long_table_starts_with_its_failures(tmp_path: Path) -> None:
    run = read(write(tmp_path / "long.jsonl", "faulty", layers=9))
    assert len(run.comparisons) > html.CAP
    rows = [a for t, a in Tags(html.page(run)).tags if t == "tr" and "data-v" in a]
    hidden = [a for a in rows if a.get("class") == "more"]
    assert len(rows) - len(hidden) == html.CAP
    assert {a["data-v"] for a in hidden} == {"PASS"}


def test_a_fused_stage_is_shown_where_it_covers(tmp_path: Path) -> None:
    parts: list[Record] = []
    for r in records("clean"):
        if isinstance(r, Comparison) and r.stage == "layers.1.q_a":
            r = dataclasses.replace(r, covers=("layers.1.attn_norm", "layers.1.q_a"))
        if not (isinstance(r, Comparison) and r.stage == "layers.1.attn_norm"):
            parts.append(r)
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(lines(parts)) + "\n")
    page = html.page(read(path))
    assert "compared inside layers.1.q_a" in page
    assert "without a record" not in page


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.001, "<.01"),
        (0.31, ".31"),
        (0.9999, ".99"),
        (1.0, "1.0"),
        (41.2, "41"),
        (4123.0, "4e3"),
        (1e12, ">1e9"),
        (None, "–"),
    ],
)
def test_figures_fit_a_cell(value: float | None, shown: str) -> None:
    assert text.short(value) == shown
    assert len(shown) <= 4


def test_a_ratio_is_never_rounded_onto_its_limit() -> None:
    assert (text.ratio(0.99999), text.ratio(1.0), text.ratio(1.00004)) == ("0.999", "1", "1.00004")
