"""``cite`` says of a table what finds it again, and refuses files that are no table of results."""

from __future__ import annotations

import csv
import hashlib
import re
import shutil
from dataclasses import replace

import pytest
import yaml

from gpipe_bench import __version__
from gpipe_bench.cli import cite, main
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import DESCRIPTOR, csv_text, recorded_digests
from tests.project.tree import ROOT
from tests.suite.cells_of import ok_result

ABLATION = REFERENCE_FOLDER / "simulated/p40/ablation.csv"


def cited(capsys, path, status=0):
    with pytest.raises(SystemExit) as caught:
        main(["cite", str(path)])
    assert caught.value.code == status
    told = capsys.readouterr()
    return told.err if status else told.out


def own_table(folder, **changes):
    row = ok_result("baseline", 0).row
    path = folder / "own.csv"
    path.write_text(csv_text(Row.columns(), [row.to_dict(), replace(row, repeat=1, **changes).to_dict()]))
    return path


def test_the_entry_is_that_of_the_citation_file():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["url"]) == (cite.TITLE, cite.URL)
    assert citation["authors"] == [{"name": cite.AUTHOR}]
    assert str(cite.YEAR) == citation["date-released"][:4]


def test_a_reference_table_is_found_again(capsys):
    told = cited(capsys, ABLATION)
    digest = hashlib.sha256(ABLATION.read_bytes()).hexdigest()
    commits = re.findall(r"^commit    ([0-9a-f]{40}), \d+ rows$", told, re.MULTILINE)
    assert {*commits} == {line["commit"] for line in csv.DictReader(ABLATION.read_text().splitlines())}
    assert told.startswith(f"@misc{{gpipe_bench_ablation_{digest[:8]},\n")
    assert f"  version = {{{__version__}}},\n" in told
    assert f"\nrelease   {__version__}\n" in told
    named = r"Table results/reference/simulated/p40/ablation.csv; evidence: simulated"
    assert f"  note    = {{{named}; commit: {', '.join(commits)}; sha256: {digest}}},\n" in told
    assert f"\nsha256    {digest}\nevidence  simulated, " in told


def test_a_copy_with_another_name_is_still_a_table_of_the_release(capsys, tmp_path):
    for name in ("simulated/p40/ablation.csv", "emulated/p40/ablation_steps.csv"):
        copy = tmp_path / "renamed.csv"
        shutil.copyfile(REFERENCE_FOLDER / name, copy)
        assert cited(capsys, copy) == cited(capsys, REFERENCE_FOLDER / name)


def test_of_two_tables_with_the_same_bytes_the_named_one_is_cited(capsys):
    digests = recorded_digests(REFERENCE_FOLDER / DESCRIPTOR)
    same = [path for path, digest in digests.items() if [*digests.values()].count(digest) > 1]
    assert len(same) >= 2
    for path in same:
        assert f"\ntable     results/reference/{path}, " in cited(capsys, REFERENCE_FOLDER / path)


@pytest.mark.parametrize("changed", ["edited", "own"])
def test_rows_of_no_release_are_not_cited_as_of_one(capsys, tmp_path, changed):
    path = own_table(tmp_path)
    if changed == "edited":
        path.write_bytes(ABLATION.read_bytes().replace(b"baseline", b"better", 1))
    entry, _, facts = cited(capsys, path).partition("\n}\n")
    assert "version =" not in entry
    assert f"  howpublished = {{Software, version {__version__}}},\n" in entry
    assert "note    = {Table own.csv, of no release; evidence: " in entry
    assert f"\nrelease   no table that releases.txt and {DESCRIPTOR} record for release {__version__}\n" in facts


def test_tables_that_were_changed_after_a_release_are_not_cited_as_of_it(capsys, tmp_path, monkeypatch):
    copy = tmp_path / "simulated/p40/ablation.csv"
    copy.parent.mkdir(parents=True)
    shutil.copyfile(ABLATION, copy)
    shutil.copyfile(REFERENCE_FOLDER / "releases.txt", tmp_path / "releases.txt")
    text = (REFERENCE_FOLDER / DESCRIPTOR).read_text()
    monkeypatch.setattr(cite, "REFERENCE_FOLDER", tmp_path)
    (tmp_path / DESCRIPTOR).write_text(text)
    assert f"\nrelease   {__version__}\n" in cited(capsys, copy)
    # Rows that somebody took in change the list of digests.
    digest = recorded_digests(REFERENCE_FOLDER / DESCRIPTOR)["emulated/p40/ablation.csv"]
    (tmp_path / DESCRIPTOR).write_text(text.replace(digest, f"sha256:{'0' * 64}"))
    assert ", of no release; " in cited(capsys, copy)


def test_letters_that_latex_reads_otherwise_are_escaped(capsys):
    entry = cited(capsys, REFERENCE_FOLDER / "simulated/p40/sweep_unet.csv").partition("\n}\n")[0]
    title, note = re.search(r"title .*", entry), re.search(r"note .*", entry)
    assert title is not None
    assert note is not None
    assert r"{{gpipe\_bench: a" in title[0]
    assert r"sweep\_unet.csv" in note[0]


def test_kinds_of_evidence_and_uncommitted_changes_are_counted(capsys, tmp_path):
    told = cited(capsys, own_table(tmp_path, evidence="simulated", dirty=True, commit="f" * 40))
    assert "note    = {Table own.csv, of no release; evidence: measured, simulated; commit: " in told
    assert f"\ncommit    {'f' * 40}, 1 rows\n" in told
    assert "1 rows with uncommitted changes" in told
    assert "\nevidence  measured, 1 rows\nevidence  simulated, 1 rows\n" in told
    assert str(tmp_path) not in told


def test_a_companion_is_cited_with_the_provenance_of_its_rows(capsys):
    path = REFERENCE_FOLDER / "emulated/p40/ablation_steps.csv"
    told = cited(capsys, path)
    assert re.search(r"^commit    [0-9a-f]{40}, ", told, re.MULTILINE)
    assert "\nevidence  emulated, " in told
    assert f"\nsha256    {hashlib.sha256(path.read_bytes()).hexdigest()}\n" in told


def test_published_values_lead_to_their_sources(capsys):
    told = cited(capsys, REFERENCE_FOLDER / "published/published.csv")
    assert "\ncommit    not recorded in these rows\n" in told
    assert "\nevidence  published, " in told
    assert re.search(r"^source    \S", told, re.MULTILINE)
    assert "cite these, too" in told


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "a,b\n1,2\n", "must be those of a known kind of table"),
        ("a.csv", "", "table must have at least one row"),
        ("a.csv", "config_sha256,configuration\nx,{}\n", "table must say its evidence, got configurations"),
        ("a.md", "# Words\n\nmore, words\n", "error: "),
    ],
)
def test_what_is_no_table_of_results_is_refused(capsys, tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    assert words in cited(capsys, tmp_path / name, 2)
    assert "table must be a readable CSV file" in cited(capsys, tmp_path / "none.csv", 2)
