"""What CI publishes as pages: its commands run, and every link between the pages leads somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
import yaml

from gpipe_bench.playground.page import PYODIDE_FILES
from scripts.api import pages
from scripts.build_pages import REPOSITORY, target
from tests.project.pages import PAGES
from tests.project.tree import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/pages.yml").read_text())
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
INSTALLS = ("scripts/setup.sh", "scripts/install_pyodide.sh")


class Links(HTMLParser):
    """Anchors of a page, and where its links, images, styles and scripts lead."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found["id"]} if "id" in found else set()
        self.links += [found[name] for name in ("href", "src") if name in found]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages, built by the commands of the CI file, with a stand-in for the downloaded Pyodide."""
    place = tmp_path_factory.mktemp("pages")
    npm = place / "build/pyodide"
    npm.mkdir(parents=True)
    for name in PYODIDE_FILES:
        (npm / name).write_text("")
    built = [shlex.split(step["run"]) for step in STEPS if "run" in step and not step["run"].startswith(INSTALLS)]
    for words in built:
        assert words[0] == ".venv/bin/python"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *words[1:]], cwd=place, env=environment, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
    (published,) = (step["with"]["path"] for step in STEPS if "upload-pages-artifact" in step.get("uses", ""))
    return place / published


def test_every_link_between_pages_leads_somewhere(site):
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    broken = []
    for page, found in pages.items():
        for link in found.links:
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            there = (page.parent / unquote(name)).resolve() if name else page
            if not there.is_file() or (anchor and there in pages and anchor not in pages[there].anchors):
                broken.append((page.relative_to(site).as_posix(), link))
    assert broken == []


def test_docs_report_and_playground_are_published(site):
    made = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert {"index.html", "report.html", "playground/index.html", "playground/pyodide/pyodide.mjs"} <= made
    assert {name.replace(".md", ".html") for name in (*PAGES, *pages()) if name != "README.md"} <= made
    first = (site / "index.html").read_text(encoding="utf-8")
    assert {"report.html", "playground/index.html", "docs/README.html"} <= {*Links(first).links}
    assert "<table>" in first


def test_pages_load_no_icon_and_name_no_folder_of_the_machine_that_built_them(site):
    pages = {path.name: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert [name for name, text in pages.items() if '<link rel="icon" href="data:,">' not in text] == []
    assert [name for name, text in pages.items() if str(ROOT) in text] == []


def test_links_to_the_repository_name_files_that_it_has(site):
    links = {link for path in site.glob("docs/*.html") for link in Links(path.read_text(encoding="utf-8")).links}
    own = {link.removeprefix(f"{REPOSITORY}/").partition("#")[0] for link in links if link.startswith(REPOSITORY)}
    assert own
    assert [name for name in own if not (ROOT / name).exists()] == []


def test_a_link_leads_to_the_page_of_its_file():
    names = ["README.md", "docs/a.md", "docs/b.md"]
    assert target("b.md#part", "docs/a.md", names) == "../docs/b.html#part"
    assert target("../README.md", "docs/a.md", names) == "../index.html"
    assert target("docs/a.md", "README.md", names) == "docs/a.html"
    assert target("#here", "docs/a.md", names) == "#here"
    assert target("https://b.example/b.md", "docs/a.md", names) == "https://b.example/b.md"
    assert target("../models/unet.py", "docs/a.md", names) == f"{REPOSITORY}/models/unet.py"


def test_versions_of_what_ci_downloads_are_pinned():
    (installed,) = (step["run"] for step in STEPS if step.get("run", "").startswith("scripts/install_pyodide.sh"))
    assert installed == "scripts/install_pyodide.sh build/pyodide"
    script = (ROOT / "scripts/install_pyodide.sh").read_text()
    assert re.search(r"^version=\d+\.\d+\.\d+\nsha512=[0-9a-f]{128}$", script, re.MULTILINE)
