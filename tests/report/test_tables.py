"""Wide tables become such that can be read: medians of repeats, and what all lines say alike once, above them."""

from __future__ import annotations

import pandas as pd

from gpipe_bench.report.tables import page_table
from gpipe_bench.results.tables import read_text
from tests.figures.synthetic import ablation_row, write_rows


def table_of(tmp_path, rows):
    return page_table("t", read_text(write_rows(tmp_path / "rows.csv", rows)))


def test_repeats_are_one_line_with_their_median(tmp_path):
    rows = [
        ablation_row(variant, k, throughput_samples_per_s=speed + k)
        for variant, speed in (("baseline", 1.5), ("dep-x-x", 10.25))
        for k in range(3)
    ]
    table = table_of(tmp_path, rows)
    assert table.header == ["variant", "throughput samples per s"]
    assert [[field.text for field in line] for line in table.lines] == [["baseline", "2.50"], ["dep-x-x", "11.2"]]
    assert {"n 3", "partitions 4", "device cpu Imaginary 9000"} <= set(table.facts)
    assert table.evidence == "measured"


def test_digests_are_left_to_the_provenance(tmp_path):
    rows = [ablation_row("baseline", chunks=m, config_sha256=f"{m}" * 64) for m in (1, 2)]
    assert "config sha256" not in table_of(tmp_path, rows).header


def test_fractions_are_percent_and_long_texts_are_cut():
    balance = "-".join("1" * 40)
    found = page_table("t", pd.DataFrame({"error_fraction": ["-0.0493", ""], "balance": [balance, "1"]}))
    assert found.header == ["error %", "balance"]
    assert [found.lines[0][0].text, found.lines[1][0].text] == ["-4.93", ""]
    assert (found.lines[0][1].text, found.lines[0][1].hint) == (f"{balance[:30]}\u2026", balance)


def test_checks_that_are_not_ok_come_first_even_of_a_long_table():
    cells = {"cell_name": [f"c{k}" for k in range(3001)], "verdict": ["ok"] * 3000 + ["OUTSIDE"]}
    found = page_table("t", pd.DataFrame(cells))
    assert [field.text for field in found.lines[0]] == ["c3000", "OUTSIDE"]
    assert (len(found.lines), found.total) == (40, 3001)
