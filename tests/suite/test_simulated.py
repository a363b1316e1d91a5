"""Simulated cells: settings, names, and what they leave for the tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gpipe_bench.components import PUBLISHED
from gpipe_bench.errors import ConfigError
from gpipe_bench.schedules.table import SCHEDULES
from gpipe_bench.suite.cells import CELL_PATTERN
from gpipe_bench.suite.running.simulated import simulate_cells
from gpipe_bench.suite.simulated_cells import SimulatedCell
from gpipe_bench.suite.storage.raw import RawResult, read_results, results_json
from gpipe_bench.suite.validation import validated

TINY = {
    "model_args": "depth=1;B=1;C=2;size=4",
    "batch_size": 4,
    "chunks": 2,
    "partitions": 2,
    "balance": "8-9",
}
P40 = Path(SimulatedCell().profile_path)
OTHER_SETTINGS = {
    "model_args": "depth=1;B=1;C=4;size=4",
    "batch_size": 8,
    "chunks": 4,
    "balance": "9-8",
    "checkpoint": "always",
    "transfer": "host",
    "optimizer": "adam",
    "profile": "v100",
    "flavour": "current",
    "variant": "baseline",
}


def cell(**settings):
    return SimulatedCell.model_validate({**TINY, **settings})


@pytest.fixture(scope="module")
def results():
    return simulate_cells([cell(), cell(variant="baseline")])


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_every_setting_has_a_part_in_the_id(name):
    assert cell(**{name: OTHER_SETTINGS[name]}).id != cell().id


def test_the_evidence_is_in_the_name():
    assert re.fullmatch(CELL_PATTERN, cell().id)
    assert cell(variant="baseline").id.startswith("simulated-unet-baseline-n2-m2-b4-p40-")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"profile": "p41"}, "profile must be one of a100"),
        ({"flavour": "old"}, "flavour must be one of current, published, got 'old'"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, momentum, rmsprop, adam, adamw"),
        ({"balance": "1-2"}, "balance must sum to the 17 layers of unet"),
        ({"warmup": 1}, "warmup must be a known key"),
    ],
)
def test_wrong_settings_are_named(settings, problem):
    with pytest.raises(ConfigError) as caught:
        validated(SimulatedCell, {**TINY, **settings}, ".".join)
    assert any(text.startswith(problem) for text in caught.value.problems), caught.value.problems


def test_a_profile_may_be_a_file_of_the_user(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(P40.read_text().replace("name: p40", "name: My Box"))
    made = cell(profile=str(path))
    assert "-my-box-" in made.id
    assert made.profile_path == str(path)


def test_a_simulated_row_says_what_it_is(results):
    row = results[0].row
    assert (row.evidence, row.profile, row.flavour, row.status) == ("simulated", "p40", "published", "ok")
    assert (row.variant, row.partitions, row.chunks, row.balance) == ("dep-str-ptl", 2, 2, "8-9")
    assert row.config_sha256 == cell().config_sha256
    assert row.throughput_samples_per_s > 0
    assert row.peak_reserved_gib >= row.peak_allocated_gib > 0
    assert row.started_utc == ""


def test_the_same_cell_gives_the_same_row(results):
    assert simulate_cells([cell(variant="baseline")]) == results[1:]


def test_several_processes_simulate_the_same():
    cells = [cell(variant=variant, batch_size=size) for variant in PUBLISHED for size in (4, 8)]
    seen = []
    many = simulate_cells(cells, seen.append, {cells[1].id}, processes=3)
    assert many == simulate_cells(cells, timelines={cells[1].id})
    assert [bool(result.events) for result in many] == [False, True, *[False] * 6]
    assert sorted(map(repr, seen)) == sorted(repr(result.row) for result in many)


def test_devices_steps_and_events_are_those_of_the_step(results):
    (result, _) = results
    assert [record["layers"] for record in result.devices] == [8, 9]
    total = sum(record["peak_reserved_gib"] for record in result.devices)
    assert total == pytest.approx(result.row.peak_reserved_gib)
    assert result.steps[0]["step_time_ms"] == result.row.step_time_ms
    assert {event["kind"] for event in result.events} >= {"forward", "recompute", "backward", "copy"}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("devices", [0, 1, 2])
def test_a_line_names_its_device_and_a_partition_that_is_alone_there(schedule, devices):
    made = cell(schedule=schedule, partitions=4, balance="4-4-4-5", chunks=4, devices=devices)
    (result,) = simulate_cells([made])
    homes = [made.device_numbers[rank] for rank in made.placement]
    assert [record["device_index"] for record in result.devices] == sorted(set(homes))
    for record in result.devices:
        own = [j for j, home in enumerate(homes) if home == record["device_index"]]
        assert record["device"] == f"cuda:{record['device_index']}"
        assert record["partition"] == (own[0] if len(own) == 1 else None)
        assert record["layers"] == sum([4, 4, 4, 5][j] for j in own)


def test_several_results_share_a_file(results, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(results_json(results))
    assert read_results(path) == results
    with pytest.raises(ConfigError, match="raw result must be a file with one result, got 2"):
        RawResult.read(path)


def test_what_does_not_fit_is_a_row_that_says_how_much_it_needs(tmp_path):
    small = yaml.safe_load(P40.read_text())
    small["memory_gib"] = small["context_gib"] + 0.001
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    (result,) = simulate_cells([cell(profile=str(tmp_path / "small.yaml"), model_args="depth=1;B=1;C=64;size=64")])
    assert (result.row.status, result.row.throughput_samples_per_s) == ("oom", None)
    assert "GiB" in result.row.reason
    assert (result.devices, result.steps, result.events) == ([], [], [])
