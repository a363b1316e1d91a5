"""Links, anchors, images and places in README and docs exist, and each page can be found."""

from __future__ import annotations

import re

import pytest

from tests.project.pages import PAGES, anchors
from tests.project.tree import ROOT

LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)|<img[^>]*?src=\"(?!https?:)([^\"]+)\"", re.DOTALL)
OTHERS = ("CHANGELOG.md", "results/reference/README.md", *(f"docs/api/{path.name}" for path in ROOT.glob("docs/api/*")))
CHECKED = {**PAGES, **{name: (ROOT / name).read_text() for name in OTHERS}}


def links(page: str) -> list[str]:
    return [first or second for first, second in LINK.findall(CHECKED[page])]


@pytest.mark.parametrize("page", CHECKED)
def test_links_and_images_lead_somewhere(page):
    broken = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        path = ((ROOT / page).parent / name) if name else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_images_have_words_for_those_who_do_not_see_them(page):
    images = re.findall(r"<img[^>]*>", PAGES[page], re.DOTALL)
    assert all(re.search(r'alt="\S', image) for image in images)
    assert not re.search(r"!\[\s*\]\(", PAGES[page])


def test_the_index_has_every_page():
    listed = {link for link in links("docs/README.md") if link.endswith(".md")}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert pages <= listed


def test_pictures_are_shown():
    shown = {((ROOT / page).parent / link).resolve() for page in PAGES for link in links(page)}
    assert [path.name for path in (ROOT / "docs/pictures").iterdir() if path.resolve() not in shown] == []


def test_places_exist():
    section = PAGES["docs/architecture.md"].partition("\n## Beside the package\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    places = [place for row in rows for place in re.findall(r"`(.*?)`", row)]
    assert len(places) >= 10
    assert [place for place in places if not list(ROOT.glob(place.rstrip("/")))] == []
