"""The RO-Crate beside the data package: the library reads it, and it says of every table what the table is."""

from __future__ import annotations

import hashlib

import pytest

from gpipe_bench.data import REFERENCE_FOLDER

rocrate = pytest.importorskip("rocrate.rocrate", reason="rocrate is not installed: make setup LAYER=dev")


@pytest.fixture(scope="module")
def crate():
    return rocrate.ROCrate(REFERENCE_FOLDER)


def test_the_committed_crate_is_that_of_the_files(tmp_path):
    from scripts.crate import CRATE, crate_of

    crate_of(REFERENCE_FOLDER).metadata.write(tmp_path)
    assert (tmp_path / CRATE).read_bytes() == (REFERENCE_FOLDER / CRATE).read_bytes(), "run: make tables"


def test_the_crate_says_what_it_is_whose_and_under_which_licence(crate):
    root = crate.root_dataset
    assert root["name"].startswith("Reference results of gpipe_bench")
    assert root["license"].id == "https://opensource.org/license/bsd-3-clause"
    assert root["author"]["name"] == "The gpipe_bench authors"
    assert root["datePublished"].startswith("2026-")
    papers = {
        "https://arxiv.org/abs/2004.09910",
        "https://arxiv.org/abs/1811.06965",
        "https://arxiv.org/abs/2401.10241",
    }
    assert papers <= {source.id for source in root["isBasedOn"]}


def test_the_crate_has_every_table_with_its_size_and_digest(crate):
    described = {entity.id: entity for entity in crate.data_entities}
    tables = {path.relative_to(REFERENCE_FOLDER).as_posix(): path for path in REFERENCE_FOLDER.rglob("*.csv")}
    assert {*described} == {*tables, "datapackage.json"}
    for name, path in tables.items():
        content = path.read_bytes()
        said = described[name]["contentSize"], described[name]["sha256"]
        assert said == (str(len(content)), hashlib.sha256(content).hexdigest()), name
