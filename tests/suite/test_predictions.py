"""The table of published and simulated cells: complete, with roles, and honest about what ran out of memory."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from gpipe_bench.cli import main
from gpipe_bench.data import PUBLISHED_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.models.table import model_spec, parse_arguments
from gpipe_bench.results.configurations import digest
from gpipe_bench.results.rows import Row
from gpipe_bench.simulator.published.settings import (
    published_cells,
    published_settings,
    published_tables,
    published_value,
)
from gpipe_bench.suite.published import predictions as module
from gpipe_bench.suite.published.predictions import METRICS, Prediction, predictions, print_predictions, summary, write
from gpipe_bench.suite.published.simulations import published_cell, simulate_published
from gpipe_bench.suite.running.simulated import simulated_step
from tests.suite.cells_of import ok_result

TABLES = tuple(dict.fromkeys(row.table for row in published_settings()))
DIGEST = "d" * 64
ROW = Row(evidence="simulated", profile="p40", commit="c" * 40, dirty=False, config_sha256=DIGEST, reason="too small")


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def instant(monkeypatch):
    """Every simulation gives 1 of everything."""
    row = replace(ROW, throughput_samples_per_s=1.0, utilization_fraction=1.0, peak_reserved_gib=1.0)
    monkeypatch.setattr(module, "simulate_published", lambda *_: replace(ok_result(), row=row))


def setting(table, experiment):
    return next(row for row in published_settings() if (row.table, row.experiment) == (table, experiment))


def cell(published, simulated, metric="peak_reserved_gib", role="predicted"):
    return Prediction(replace(setting("unet-memory", "baseline"), role=role), metric, published, simulated, ROW)


def test_every_published_cell_of_a_row_with_settings_has_one_row(instant):
    known = {(row.table, row.experiment) for row in published_settings()}
    with (PUBLISHED_FOLDER / "published.csv").open(encoding="utf-8") as file:
        cells = [
            (row["table"], row["experiment"], row["metric"])
            for row in csv.DictReader(file)
            if not row["source"].startswith(("torchgpipe:docs", "GPipe:"))
            and row["metric"] in METRICS
            and (row["table"], row["experiment"]) in known
        ]
    found = Counter((one.setting.table, one.setting.experiment, one.metric) for one in predictions(TABLES))
    assert found == Counter(cells)
    assert len(cells) == 159


def test_cells_that_were_held_out_are_in_no_other_mean():
    found = summary([cell(1.0, 1.1), cell(1.0, 2.0, role="held_out"), cell(1.0, 1.3, role="fitted")])
    assert "predicted: mean absolute error 10.00 % of 1 cells" in found
    assert "held out until it was predicted: mean absolute error 100.00 % of 1 cells" in found


def test_no_metric_of_throughput_utilisation_or_memory_is_left_out():
    printed = {metric for row in published_settings() for metric in published_cells(row)}
    assert printed - {*METRICS} == {"speedup", "parameters", "span_bubble_fraction"}


def test_partitions_of_zero_bubble_fill_the_devices_that_it_says():
    values = published_tables()[0]
    devices = values[values["table"] == "zero-bubble"].set_index("experiment")["partitions"].to_dict()
    own = [row for row in published_settings() if row.table == "zero-bubble"]
    assert len(own) == 39
    for row in own:
        cell = published_cell(row, row.batch_size)
        assert cell.schedule_devices == devices[row.experiment]
        assert sum(row.layers) == model_spec(row.model).layers(parse_arguments(row.model, row.model_args))


def test_zero_bubble_is_predicted_from_the_law_alone(traces):
    for experiment in ("14.6B-m48-1f1b", "14.6B-m48-zb_1p", "14.6B-m48-zb_2p"):
        own, metric = setting("zero-bubble", experiment), "throughput_samples_per_s_per_device"
        result = simulate_published(own, {}, traces)
        assert METRICS[metric](own, result, None) == pytest.approx(published_value(own, metric), rel=0.03)


def test_memory_of_zero_bubble_is_predicted_from_shapes_alone(traces):
    """That of the fullest device, which is not the first one; the paper prints whole GB, here 30, 32 and 59."""
    for experiment, printed_gb in (("1.5B-m24-1f1b", 30), ("1.5B-m24-zb_1p", 32), ("1.5B-m24-zb_2p", 59)):
        own, metric = setting("zero-bubble", experiment), "fullest_peak_allocated_gib"
        assert published_value(own, metric) == pytest.approx(printed_gb * 1e9 / 2**30, rel=1e-4)
        assert METRICS[metric](own, simulate_published(own, {}, traces), None) == pytest.approx(
            published_value(own, metric), rel=0.03
        )


def test_rows_of_llm_foundry_are_the_models_and_batches_that_were_printed():
    sizes = {"350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20)}
    values = published_tables()[0].set_index(["table", "experiment"])
    own = [row for row in published_settings() if row.table.startswith("llm-foundry")]
    assert len(own) == 24 + 17
    for row in own:
        model, length = row.experiment.split("-")
        arguments = parse_arguments(row.model, row.model_args)
        assert tuple(arguments[name] for name in ("L", "D", "heads")) == sizes[model]
        assert (arguments["context"], arguments["dropout"]) == (int(length), 0)
        tokens, *_, microbatch = (
            int(word) for word in re.findall(r"\d+", values.loc[row.table, row.experiment]["notes"])
        )
        assert published_value(row, "throughput_samples_per_s_per_device") == pytest.approx(
            tokens / int(length), rel=1e-5
        )
        assert row.batch_size == row.chunks * microbatch
        assert sum(row.layers) == model_spec(row.model).layers(arguments)


@pytest.mark.parametrize("experiment", ["350m-65536", "760m-8192", "3b-16384"])
def test_attention_of_models_that_the_fit_did_not_see_takes_its_share_at_any_length(traces, experiment):
    own, metric = setting("llm-foundry", experiment), "throughput_samples_per_s_per_device"
    assert own.role == "transferred"
    result = simulate_published(own, {}, traces)
    assert METRICS[metric](own, result, None) == pytest.approx(published_value(own, metric), rel=0.02)


def test_what_the_fit_saw_is_fitted_and_all_else_predicted():
    assert {(row.table, row.experiment) for row in published_settings() if row.role == "fitted"} == {
        ("unet-speed", "baseline"),
        ("unet-speed", "pipeline-1"),
        ("resnet101-speed", "baseline"),
        ("resnet101-speed", "pipeline-1"),
        ("amoebanet-d-speed", "n2m1"),
        *(("llm-foundry", f"1b-{512 * 2**power}") for power in range(7)),
    }


def test_at_most_four_constants_are_fitted():
    constants = load_profile("p40").efficiency.model_dump(exclude_none=True)
    assert constants.pop("origin") == "fitted"
    assert len(constants) <= 4


def test_the_file_has_the_columns_and_numbers_or_nothing(tmp_path):
    write([cell(20.0, 21.0), cell(None, None), cell(20.0, None)], tmp_path / "new" / "predictions.csv")
    text = (tmp_path / "new" / "predictions.csv").read_text(encoding="utf-8")
    head = "table,experiment,metric,published,simulated,error_fraction,role,evidence,profile,commit,dirty"
    assert text.splitlines() == [
        f"{head},config_sha256,schema_version",
        f"unet-memory,baseline,peak_reserved_gib,20,21,0.05,predicted,simulated,p40,{'c' * 40},False,{DIGEST},2",
        f"unet-memory,baseline,peak_reserved_gib,,,,predicted,simulated,p40,{'c' * 40},False,{DIGEST},2",
        f"unet-memory,baseline,peak_reserved_gib,20,,,predicted,simulated,p40,{'c' * 40},False,{DIGEST},2",
    ]
    beside = (tmp_path / "new" / "predictions_configurations.csv").read_text(encoding="utf-8").splitlines()
    assert beside[0] == "config_sha256,configuration"
    assert beside[1].startswith(digest(setting("unet-memory", "baseline").configuration))


def test_settings_of_print_hardware_and_autograd_engine_decide_the_configuration():
    known = json.loads(setting("unet-memory", "baseline").configuration)
    assert (known["profile"], known["flavour"], known["balance"]) == ("p40", "published", "")
    assert digest(setting("unet-speed", "baseline").configuration).startswith("74b1701dfda7")
    assert digest(setting("ablation", "baseline").configuration).startswith("9c19cbbc94a1")


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
    row = setting("unet-speed", "pipeline-4")
    cells = [published_cell(row, size) for size in (row.batch_size, row.rest_batch_size)]
    whole, rest = (simulated_step(one, one.balance, cache=traces).step_time_ms for one in cells)
    samples = row.full_steps * row.batch_size + row.rest_batch_size
    assert samples == 10_000
    found = simulate_published(row, {}, traces).row.throughput_samples_per_s
    assert found == pytest.approx(samples / (row.full_steps * whole + rest) * 1e3)


@pytest.mark.parametrize(("batch_size", "mode"), [(512, "except_last"), (272, "always")])
def test_fewer_micro_batches_than_chunks_are_all_checkpointed(batch_size, mode):
    """272 samples in 32 chunks are 31 micro-batches; the one that torchgpipe exempts would be number 31, from 0."""
    assert published_cell(setting("unet-speed", "pipeline-2"), batch_size).checkpoint == mode


def test_out_of_memory_leaves_what_needs_no_run(traces):
    row = setting("amoebanet-d-memory", "pipeline-1")
    result = replace(ok_result(), row=ROW, devices=[{"peak_allocated_gib": None}])
    assert METRICS["model_memory_gib"](row, result, traces) == pytest.approx(3.565, abs=1e-3)
    assert METRICS["activation_memory_gib"](row, result, traces) is None
    assert METRICS["fullest_peak_allocated_gib"](row, result, traces) is None


def test_utilisation_and_memory_are_of_the_ablation(traces):
    """A copy keeps its sender busy, so utilisation falls where copies hold up the work; portals save memory."""
    full, streams = (
        simulate_published(setting("ablation", name), {}, traces).row for name in ("dep-str-ptl", "dep-str-x")
    )
    assert 0.6 < full.utilization_fraction < 0.8
    assert full.peak_reserved_gib < 0.9 * streams.peak_reserved_gib


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


def test_outside_a_checkout_the_commit_stays_empty(tmp_path):
    write([replace(cell(20.0, 21.0), row=replace(ROW, commit="", dirty=None))], tmp_path / "predictions.csv")
    assert (tmp_path / "predictions.csv").read_text().splitlines()[1].endswith(f",predicted,simulated,p40,,,{DIGEST},2")


def test_a_utilisation_of_flops_is_the_share_of_the_peak_of_all_devices():
    """105.141 TFLOP for a sample, two H100s of 989.4 TFLOP/s in bfloat16."""
    result = replace(ok_result(), row=replace(ROW, throughput_samples_per_s=2.0))
    found = METRICS["model_flops_utilization_fraction"](setting("nanotron", "3.57B-pp2-dp4"), result, None)
    assert found == pytest.approx(2 * 105.141 / (2 * 989.4))


def test_work_of_a_sample_is_that_of_nanotron():
    """Three times the forward pass: products of 4 D^2, 2 T D and 3 D H in each block, and the head."""
    row, tokens = setting("nanotron", "1.34B-pp2-dp4"), 4096
    layers, width, hidden, vocabulary = 16, 2048, 8192, 131072
    block = 2 * tokens * (4 * width**2 + 2 * tokens * width + 3 * width * hidden)
    work = 3 * (layers * block + 2 * tokens * width * vocabulary)
    assert row.tflop_per_sample == pytest.approx(work / 1e12, rel=1e-5)


def test_a_row_with_a_wrong_setting_is_named():
    with pytest.raises(ConfigError, match=r"nanotron 1.34B-pp2-dp4: schedule must be one of"):
        published_cell(replace(setting("nanotron", "1.34B-pp2-dp4"), schedule="1b1f"), 64)
