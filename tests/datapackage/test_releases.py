"""The reference tables of a version are those that releases.txt records: they do not change without the version."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
import yaml

from gpipe_bench import __version__
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.suite.datapackage.descriptor import DESCRIPTOR
from tests.project.tree import ROOT

RELEASES = REFERENCE_FOLDER / "releases.txt"
PACKAGE = json.loads((REFERENCE_FOLDER / DESCRIPTOR).read_text(encoding="utf-8"))


def tables_digest(folder):
    """The sha256 of all tables below a folder: of a line ``path sha256:...`` for each, sorted by path."""
    places = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.csv"))
    lines = (f"{place} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n" for place, path in places)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def recorded(text):
    """The digest of each version; a version is there once."""
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert len({version for version, _ in lines}) == len(lines), "a version has one line"
    return dict(lines)


def test_package_citation_and_data_package_have_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {__version__} == {citation["version"], PACKAGE["version"]}


def test_the_changelog_has_the_release_on_the_day_of_the_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    heads = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == (__version__, citation["date-released"])
    assert {*recorded(RELEASES.read_text())} <= {version for version, _ in heads}


def test_the_reference_tables_are_those_of_this_version():
    digest = tables_digest(REFERENCE_FOLDER)
    line = f"{__version__} {digest}"
    advice = f"raise the version in the package, CITATION.cff, CHANGELOG.md and datapackage.json, then record {line!r}"
    assert recorded(RELEASES.read_text()).get(__version__) == digest, f"tables differ from {RELEASES.name}; {advice}"


@pytest.mark.parametrize("change", ["text", "name", "more", "fewer"])
def test_every_change_of_a_table_is_noticed(tmp_path, change):
    for name in ("a.csv", "box/b.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    before = tables_digest(tmp_path)
    assert tables_digest(tmp_path) == before
    table = tmp_path / "box" / "b.csv"
    if change == "text":
        table.write_text("b.csv\n\n")
    elif change == "name":
        table.rename(table.with_name("c.csv"))
    elif change == "more":
        table.with_name("c.csv").write_text("c\n")
    else:
        table.unlink()
    assert tables_digest(tmp_path) != before
