"""What docs/schedules_compared.md says of a cell is what the committed rows hold."""

from __future__ import annotations

import csv
import re

import pytest

from gpipe_bench.figures.text import significant
from tests.project.pages import PAGES
from tests.project.tree import ROOT

PAGE = PAGES["docs/schedules_compared.md"]
LINES = [
    [field.strip() for field in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if re.search(r"\| `[0-9a-f]{8}` \|$", line)
]


@pytest.fixture(scope="module")
def cells():
    """By the end of its name: the row of a cell, and the memory of its fullest device."""
    rows, peaks = {}, {}
    for path in (ROOT / "results" / "reference").glob("*ulated/*/schedules.csv"):
        with path.open() as file:
            rows |= {row["cell"][-8:]: row for row in csv.DictReader(file)}
        with path.with_name("schedules_devices.csv").open() as file:
            for row in csv.DictReader(file):
                peaks[row["cell"][-8:]] = max(peaks.get(row["cell"][-8:], 0.0), float(row["peak_reserved_gib"]))
    return {key: (row, peaks.get(key)) for key, row in rows.items()}


def test_there_are_rows():
    assert len(LINES) > 40


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[-1].strip("`"))
def test_a_line_is_its_row(cells, line):
    where, devices, chunks, checkpoint, schedule, throughput, memory, idle, key = line
    row, peak = cells[key.strip("`")]
    assert where in (f"{row['model']}, {row['profile']}", f"{row['model']}, {row['profile']}, {row['evidence']}")
    assert (devices, chunks, checkpoint) == (row["device_count"], row["chunks"], row["checkpoint"])
    assert schedule == f"`{row['schedule']}`"
    assert throughput == significant(float(row["throughput_samples_per_s"]))
    assert memory == significant(peak)
    share = sum(float(row[f"{name}_fraction"]) for name in ("bubble", "imbalance", "copy"))
    assert idle == f"{share * 100:.1f} %"
    assert row["dirty"] == "False"


def test_how_many_cells_do_not_fit_the_memory(cells):
    simulated = [row for row, _ in cells.values() if row["evidence"] == "simulated"]
    failed = sum(row["status"] == "oom" for row in simulated)
    assert f"{failed} of {len(simulated)} simulated cells do not fit the" in PAGE
