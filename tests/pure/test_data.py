"""Data files are found in the package; what needs a checkout says so."""

from __future__ import annotations

import pytest

from gpipe_bench import data
from gpipe_bench.cli import main
from tests.project.tree import ROOT


@pytest.fixture
def _installed(monkeypatch, tmp_path):
    """The package as if it lay in a folder without a checkout around it."""
    monkeypatch.setattr(data, "_DATA", tmp_path / "site-packages" / "gpipe_bench" / "data")


def test_in_a_checkout_the_data_are_the_files_of_the_repository():
    assert data.REFERENCE_FOLDER == ROOT / "results" / "reference"
    assert data.PUBLISHED_FOLDER == ROOT / "results" / "reference" / "published"
    assert data.DEFAULT_CONFIG == ROOT / "config" / "config.yaml"
    assert data.TOLERANCES == ROOT / "config" / "tolerances.csv"
    assert data.checkout_folder() == ROOT == data.needed_checkout("this test")


def error_of(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("command", ["write", "check", "take"])
def test_the_reference_results_belong_to_a_checkout(command, capsys, tmp_path):
    words = ["datapackage", command, *([str(tmp_path)] if command == "take" else [])]
    rest = "must run from a checkout of gpipe_bench, got an installed package; clone the repository"
    assert error_of(words, capsys) == f"error: datapackage without --folder {rest}\n"


def test_predictions_is_a_command(tmp_path, capsys):
    out = tmp_path / "predictions.csv"
    with pytest.raises(SystemExit) as ended:
        main(["predictions", "--table", "ablation", "--out", str(out)])
    assert ended.value.code == 0
    assert capsys.readouterr().out.endswith(f"written: {out}\n")
    assert len(out.read_text().splitlines()) == 13


def test_a_table_that_nobody_published_is_refused(capsys):
    assert "error: --table must be one of ablation, " in error_of(["predictions", "--table", "ablatio"], capsys)
