"""The tables of README and docs are those that the reference results give."""

from __future__ import annotations

import csv
import re
from statistics import mean

import pytest

from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import frame_of
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from scripts import tables
from scripts.table_contents import TABLES, schedule_sides
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


def test_the_page_of_errors_sums_up_the_predictions():
    """The first table of docs/simulator_errors.md, and what is said of the cells that are not explained."""

    def known(profile):
        with (ROOT / f"results/reference/simulated/{profile}/predictions.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["error_fraction"]]
        return [(row["role"], row["table"], row["experiment"], abs(float(row["error_fraction"]))) for row in rows]

    cells = sorted((cell for cell in known("p40") if cell[0] == "predicted"), key=lambda cell: cell[-1])
    predicted = [error for *_, error in cells]
    page = " ".join((ROOT / "docs/simulator_errors.md").read_text().split())
    whole, rest = mean(predicted), mean(predicted[:-2])
    assert f"| {len(predicted)} published cells of P40s, none of them fitted" in page
    assert f"| throughput, memory, utilisation | {100 * whole:.1f} % |" in page
    assert {cell[1:3] for cell in cells[-2:]} == {("amoebanet-d-speed", "n4m4"), ("amoebanet-d-memory", "pipeline-1")}
    said = f"on one device, the mean absolute error of the other {len(predicted) - 2} cells is {100 * rest:.1f} %."
    assert said in page
    attention = [error for _, table, _, error in known("h100") if table == "llm-foundry-h100"]
    assert f"with a kernel for A100s | throughput | {100 * mean(attention):.1f} % |" in page
    shown = sorted(map(float, re.findall(r"\| [0-9]+ \| ([0-9.]+)% \|", TABLES["transferred"]())))
    assert f"| throughput, memory | {shown[0]} to {shown[-2]} % |" in page
    assert shown[-1] == round(100 * mean(attention), 1)


def test_the_readme_names_the_largest_errors_on_h100s():
    with (ROOT / "results/reference/simulated/h100/predictions.csv").open(newline="") as file:
        rows = [(row["table"], float(row["error_fraction"])) for row in csv.DictReader(file)]
    most = max(abs(error) for table, error in rows if table.startswith("nanotron"))
    other = [error for table, error in rows if table == "llm-foundry-h100"]
    assert {table for table, _ in rows} == {"nanotron", "nanotron-nodes", "llm-foundry-h100"}
    span = f"{100 * min(other):.0f} to {max(other):.0%}"
    said = f"H100 runs of nanotron come out within {most:.0%}, those of llm-foundry {span} too fast."
    assert said in " ".join(read_pages()["README.md"].split()).replace(" %", "%")


def test_a_changed_number_is_noticed():
    assert rendered(changed("docs/reproduce.md", "| 30.7 |", "| 31.7 |")) == read_pages()


def test_a_lost_mark_is_noticed():
    with pytest.raises(ValueError, match=r"tables must be summary, .* errors, .* each once, got (?!.*errors)"):
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


PLACES, SIDES = TABLES["schedules-precisions"].args


def test_the_table_of_precisions_says_where_the_ranking_turns():
    def row(schedule, speed, **columns):
        partitions = 16 if schedule in TWO_PER_DEVICE else 8
        known = {
            "model": "gpt2-xl",
            "schedule": schedule,
            "partitions": partitions,
            "chunks": 16,
            "throughput_samples_per_s": speed,
        }
        return Row(evidence="simulated", **{**known, **columns})

    half = {"precision": "bfloat16", "optimizer": "adamw", "steps_overlap": True}
    # Rows of older tables say neither their precision nor whether steps overlap.
    rows = [row("1f1b", 20.0), row("zb_h2", 25.0), row("zb_v", 30.0), row("v_half", 21.0)]
    rows += [row("1f1b", 100.0, **half), row("zb_h2", 160.0, **half), row("zb_v", 90.0, **half)]
    rows += [row("zb_v", 999.0, **{**half, "steps_overlap": False})]
    rows += [row("v_half", None, status="oom", reason="full", **half)]
    text = schedule_sides(frame_of(rows, Row), PLACES[:1], SIDES)
    lines = [[field.strip() for field in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines == [
        [
            "network",
            *(f"{what} in {side}" for side in ("float32", "bfloat16") for what in ("fastest", "two per device")),
        ],
        ["---", *["---:"] * 4],
        ["gpt2-xl, p = 8, m = 16", "`zb_v` (1.50)", "2 of 2", "`zb_h2` (1.60)", "0 of 1"],
    ]


def test_the_page_of_errors_counts_the_assumptions_that_were_chosen_while_looking():
    with (ROOT / "studies/simulator/assumptions.csv").open(newline="") as file:
        known = [row["how_it_is_known"] for row in csv.DictReader(file)]
    chosen = sum("chosen" in how for how in known)
    said = f"{chosen} of its {len(known)} assumptions were chosen while looking at results."
    assert said in " ".join(read_pages()["docs/simulator_errors.md"].split())
