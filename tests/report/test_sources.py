"""Folders that a report reads: a run's, and reference results sorted by evidence and hardware."""

from __future__ import annotations

import re

import pytest

from gpipe_bench.cli import main
from gpipe_bench.report.sources import find_sources
from tests.figures.synthetic import ablation_row, published_ablation, write_rows

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="244.8pt" height="100pt"><rect width="9" height="9"/></svg>'
H9 = {"evidence": "simulated", "device": "cuda Imaginary H9", "profile": "h9", "throughput_samples_per_s": 50.0}
CPU = {"evidence": "measured", "profile": "mine", "throughput_samples_per_s": 3.0}
OTHER = {**CPU, "device": "cpu Other", "profile": "other"}


@pytest.fixture
def reference(tmp_path):
    """Reference results as the project keeps them: published, simulated on h9, measured on two machines."""
    for place, rows in (
        ("published/rows.csv", published_ablation()),
        ("simulated/h9/ablation.csv", [ablation_row("baseline", **H9)]),
        ("measured/mine/ablation.csv", [ablation_row("baseline", **CPU)]),
        (
            "measured/other/ablation.csv",
            [ablation_row("baseline", **OTHER)],
        ),
    ):
        path = tmp_path / "results" / "reference" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, rows)
    for place in ("simulated-h9", "measured-mine"):
        folder = tmp_path / "figures" / "reference" / place
        folder.mkdir(parents=True)
        (folder / "ablation.svg").write_text(SVG)
    return tmp_path / "results" / "reference"


def test_reference_results_are_a_source_for_each_evidence_and_hardware(reference):
    found = [(source.place, len(source.tables), len(source.images)) for source in find_sources(reference)]
    assert found == [("published", 1, 0), ("simulated-h9", 1, 1), ("measured-mine", 1, 1), ("measured-other", 1, 0)]


def test_a_run_is_one_source_without_its_companions(tmp_path):
    for name in ("ablation", "ablation_events", "ablation_devices", "transparency_verdict"):
        (tmp_path / f"{name}.csv").write_text("evidence\n")
    (source,) = find_sources(tmp_path)
    assert source.place == ""
    assert [path.stem for path in source.tables] == ["ablation", "transparency_verdict"]


def test_every_table_and_figure_names_its_evidence_and_hardware(reference, tmp_path):
    with pytest.raises(SystemExit) as caught:
        main(["report", "--results", str(reference), "--out", str(tmp_path / "report.html")])
    assert caught.value.code == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'<figure id="([^"]+)"', text) == [
        "figure-simulated-h9-ablation",
        "figure-measured-mine-ablation",
    ]
    captions = re.findall(r'<figcaption>.*?<span class="badge \w+">(\w+)</span> (\w+)\. ', text)
    assert captions == [("simulated", "h9"), ("measured", "mine")]
    titles = re.findall(r'<summary><span class="badge \w+">(\w+)</span> Table (\w+ on \w+|rows)', text)
    assert titles == [
        *(("simulated", "ablation on h9"), ("measured", "ablation on mine"), ("measured", "ablation on other")),
        ("published", "rows"),
    ]
    assert "<code>measured/other/ablation.csv</code>" in text
