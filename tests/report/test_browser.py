"""The page alive in a headless Chromium: it renders, answers the mouse and the keyboard, and asks for nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.report import chromium
from tests.report.conftest import Variant

BINARY = chromium.find()
if BINARY is None:
    pytest.skip(f"no browser on PATH ({', '.join(chromium.NAMES)}): the page was not opened", allow_module_level=True)

pytestmark = pytest.mark.browser
VARIANTS = ["clean", "faulty", "stopped", "killed", "invalid", "bypass", "weights", "hostile"]
VISIBLE = "document.querySelectorAll('#rows > tr[data-i]:not([hidden])').length"


@pytest.fixture(scope="module")
def page() -> Iterator[chromium.Page]:
    assert BINARY is not None
    with chromium.Page(BINARY) as opened:
        yield opened


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_opens_quietly_and_fits_a_phone(page: chromium.Page, page_file: Variant, variant: str) -> None:
    for width, scheme in ((1280, "light"), (400, "dark")):
        page.open(page_file(variant), width=width, scheme=scheme)
        assert page.complaints() == []
        assert page.requests() == []
        assert page.js("document.documentElement.scrollWidth") <= width
        assert page.js("document.querySelector('.badge').getBoundingClientRect().top") < 200
        assert page.js("document.images.length") == 0
        assert page.js("document.querySelectorAll('#token-map svg path').length") > 0


def test_it_opens_within_a_second(page: chromium.Page, page_file: Variant) -> None:
    """The best of five: the machine that runs this is busy with other tests."""
    times = []
    for _ in range(5):
        page.open(page_file("faulty"))
        times.append(page.js("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    assert min(times) < 1000


def test_the_switch_changes_the_map_and_the_signals(page: chromium.Page, page_file: Variant) -> None:
    page.open(page_file("faulty"))
    shown = "[...document.querySelectorAll('.heat td > *')].filter((e) => e.offsetParent)"
    cells = f"{shown}.map((e) => e.textContent.trim()).join()"
    seen = {}
    for view in ("margin", "cost", "free"):
        page.js(f"document.getElementById('view-{view}').click()")
        seen[view] = page.js(cells)
        assert page.js("document.querySelectorAll('.heat tr').length") > 25
    assert len(set(seen.values())) == 3
    assert page.js("[...document.querySelectorAll('.local-only')].every((e) => !e.offsetParent)")


def test_the_filter_narrows_by_text_verdict_and_mode(page: chromium.Page, page_file: Variant) -> None:
    page.open(page_file("faulty"))
    total = page.js(VISIBLE)
    assert total == 285

    def choose(**values: str) -> int:
        for name, value in values.items():
            page.js(
                f"(() => {{ const e = document.querySelector('#filter').elements['{name}']; e.value = '{value}';"
                " e.dispatchEvent(new Event('input', {bubbles: true})); })()"
            )
        return int(page.js(VISIBLE))

    failing = choose(verdict="FAIL")
    assert 0 < failing < total
    local = choose(mode="local")
    assert local == 1
    assert choose(verdict="", mode="", text="layers.3 router") == 2
    assert choose(text="no such stage") == 0
    assert page.js("!document.getElementById('nothing').hidden")
    assert choose(text="") == total


def test_a_link_opens_the_panel_with_all_its_evidence(page: chromium.Page, page_file: Variant) -> None:
    page.open(page_file("faulty"), fragment="layers.2.attn_core/local")
    panel = "document.getElementById('layers.2.attn_core/local').nextElementSibling"
    assert page.js(f"{panel}.classList.contains('panel') && !{panel}.hidden")
    said = page.js(f"{panel}.innerText")
    for word in (
        "Threshold",
        "lambda 5",
        "worst element ÷ bound",
        "slope against the oracle",
        "Signed error",
        "Density",
        "By head (H)",
        "By token",
    ):
        assert word in said
    assert page.js(f"{panel}.querySelectorAll('.coords tbody tr').length") == 5
    assert page.js(f"{panel}.querySelectorAll('.density path').length") > 3
    page.js(f"{panel}.querySelectorAll('details.tensor')[1].querySelector('summary').click()")
    page.wait(f"{panel}.querySelectorAll('details.tensor')[1].querySelectorAll('.fig').length > 0")
    assert page.complaints() == []


def test_every_panel_opens(page: chromium.Page, page_file: Variant) -> None:
    page.open(page_file("hostile"))
    closed = "#rows .open[aria-expanded=false]"
    page.js(f"[...document.querySelectorAll('{closed}')].slice(0, 60).forEach((button) => button.click())")
    page.wait("document.querySelectorAll('#rows > .panel:not([hidden])').length > 60")
    page.js("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.js("document.images.length + document.querySelectorAll('script').length") == 3
    assert page.complaints() == []


def test_the_keyboard_walks_the_map_and_opens_a_panel(page: chromium.Page, page_file: Variant) -> None:
    page.open(page_file("faulty"))
    page.js("document.querySelector('.heat a.margin[tabindex=\"0\"]').focus()")
    assert page.js("document.querySelectorAll('.heat a[tabindex=\"0\"]').length") == 1
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        page.key(key)
    assert page.js("document.activeElement.hash") == "#layers.2.attn_hc/local"
    assert page.js("document.getElementById('readout').textContent").startswith("layers.2.attn_hc · local · PASS · ")
    page.key("Enter")
    page.wait("document.activeElement.className === 'open'")
    row = "document.getElementById('layers.2.attn_hc/local')"
    assert page.js(f"{row}.querySelector('.open').getAttribute('aria-expanded')") == "true"
    page.key("Enter")
    page.wait(f"{row}.nextElementSibling.hidden")


def test_commands_can_be_copied(page: chromium.Page, page_file: Variant) -> None:
    page.open(page_file("faulty"))
    page.js("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.js("document.querySelector('#rows .copy').click()")
    page.wait("document.querySelector('#rows .copy').textContent === 'Copied'")
    assert page.js("window.copied") == "harness diff --layer 2 --stage layers.2.attn_core --mode local"
    assert page.js("[...document.querySelectorAll('#rows > tr[data-i]')].every((row) => row.querySelector('.copy'))")


def test_tokens_of_one_stage_can_be_chosen_and_read(page: chromium.Page, page_file: Variant) -> None:
    page.open(page_file("faulty"))
    select, layers = "document.getElementById('token-stage')", "document.querySelectorAll('.token-row').length"
    assert page.js(layers) == 7
    page.js(f"{select}.value = 'attn_core'; {select}.dispatchEvent(new Event('change'))")
    page.wait(f"{layers} === 6")  # the seventh is the model's own row
    page.js("document.querySelectorAll('#token-map svg')[2].focus()")
    assert "tokens 212–213 “in” “the”" in page.js("document.getElementById('token-readout').textContent")
    page.key("ArrowRight")
    assert "tokens 214–215" in page.js("document.getElementById('token-readout').textContent")


def test_light_and_dark_follow_the_system_until_chosen(page: chromium.Page, page_file: Variant) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    page.open(page_file("clean"), scheme="light")
    light = page.js(paper)
    page.scheme("dark")
    dark = page.js(paper)
    assert light != dark
    for expected in (light, dark, dark):  # light, dark, auto again
        page.js("document.getElementById('theme').click()")
        assert page.js(paper) == expected
    page.js("localStorage.clear()")


def test_it_prints_in_light_with_the_failing_panels(page: chromium.Page, page_file: Variant) -> None:
    page.open(page_file("faulty"), scheme="dark")
    shown = "document.querySelectorAll('#rows > .panel:not([hidden])').length"
    assert page.js(shown) == 1
    page.js("dispatchEvent(new Event('beforeprint'))")
    assert page.js(shown) == 6
    page.scheme("dark", media="print")
    assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.js("getComputedStyle(document.querySelector('.copy')).display") == "none"
    page.js("dispatchEvent(new Event('afterprint'))")
    assert page.js(shown) == 1
    assert page.pdf().startswith(b"%PDF")


def test_the_policy_stops_foreign_script(page: chromium.Page, page_file: Variant) -> None:
    page.open(page_file("clean"))
    tries = (
        "document.body.innerHTML = '<img src=x onerror=\"window.owned=1\">'",
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.owned=1'}))",
    )
    for attempt in tries:
        page.js(f"(() => {{ try {{ {attempt} }} catch {{ }} }})()")
    assert page.js("window.owned === undefined")
