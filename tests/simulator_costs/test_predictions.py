"""The table of published and simulated cells: complete, with roles, and honest about what ran out of memory."""

from __future__ import annotations

import csv
import json
from collections import Counter

import pytest

from gpipe_bench.cli import main
from gpipe_bench.data import PUBLISHED_FOLDER
from gpipe_bench.errors import OutOfMemory
from gpipe_bench.results.configurations import digest
from gpipe_bench.simulator.clock.run import run
from gpipe_bench.simulator.hardware.profile import load_profile
from gpipe_bench.simulator.predictions import TABLES, Prediction, predictions, print_predictions, summary, write
from gpipe_bench.simulator.published import runs as published_runs
from gpipe_bench.simulator.published.runs import METRICS, PublishedRuns, SimulatedValues, is_fitted
from gpipe_bench.simulator.published.settings import published_settings

P40 = load_profile("p40")


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def instant(monkeypatch):
    """Every simulation gives 1 of everything."""
    monkeypatch.setattr(PublishedRuns, "outcome", lambda *_: SimulatedValues(dict.fromkeys(METRICS, 1.0)))


def setting(table, experiment):
    return next(row for row in published_settings() if (row.table, row.experiment) == (table, experiment))


def cell(published, simulated, metric="peak_reserved_gib", role="predicted"):
    reason = "" if simulated else "too small"
    return Prediction("unet-memory", "baseline", metric, published, simulated, role, reason, '{"chunks": 8}')


DIGEST = digest('{"chunks": 8}')


def test_every_published_cell_has_one_row(instant):
    with (PUBLISHED_FOLDER / "published.csv").open(encoding="utf-8") as file:
        cells = [
            (row["table"], row["experiment"], row["metric"])
            for row in csv.DictReader(file)
            if row["source"].startswith("torchgpipe:benchmarks")
            and row["metric"] in {*METRICS}
            and row["table"] in TABLES
        ]
    assert Counter((row.table, row.experiment, row.metric) for row in predictions()) == Counter(cells)
    assert len(cells) == 46


def test_cells_that_were_held_out_are_in_no_other_mean():
    rows = [cell(1.0, 1.1), cell(1.0, 2.0, role="held_out"), cell(1.0, 1.3, role="fitted")]
    found = summary(rows)
    assert "predicted: mean absolute error 10.00 % of 1 cells" in found
    assert "held out until it was predicted: mean absolute error 100.00 % of 1 cells" in found


def test_no_metric_of_throughput_utilisation_or_memory_is_left_out():
    with (PUBLISHED_FOLDER / "published.csv").open(encoding="utf-8") as file:
        found = {
            row["metric"]
            for row in csv.DictReader(file)
            if row["source"].startswith("torchgpipe:benchmarks") and row["table"] in TABLES
        }
    assert found - {*METRICS} == {"speedup", "parameters"}


def test_what_the_fit_saw_is_fitted_and_all_else_predicted(instant):
    fitted = {(row.table, row.experiment, row.metric) for row in predictions() if row.role == "fitted"}
    rows = {
        ("unet-speed", "baseline"),
        ("unet-speed", "pipeline-1"),
        ("resnet101-speed", "baseline"),
        ("resnet101-speed", "pipeline-1"),
        ("amoebanet-d-speed", "n2m1"),
    }
    assert fitted == {(*row, "throughput_samples_per_s") for row in rows}
    assert rows == {(row.table, row.experiment) for row in published_settings() if is_fitted(row)}


def test_at_most_four_constants_are_fitted():
    constants = P40.efficiency.model_dump(exclude_none=True)
    assert constants.pop("origin") == "fitted"
    assert len(constants) <= 4


def test_the_file_has_the_columns_and_numbers_or_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("gpipe_bench.simulator.predictions.checkout", lambda: ("c" * 40, False))
    write([cell(20.0, 21.0), cell(None, None), cell(20.0, None)], tmp_path / "new" / "predictions.csv")
    text = (tmp_path / "new" / "predictions.csv").read_text(encoding="utf-8")
    head = "table,experiment,metric,published,simulated,error_fraction,role,evidence,profile,commit,dirty"
    assert text.splitlines() == [
        f"{head},config_sha256,schema_version",
        f"unet-memory,baseline,peak_reserved_gib,20,21,0.05,predicted,simulated,p40,{'c' * 40},False,{DIGEST},2",
        f"unet-memory,baseline,peak_reserved_gib,,,,predicted,simulated,p40,{'c' * 40},False,{DIGEST},2",
        f"unet-memory,baseline,peak_reserved_gib,20,,,predicted,simulated,p40,{'c' * 40},False,{DIGEST},2",
    ]
    beside = (tmp_path / "new" / "predictions_configurations.csv").read_text(encoding="utf-8")
    assert beside.splitlines() == ["config_sha256,configuration", f'{DIGEST},"{{""chunks"": 8}}"']


def test_a_prediction_has_the_configuration_of_the_simulated_row(instant):
    """Settings of print, hardware and autograd engine decide both."""
    row = next(row for row in predictions(["unet-memory"]) if row.experiment == "baseline")
    known = json.loads(row.configuration)
    assert (known["profile"], known["flavour"], known["balance"]) == ("p40", "published", "")
    assert row.configuration == setting("unet-memory", "baseline").configuration("p40")
    assert json.loads(setting("unet-memory", "pipeline-2").configuration("p40"))["balance"].count("-") == 1


def test_the_mean_is_over_predicted_cells():
    rows = [cell(10.0, 11.0), cell(10.0, 8.0), cell(10.0, 20.0, role="fitted")]
    assert "predicted: mean absolute error 15.00 % of 2 cells, largest 20.0 %" in summary(rows)


def test_model_memory_does_not_flatter_the_mean():
    rows = [cell(10.0, 11.0), cell(10.0, 10.0, metric="model_memory_gib")]
    assert "parameters: mean absolute error 10.00 % of 1 cells" in summary(rows)


def test_a_cell_that_only_one_side_could_run_is_said_aloud():
    assert "MISSED" not in summary([cell(10.0, 11.0), cell(None, None)])
    assert "MISSED, and in no mean: 1 " in summary([cell(10.0, 11.0), cell(10.0, None)])
    assert "too small" in summary([cell(10.0, None)])
    assert "published as out of memory" in summary([cell(None, 10.0)])


def test_a_speed_is_that_of_an_epoch_with_its_small_batch(traces):
    runs, row = PublishedRuns(P40, traces), setting("unet-speed", "pipeline-4")
    steps = {size: runs.step_ns(row, size) for size in (row.batch_size, row.rest_batch_size)}
    seconds = (row.full_steps * steps[row.batch_size] + steps[row.rest_batch_size]) / 1e9
    samples = row.full_steps * row.batch_size + row.rest_batch_size
    assert samples == 10_000
    assert runs.outcome(row).values["throughput_samples_per_s"] == pytest.approx(samples / seconds)


@pytest.mark.parametrize(("batch_size", "mode"), [(512, "except_last"), (272, "always")])
def test_fewer_micro_batches_than_chunks_are_all_checkpointed(batch_size, mode, traces, monkeypatch):
    """272 samples in 32 chunks are 31 micro-batches; the one that torchgpipe exempts would be number 31, from 0."""
    seen = []

    def spy(workload, machine, settings):
        seen.append(settings.checkpoint)
        return run(workload, machine, settings)

    monkeypatch.setattr(published_runs, "run", spy)
    PublishedRuns(P40, traces).step_ns(setting("unet-speed", "pipeline-2"), batch_size)
    assert seen == [mode]


def test_out_of_memory_leaves_what_needs_no_run(traces, monkeypatch):
    def too_small(*_, **__):
        raise OutOfMemory(3, 2 << 30, 21 << 30, 22 << 30)

    monkeypatch.setattr(PublishedRuns, "run_of", too_small)
    monkeypatch.setattr(PublishedRuns, "_model_bytes", lambda *_: 1 << 30)
    outcome = PublishedRuns(P40, traces).outcome(setting("amoebanet-d-memory", "pipeline-1"))
    assert outcome.values == {"model_memory_gib": 1.0}
    assert outcome.reason == "out of memory: device 3 asks for 23.00 GiB and has 22.00 GiB"


def test_utilisation_and_memory_are_of_the_ablation(traces):
    """A copy keeps its sender busy, so utilisation falls where copies hold up the work; portals save memory."""
    runs = PublishedRuns(P40, traces)
    full, streams = (runs.outcome(setting("ablation", name)).values for name in ("dep-str-ptl", "dep-str-x"))
    assert set(full) == {"throughput_samples_per_s", "utilization_fraction", "peak_reserved_gib"}
    assert 0.6 < full["utilization_fraction"] < 0.8
    assert full["peak_reserved_gib"] < 0.9 * streams["peak_reserved_gib"]


def test_the_command_writes_the_file_and_prints_the_table(instant, tmp_path, capsys):
    print_predictions(tmp_path / "predictions.csv", ["ablation"])
    printed = capsys.readouterr().out
    assert "dep-str-ptl" in printed
    assert "mean absolute error" in printed
    assert len((tmp_path / "predictions.csv").read_text(encoding="utf-8").splitlines()) == 13


def test_a_file_that_cannot_be_written_is_one_line_and_status_2(instant, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["predictions", "--out", str(tmp_path / "file" / "predictions.csv"), "--table", "ablation"])
    assert capsys.readouterr().err.startswith("error: ")


def test_outside_a_checkout_the_commit_stays_empty(tmp_path, monkeypatch):
    monkeypatch.setattr("gpipe_bench.simulator.predictions.checkout", lambda: ("", None))
    write([cell(20.0, 21.0)], tmp_path / "predictions.csv")
    assert (tmp_path / "predictions.csv").read_text().splitlines()[1].endswith(f",predicted,simulated,p40,,,{DIGEST},2")
