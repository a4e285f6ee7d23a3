"""The page in a real browser: no complaint, no request, keys and search do what they say, hostile names do nothing."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.browser import Browser, browser, chromium
from tests.support.report_facts import hostile, synthetic

from tilewright.report.page import page
from tilewright.tuning.page_limits import PAGE

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium: apt install chromium")

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}\u202e"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "small.html").write_text(page(synthetic(60), synthetic(60, seed=1)), encoding="utf-8")
    (folder / "large.html").write_text(page(synthetic(2000)), encoding="utf-8")
    (folder / "hostile.html").write_text(page(hostile(HOSTILE), hostile(HOSTILE)), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilewright.report.page.PAGE", replace(PAGE, max_first_rows=1))
        (folder / "late.html").write_text(page(synthetic(60)), encoding="utf-8")
        (folder / "hostile_late.html").write_text(page(hostile(HOSTILE)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def shared() -> Generator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def view(shared: Browser) -> Generator[Browser]:
    """A browser of which nothing has complained, before and after."""
    shared.errors.clear()
    shared.requests.clear()
    yield shared
    assert not shared.errors
    assert all(r.startswith("file:") and r.endswith(".html") for r in shared.requests), (
        "pages, and nothing else"
    )


CHOSEN = "document.querySelector('.details h3').textContent"
FOUND = "document.querySelector('.found').textContent"


def test_search_finds_and_enter_goes_there(view: Browser, pages: Path) -> None:
    view.open(pages / "small.html")
    view.press("/")
    view.type("k42")
    view.frames()
    assert view.evaluate(FOUND) == "1 of 60"
    view.press("Enter")
    assert view.evaluate(CHOSEN) == "k42"
    assert view.evaluate("document.querySelector('table.steps tr.chosen').dataset.step") == "42"
    view.press("Escape")
    assert view.evaluate(FOUND) == "" and view.evaluate(CHOSEN) == "k42"
    view.press("Escape")
    assert view.evaluate(CHOSEN) == "Nothing is chosen"


def test_keys_go_to_neighbours(view: Browser, pages: Path) -> None:
    view.open(pages / "small.html")
    view.evaluate("document.querySelector('canvas').focus()")
    view.press("ArrowDown")
    first = int(view.evaluate("document.querySelector('tr.chosen').dataset.step"))
    for key, step in (("ArrowUp", first - 1), ("ArrowLeft", first - 2), ("ArrowRight", first - 1)):
        view.press(key)
        assert int(view.evaluate("document.querySelector('tr.chosen').dataset.step")) == step
    view.press("+")
    view.press("0")
    view.press("Enter")
    assert view.evaluate("document.activeElement.className") == "details"


def test_tables_sort_and_filter(view: Browser, pages: Path) -> None:
    view.open(pages / "small.html")
    rows = "[...document.querySelectorAll('table.steps tbody tr:not([hidden])')].map(r => Number(r.dataset.step))"
    shares = view.evaluate(rows)
    view.evaluate("document.querySelector('th[data-sort=\"0\"]').click()")
    assert view.evaluate(rows) == list(range(59, -1, -1)) != shares
    view.evaluate("document.querySelector('th[data-sort=\"0\"]').click()")
    assert view.evaluate(rows) == list(range(60))
    view.evaluate("document.querySelector('.filter input').focus()")
    view.type("aten.addmm")
    view.frames()
    assert 0 < len(view.evaluate(rows)) < 60


def test_details_have_source_and_schedule(view: Browser, pages: Path) -> None:
    view.open(pages / "small.html")
    view.evaluate(
        "[...document.querySelectorAll('table.steps tr')].find(r => r.textContent.includes('k7')).click()"
    )
    view.evaluate("new Promise(done => setTimeout(done, 300))")
    text = view.evaluate("document.querySelector('.details').textContent")
    assert 'extern "C" void k7(' in text and "r1=vector[16]" in text and "Why it ends there" in text


def test_the_graph_is_drawn_in_light_and_dark(view: Browser, pages: Path) -> None:
    drawn = """(() => { const c = document.querySelector('canvas');
      const p = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
      let seen = 0; for (let k = 3; k < p.length; k += 4) seen += p[k] > 0; return seen / (p.length / 4); })()"""
    grounds: set[str] = set()
    for dark in (False, True):
        view.open(pages / "small.html", dark=dark)
        assert view.evaluate(drawn) > 0.05
        grounds.add(view.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
    assert len(grounds) == 2


@pytest.mark.parametrize("width", [1440, 800, 390])
def test_nothing_is_wider_than_the_window(view: Browser, pages: Path, width: int) -> None:
    view.open(pages / "small.html", width=width)
    assert view.evaluate("document.documentElement.scrollWidth") <= width


def test_rows_that_come_late_are_those_that_come_at_once(view: Browser, pages: Path) -> None:
    rows = "[...document.querySelectorAll('table.steps tbody tr')].map(r => r.outerHTML.replace(' scope=\"row\"', ''))"
    found: list[list[str]] = []
    for name in ("small.html", "late.html"):
        view.open(pages / name)
        view.evaluate("new Promise(done => setTimeout(done, 200))")
        found.append(view.evaluate(rows))
    assert found[0] == found[1] and len(found[0]) == 60


@pytest.mark.parametrize("name", ["hostile.html", "hostile_late.html"])
def test_hostile_names_do_nothing(view: Browser, pages: Path, name: str) -> None:
    view.open(pages / name)
    view.evaluate("document.querySelector('table.steps tr[data-step]').click()")
    view.press("/")
    view.type("onerror")
    view.frames()
    view.evaluate("new Promise(done => setTimeout(done, 300))")
    assert view.evaluate("document.querySelectorAll('img').length + document.scripts.length") == 2
    assert "<img src=x onerror=alert(2)>{{7*7}}\ufffd" in view.evaluate(
        "document.querySelector('.details').textContent"
    )
    assert view.evaluate(FOUND) == "4 of 4"


def test_without_scripts_the_tables_are_there(view: Browser, pages: Path) -> None:
    view.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        view.open(pages / "small.html", frames=False)
        text = view.call("DOM.getDocument", depth=0)
        found = view.call(
            "DOM.querySelectorAll", nodeId=text["root"]["nodeId"], selector="table.steps tbody tr"
        )
        assert len(found["nodeIds"]) == 60
    finally:
        view.call("Emulation.setScriptExecutionDisabled", value=False)


def test_two_thousand_kernels_open_and_stay_fluid(view: Browser, pages: Path) -> None:
    """`benchmarks.report_page` has the figures: at most two seconds and five megabytes."""
    assert (pages / "large.html").stat().st_size <= 5 << 20
    assert view.open(pages / "large.html") < 10
    start = "performance.mark('a'); const v = shownView(); for (let k = 0; k < 20; k++) v.draw(); "
    assert view.evaluate(f"(() => {{ {start} return performance.measure('m', 'a').duration / 20; }})()") < 100
