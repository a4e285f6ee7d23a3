"""The documents make a site: every page is reached, every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

TOP = Path(__file__).parents[2]
PAGES = sorted((TOP / "docs").rglob("*.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", [TOP / "README.md", *PAGES], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8")))
    missing = [
        link
        for link in links
        if not link.startswith(("http://", "https://", "#"))
        and not (page.parent / link.split("#")[0]).exists()
    ]
    assert not missing


def test_every_page_is_in_the_menu() -> None:
    menu = (TOP / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/]+\.md", str(yaml.safe_load(menu)["nav"])))
    assert listed == {p.name for p in PAGES if p.parent.name == "docs"}


def test_the_site_is_built(tmp_path: Path) -> None:
    build = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config").load_config(
        str(TOP / "mkdocs.yml"), site_dir=str(tmp_path / "site")
    )
    build.build(config)
    assert "Troubleshooting" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
