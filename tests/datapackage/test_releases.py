"""The reference tables of a version are those that releases.txt records: they do not change without the version."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess

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


def first_recorded(patches):
    """The digest that each version was first added with, by the patches of a file from the oldest on."""
    found = {}
    for version, digest in re.findall(r"^\+(\d+\.\d+\.\d+) ([0-9a-f]{64})$", patches, re.MULTILINE):
        found.setdefault(version, digest)
    return found


def git(*arguments):
    """What git prints of this checkout; ``None`` where git or a repository is missing."""
    try:
        command = ["git", "-C", ROOT, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def test_the_line_of_a_version_is_the_one_that_it_was_first_recorded_with():
    if git("ls-files", "--error-unmatch", RELEASES) is None or git("rev-parse", "--is-shallow-repository") != "false\n":
        pytest.skip("no git history, as in an archive of the source or a shallow clone")
    now = recorded(RELEASES.read_text())
    first = first_recorded(git("log", "--reverse", "--topo-order", "-p", "--no-color", "--no-ext-diff", "--", RELEASES))
    assert first
    assert {version: now.get(version) for version in first} == first


def test_a_later_line_of_a_version_is_not_its_first():
    old, new = "a" * 64, "b" * 64
    patches = f"+# words\n+0.1.0 {old}\n@@ -2 +2 @@\n-0.1.0 {old}\n+0.1.0 {new}\n+0.2.0 {new}\n"
    assert first_recorded(patches) == {"0.1.0": old, "0.2.0": new}


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
