"""What docs/schedules_compared.md says of a cell is what the committed rows hold."""

from __future__ import annotations

import csv
import re

import pytest

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.figures.schedule_bubbles import settings_of
from gpipe_bench.figures.schedules import read_cells
from gpipe_bench.figures.text import significant
from tests.project.pages import PAGES
from tests.project.tree import ROOT

PAGE = PAGES["docs/schedules_compared.md"]
HEAD = re.compile(r"\| (\S+), (\S+), p = (\d+), m = (\d+), `(\w+)` \| samples/s \| GiB \| idle \| row \|\n\|[-:|]+\|\n")
# Network, profile, p, m and checkpoint mode from the head of a table, then the fields of each of its lines.
LINES = [
    [*head.groups(), *(field.strip() for field in line.split("|")[1:-1])]
    for head in HEAD.finditer(PAGE)
    for line in PAGE[head.end() :].partition("\n\n")[0].splitlines()
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
    assert len(LINES) == len(re.findall(r"\| `[0-9a-f]{8}` \|$", PAGE, re.MULTILINE)) > 15


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[-1].strip("`"))
def test_a_line_is_its_row(cells, line):
    model, profile, devices, chunks, checkpoint, schedule, throughput, memory, idle, key = line
    row, peak = cells[key.strip("`")]
    assert (model, profile, "simulated") == (row["model"], row["profile"], row["evidence"])
    assert (devices, chunks, checkpoint) == (row["device_count"], row["chunks"], row["checkpoint"])
    assert schedule == f"`{row['schedule']}`"
    assert throughput == significant(float(row["throughput_samples_per_s"]))
    assert memory == significant(peak)
    share = sum(float(row[f"{name}_fraction"]) for name in ("bubble", "imbalance", "copy"))
    assert idle == f"{share * 100:.1f} %"
    assert row["dirty"] == "False"


def test_the_summary_is_what_the_rows_say(cells):
    speeds = {}
    for row, _ in cells.values():
        kind = (row["evidence"], row["profile"], row["precision"] or "float32", row["steps_overlap"] or "True")
        if kind == ("simulated", "h100", "float32", "True") and row["status"] == "ok":
            place = row["model"], row["device_count"], row["chunks"], row["checkpoint"]
            speeds.setdefault(place, {})[row["schedule"]] = float(row["throughput_samples_per_s"])

    def over_the_fastest(schedule, model, devices, chunks, checkpoint="never"):
        own = speeds[model, devices, chunks, checkpoint]
        return own[schedule] / max(own.values())

    for model in ("vit", "unet", "gpt2-xl"):
        assert all(over_the_fastest("zb_v", model, "8", chunks) > 0.98 for chunks in ("16", "64"))
        own = [speeds[model, "8", chunks, "never"] for chunks in ("16", "64")]
        assert all(speed["v_half"] > speed["1f1b"] for speed in own)
    for model in ("vit", "gpt2-xl"):
        assert all(over_the_fastest("zb_h2", model, devices, "64") > 0.99 for devices in ("16", "32"))
    for checkpoint in ("never", "always", "except_last"):
        assert all(over_the_fastest("zb_h1", "gpt2", "8", chunks, checkpoint) > 0.9999 for chunks in ("16", "64"))
        assert over_the_fastest("1f1b", "amoebanet-d", "8", "64", checkpoint) > 0.9999


def test_how_many_cells_do_not_fit_the_memory(cells):
    simulated = [row for row, _ in cells.values() if row["evidence"] == "simulated"]
    failed = sum(row["status"] == "oom" for row in simulated)
    assert f"{failed} of {len(simulated)} simulated cells do not fit the memory" in PAGE


def test_how_far_measured_idle_shares_are_above_the_formula():
    rows = read_cells(REFERENCE_FOLDER / "measured" / "2x-intel-xeon-processor" / "schedules.csv", "measured")
    (setting,) = settings_of([cell.row for cell in rows])
    idle = setting.idle["measured, threads"]
    above = [idle[name] - setting.idle["formula"][name] for name in idle]
    assert f"All of it is {100 * min(above):.0f} to {100 * max(above):.0f} points above the formula" in " ".join(
        PAGE.split()
    )
