"""Invented results of two experiments, and their page."""

from __future__ import annotations

import pytest

from gpipe_bench.report.page import write_report
from tests.figures.synthetic import (
    ablation_row,
    cpu_ablation,
    event_records,
    published_ablation,
    step_events,
    write_csv,
    write_events,
    write_rows,
)

SVG = """<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 240 100"><metadata>
<dc:description>A &lt; caption.</dc:description></metadata>
<g id="text_1"><text>word of {}</text></g></svg>"""
SIMULATED = {
    "evidence": "simulated",
    "device": "cuda Imaginary H9",
    "device_count": 4,
    "profile": "h9",
    "repeat": None,
    "throughput_samples_per_s": 12.5,
    "step_time_ms": 80.0,
    "peak_reserved_gib": 2.0,
}


def simulated_rows():
    return [
        ablation_row(name, **SIMULATED, flavour=flavour, cell=f"{name}-{flavour}", commit="c" * 40)
        for name in ("baseline", "dep-str-ptl")
        for flavour in ("published", "current")
    ]


def simulated_events():
    found = []
    for row in simulated_rows():
        events = step_events(8, 4, copies=row.variant != "baseline", device="cuda", unit_us=2000)
        found += event_records(events, row.variant, cell=row.cell, evidence="simulated")
    return found


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """``results`` and ``figures``, side by side."""
    place = tmp_path_factory.mktemp("suite")
    folder = place / "results"
    folder.mkdir()
    write_rows(folder / "ablation.csv", [*published_ablation(), *simulated_rows(), *cpu_ablation()])
    own = event_records(step_events(4, 4, copies=False), "dep-x-x", cell="net-dep-x-x-cccccccc")
    write_events(folder / "ablation_events.csv", [*simulated_events(), *own])
    write_csv(
        folder / "predictions.csv", ["metric", "error_fraction"], [{"metric": "<b>&", "error_fraction": "-0.0493"}]
    )
    (place / "figures").mkdir()
    for name in ("ablation_simulated", "ablation_shares_simulated", "ablation_measured", "stray"):
        (place / "figures" / f"{name}.svg").write_text(SVG.format(name))
    return place


@pytest.fixture(scope="session")
def page(results):
    """The report of the invented results."""
    return write_report(results / "results", results / "figures", results / "out" / "report.html")
