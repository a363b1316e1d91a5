"""A table of a data package is read only as long as it is the one that was recorded."""

from __future__ import annotations

import shutil

import pytest

from gpipe_bench.cli import main
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.suite.datapackage.descriptor import DESCRIPTOR, write_descriptor

AMD, INTEL = "measured/2x-amd-epyc", "measured/2x-intel-xeon-processor"
COMMANDS = {
    "simulated/p40/speed.csv": [
        ("table", "--rows", "TABLE"),
        ("figure", "tables", "--rows", "TABLE", "--out", "OUT"),
        ("compare", str(REFERENCE_FOLDER / "simulated/p40/speed.csv"), "TABLE"),
        ("verify", "TABLE", "--out", "OUT"),
    ],
    "simulated/p40/predictions.csv": [("verify", "--predictions", "TABLE", "--out", "OUT")],
    "simulated/p40/ablation_events.csv": [("figure", "timelines", "--rows", "ROWS", "--out", "OUT")],
    "published/published.csv": [("published", "--folder", "FOLDER", "--out", "OUT")],
}


def cut(path):
    """Drop the last line, as a disk that is full does by chance."""
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    for place in ("published", "simulated/p40", AMD, INTEL):
        shutil.copytree(REFERENCE_FOLDER / place, folder / place)
    shutil.copy(REFERENCE_FOLDER / DESCRIPTOR, folder / DESCRIPTOR)
    return folder


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, some in COMMANDS.items() for words in some])
def test_every_command_refuses_a_table_that_was_cut_at_the_end_of_a_line(package, tmp_path, capsys, name, words):
    table = package / name
    whole = table.read_bytes()
    places = {"TABLE": table, "ROWS": table.with_name(f"{table.stem.partition('_')[0]}.csv"), "FOLDER": table.parent}
    places["OUT"] = tmp_path / "out"
    cut(table)
    try:
        with pytest.raises(SystemExit) as ended:
            main([str(places.get(word, word)) for word in words])
    finally:
        table.write_bytes(whole)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"table must have the digest that datapackage.json records, got another for {table}" in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_change_that_is_meant_is_described_anew(table):
    folder = table.parent
    write_descriptor(folder)
    assert len(read_rows(table, ())) == 3
    cut(table)
    with pytest.raises(ConfigError, match="write them anew: python -m gpipe_bench datapackage write"):
        read_rows(table, ())
    write_descriptor(folder)
    assert len(read_rows(table, ())) == 2


def test_a_table_that_no_package_lists_needs_no_digest(table):
    write_descriptor(table.parent)
    other = shutil.copy(table, table.with_name("other.csv"))
    assert len(read_rows(other, ())) == 3


def test_a_descriptor_that_is_none_is_refused(table):
    (table.parent / DESCRIPTOR).write_text("{}")
    with pytest.raises(ConfigError, match="descriptor must be one that datapackage write wrote"):
        read_rows(table, ())
