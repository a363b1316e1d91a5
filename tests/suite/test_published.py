"""Published values become rows beside the others."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from gpipe_bench.components import PUBLISHED
from gpipe_bench.data import PUBLISHED_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.rows import Row
from gpipe_bench.suite.evaluation.collect import collect
from gpipe_bench.suite.experiments.config import load_config
from gpipe_bench.suite.published.values import published_for, published_rows
from gpipe_bench.suite.storage.raw import RawResult
from tests.suite.cells_of import ok_result


def like(cell, **changes):
    """A row with the settings of a cell."""
    settings = cell.settings()
    names = ("model", "model_args", "variant", "partitions", "chunks", "checkpoint", "batch_size", "balance")
    return Row(**{name: settings[name] for name in names}, **changes)


CELLS = load_config().experiment("ablation").simulated[:32]


def test_the_ablation_is_what_was_printed():
    rows = [row for row in published_rows() if row.experiment == "ablation"]
    assert [(row.variant, row.throughput_samples_per_s, row.peak_reserved_gib) for row in rows] == [
        ("baseline", 30.662, 52.2),
        ("dep-x-x", 41.306, 19.1),
        ("dep-str-x", 55.191, 30.0),
        ("dep-str-ptl", 58.477, 23.5),
    ]
    assert [row.utilization_fraction for row in rows] == [0.44, 0.59, 0.71, 0.75]
    assert {(row.evidence, row.status, row.device_count) for row in rows} == {("published", "ok", 4)}


def test_every_published_row_names_its_source():
    assert {row.source.split("/")[0] for row in published_rows()} == {"torchgpipe:benchmarks"}


def test_the_default_simulation_has_the_published_settings():
    found = published_for([like(cell) for cell in CELLS])
    assert tuple(row.variant for row in found) == PUBLISHED


def test_other_settings_have_no_published_row():
    rows = [like(cell) for cell in CELLS]
    assert published_for([replace(row, batch_size=64) for row in rows]) == []
    assert published_for([like(CELLS[1])])[0].variant == "dep-x-x"


def test_how_tensors_cross_does_not_matter():
    assert len(published_for([like(CELLS[0], transfer="host"), like(CELLS[0])])) == 1


def test_published_rows_go_before_the_collected_ones(tmp_path):
    values = {"throughput_samples_per_s": 1.0, "step_time_ms": 1.0}
    row = like(CELLS[0], repeat=0, config_sha256=CELLS[0].config_sha256, **values)
    result = replace(ok_result(), cell="x", row=row, configuration=CELLS[0].configuration)
    (tmp_path / "a.json").write_text(result.to_json())
    rows = collect([tmp_path / "a.json"], "ablation", tmp_path / "out.csv", PUBLISHED_FOLDER)
    assert [(row.evidence, row.experiment) for row in rows] == [("published", "ablation"), ("measured", "ablation")]
    assert [row.evidence for row in collect([tmp_path / "a.json"], "a", tmp_path / "out.csv")] == ["measured"]
    assert RawResult.read(tmp_path / "a.json") == result


@pytest.fixture
def folder(tmp_path):
    for name in ("published.csv", "settings.csv"):
        shutil.copy(PUBLISHED_FOLDER / name, tmp_path / name)
    return tmp_path


def test_a_folder_without_values_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"table must be a readable CSV file, got .*published\.csv"):
        published_rows(tmp_path)


def test_a_lost_column_is_refused(folder):
    text = (folder / "settings.csv").read_text()
    (folder / "settings.csv").write_text(text.replace("checkpoint", "checkpiont", 1))
    with pytest.raises(ConfigError, match=r"must include 'checkpoint', got none .*; use 'checkpiont'"):
        published_rows(folder)


def test_a_published_line_that_is_there_twice_is_refused(folder):
    """It would count twice: the parts of a memory are added up."""
    lines = (folder / "published.csv").read_text().splitlines(keepends=True)
    (folder / "published.csv").write_text("".join([*lines[:2], *lines[1:]]))
    with pytest.raises(ConfigError, match=r"line 3: line must differ in .* from those above, got the same"):
        published_rows(folder)
