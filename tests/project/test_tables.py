"""The tables of README and docs are those that the reference results give."""

from __future__ import annotations

import csv

import pytest

from scripts import tables
from scripts.tables import read_pages, rendered
from tests.project.tree import ROOT


def changed(page: str, old: str, new: str) -> dict[str, str]:
    pages = read_pages()
    assert old in pages[page]
    return {**pages, page: pages[page].replace(old, new, 1)}


def test_tables_are_those_of_the_reference_results():
    assert rendered(read_pages()) == read_pages(), "run: make tables"


def test_the_table_of_errors_says_what_the_predictions_are_off():
    with (ROOT / "results/reference/simulated/p40/predictions.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["role"] == "predicted" and row["error_fraction"]]
    errors = [abs(float(row["error_fraction"])) for row in rows]
    rest = [abs(float(row["error_fraction"])) for row in rows if row["metric"] != "model_memory_gib"]
    mean, most, other = (f"{value:.1%}" for value in (sum(errors) / len(errors), max(errors), sum(rest) / len(rest)))
    assert len(errors) - len(rest) == 5
    pages = {name: " ".join(text.split()).replace(" %", "%") for name, text in read_pages().items()}
    assert f"| **all** | {len(rows)} | {mean} |" in pages["docs/claims.md"]
    said = f"{mean} off on average over {len(rows)} published cells, at most {most}; without the five that only count"
    assert f"{said} parameters, {other}." in pages["README.md"]
    said = f"Five of the {len(rows)} cells only count parameters; the mean over the other {len(rest)} is {other},"
    assert said in pages["docs/claims.md"]


def test_a_changed_number_is_noticed():
    assert rendered(changed("docs/reproduce.md", "| 30.7 |", "| 31.7 |")) == read_pages()


def test_a_lost_mark_is_noticed():
    with pytest.raises(ValueError, match=r"tables must be summary, gpu, errors, .* each once, got (?!.*errors)"):
        rendered(changed("docs/claims.md", "<!-- table: errors -->", ""))


def test_the_command_that_writes_the_tables_can_check_them(capsys):
    assert tables.main(["--check"]) == 0
    assert tables.main(["--chek"]) == 2
    assert "option must be --check or none, got --chek" in capsys.readouterr().err


def test_the_check_fails_where_a_number_differs(monkeypatch, capsys):
    wrong = changed("README.md", "| 30.7 |", "| 31.7 |")
    monkeypatch.setattr(tables, "read_pages", lambda: wrong)
    assert tables.main(["--check"]) == 1
    assert "README.md: tables differ from results/reference" in capsys.readouterr().err
