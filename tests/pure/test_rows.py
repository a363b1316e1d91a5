"""The row schema."""

import json

import pytest

from gpipe_bench.components import Components
from gpipe_bench.results.rows import EVIDENCE, SCHEMA_VERSION, STATUSES, Row

_IN_ORDER = """
    experiment evidence model model_args variant clock_cycle fork_join copy_streams portals early_recompute backward
    transfer flavour partitions chunks microbatches checkpoint batch_size balance repeat seed status reason
    throughput_samples_per_s step_time_ms peak_allocated_gib peak_reserved_gib utilization_fraction bubble_fraction
    copy_fraction recompute_fraction imbalance_fraction device device_count profile source torch cuda driver python
    commit dirty config_sha256 started_utc schema_version cell schedule processes hosts clock_error_us
    run_as autograd sweep_kind steps_overlap precision optimizer
"""
COLUMNS = _IN_ORDER.split()


def test_columns_and_their_order_are_fixed():
    assert list(Row.columns()) == COLUMNS


def test_a_row_without_figures_is_measured_ok_and_of_this_schema():
    row = Row()
    assert (row.evidence, row.status, row.schema_version) == ("measured", "ok", SCHEMA_VERSION)
    assert row.throughput_samples_per_s is None


def test_round_trip_through_json():
    row = Row(experiment="ablation", model="unet", clock_cycle=True, throughput_samples_per_s=1.5, dirty=False)
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row
    assert list(row.to_dict()) == COLUMNS


@pytest.mark.parametrize("evidence", EVIDENCE)
def test_three_kinds_of_evidence(evidence):
    assert Row(evidence=evidence).evidence == evidence


def test_other_evidence_is_refused():
    with pytest.raises(
        ValueError, match="evidence must be one of published, simulated, emulated, measured, got 'guessed'"
    ):
        Row(evidence="guessed")


def test_other_statuses_are_refused():
    with pytest.raises(ValueError, match=r"status must be one of ok, oom, .* got 'fine'"):
        Row(status="fine")


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
def test_a_row_that_is_not_ok_says_why(status):
    assert Row(status=status, reason="no such device").reason == "no such device"
    with pytest.raises(ValueError, match="reason must be given"):
        Row(status=status)


def test_unknown_columns_are_refused_by_name():
    with pytest.raises(ValueError, match=r"got \['speed', 'speed_unit'\]"):
        Row.from_dict({"speed_unit": 1, "model": "unet", "speed": 2})


def test_every_component_of_the_factorial_has_a_column():
    assert set(Components.switched()) <= set(COLUMNS)


def test_the_ideal_bubble_is_that_of_the_micro_batches_that_there_were():
    assert Row(partitions=4, chunks=8).ideal_bubble == 3 / 11
    assert Row(partitions=4, chunks=8, microbatches=5).ideal_bubble == 3 / 8
    assert Row(partitions=1, chunks=8).ideal_bubble == 0
    assert Row(chunks=8).ideal_bubble is None


def test_the_ideal_bubble_is_that_of_schedules_which_fill_and_drain_as_gpipe_does():
    assert Row(partitions=4, chunks=8, schedule="1f1b").ideal_bubble == 3 / 11
    assert Row(partitions=4, chunks=8, schedule="zb_h1").ideal_bubble is None
