"""The page: one file under a strict policy, the same for the same facts; names in it stay text."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tests.support.report_facts import hostile, synthetic

from tilewright.report import page as pages
from tilewright.report.page import json_in_html, packed, page
from tilewright.tuning.page_limits import PAGE

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "{{7*7}}{% raw %}",
    '"><svg onload=alert(1)>',
    "<!--<script>",
    "\u202eelif\u2066 \u2069",
    "a\u2028b\u2029c\x00\x1b[31m",
    "n" * 10_000,
)


class Page(HTMLParser):
    """Elements with their attributes, and the text of each style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside in ("style", "script"):
            self.texts.append((inside, data))
        else:
            self.words += data

    def data(self) -> dict[str, object]:
        """What the script reads."""
        return json.loads(next(text for tag, text in self.texts if tag == "script"))


def shape(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Which elements a page has, with the names of their attributes."""
    return [(tag, tuple(attributes)) for tag, attributes in Page(text).elements if tag != "p"]


def test_nothing_comes_from_outside_and_the_policy_names_what_is_inside() -> None:
    found = Page(page(synthetic(12)))
    (policy,) = [a["content"] or "" for t, a in found.elements if t == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    (style,), (_, script) = (
        [text for tag, text in found.texts if tag == kind] for kind in ("style", "script")
    )
    for text in (style, script):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    for tag, attributes in found.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        assert not {"src", "href", "style", "srcset"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?:", style) and "innerHTML" not in script


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_text(name: str) -> None:
    text = page(hostile(name), hostile(name))
    found = Page(text)
    assert shape(text) == shape(page(hostile("p" * len(name)), hostile("p" * len(name))))
    assert "49" not in found.words
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u2028\u2029\x00\x1b]", text)
    known = name[:30] if name.isprintable() else "\ufffd"
    assert known in found.words
    assert name not in text or not set(name) & set("<>")


def test_json_ends_no_element_and_reads_back() -> None:
    names = [n for n in HOSTILE if n.isprintable()]
    text = json_in_html({"a": names})
    assert not set(text) & set("<>&\u2028\u2029") and json.loads(text) == {"a": names}
    with pytest.raises(ValueError, match="JSON"):
        json_in_html({"a": float("nan")})


def test_sources_are_packed_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    text, kept = packed({3: "one\n\ttwo", 1: "</script>"})
    assert (
        json.loads(gzip.decompress(base64.b64decode(text))) == {"3": "one\n\ttwo", "1": "</script>"}
        and kept == 2
    )
    monkeypatch.setattr(pages, "PAGE", replace(PAGE, max_source_bytes=10))
    text, kept = packed({k: f"source {k} {hash(str(k))}" for k in range(50)})
    assert 0 < kept < 5 and len(json.loads(gzip.decompress(base64.b64decode(text)))) == kept


def test_equal_facts_have_equal_pages_and_tables_hold_them_without_a_script() -> None:
    first, second = page(synthetic(30)), page(synthetic(30))
    assert first == second
    found = Page(first)
    assert sum("data-step" in a for t, a in found.elements if t == "tr") == 30
    graph = found.data()["graphs"][0]  # type: ignore[index]
    assert all(step["name"] in found.words for step in graph["steps"])


def luminance(colour: str) -> float:
    """As WCAG defines it."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_enough_contrast_in_light_and_dark() -> None:
    style = (pages.TEMPLATES / pages.STYLE).read_text()
    light, dark = (dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", part)) for part in style.split("}")[:2])
    for colours in (light, dark):
        pairs = [(text, on) for text in ("ink", "muted", "accent") for on in ("paper", "surface", "faint")]
        for text, on in (*pairs, ("accent-ink", "accent"), ("mark", "surface")):
            low, high = sorted(luminance(colours[c]) for c in (text, on))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, on)


def test_a_report_of_nothing_is_a_page() -> None:
    (graph,) = synthetic(3).graphs
    empty = replace(
        graph, steps=(), edges=(), levels=(), phases=(), live_bytes=(), machine=None, intermediate_bytes=None
    )
    assert "all of it is generated" in page(replace(synthetic(3), graphs=(empty, empty), sources=()))
    assert Page(page(replace(synthetic(3), graphs=())))


def test_what_is_not_known_is_not_shown_as_zero() -> None:
    (graph,) = synthetic(3).graphs
    unknown = replace(
        graph.steps[0], bytes_moved=None, bytes_lower_bound=None, flops=None, exps=None, modelled=None, measured=None,
    )  # fmt: skip
    text = page(replace(synthetic(3), graphs=(replace(graph, steps=(unknown, *graph.steps[1:])),)))
    (row,) = re.findall(r'<tr data-step="0">.*?</tr>', text)
    assert row.count(">-</td>") == 5 and "Time, in part measured" in text
