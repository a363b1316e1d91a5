"""The experiment of schedules: which cells it simulates, emulates and measures."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from gpipe_bench.bench.experiments.config import SuiteConfig, parse_config
from gpipe_bench.bench.experiments.schedules import MeasuredSchedules, ScheduleSteps, ScheduleSweep
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.errors import ConfigError
from gpipe_bench.schedules import SCHEDULES

SMALL = {"model_args": "depth=1;B=1;C=2;size=4", "batch_size": 8, "chunks": (2, 4), "devices": 2}
HALF = {"precision": "bfloat16", "optimizer": "adamw"}


def test_every_schedule_has_every_number_of_micro_batches_and_mode_on_as_many_devices():
    cells = [cell for cell in ScheduleSweep(**SMALL).simulations() if cell.steps_overlap]
    assert {cell.schedule_devices for cell in cells} == {2}
    points = {(cell.schedule, cell.chunks, cell.checkpoint) for cell in cells}
    assert len(points) == len(cells) == len(SCHEDULES) * 2 * 3


def test_other_numbers_of_devices_have_the_most_micro_batches_and_the_last_mode():
    cells = [cell for cell in ScheduleSweep(**SMALL, scaling=(1, 4)).simulations() if cell.steps_overlap]
    other = [(cell.schedule_devices, cell.chunks, cell.checkpoint) for cell in cells if cell.schedule_devices != 2]
    assert Counter(other) == {(1, 4, "never"): len(SCHEDULES), (4, 4, "never"): len(SCHEDULES)}


def test_cells_of_the_last_mode_are_there_with_steps_that_do_not_overlap():
    cells = ScheduleSweep(**SMALL, scaling=(4,), emulated=("never",)).simulations()
    last = {cell.id for cell in cells if cell.checkpoint == "never" and cell.steps_overlap}
    assert {cell.changed(steps_overlap=True).id for cell in cells if not cell.steps_overlap} == last
    assert all(cell.steps_overlap for cell in ScheduleSteps().simulations()), "those that are drawn are there once"


def test_precision_and_optimizer_are_those_of_every_cell_and_the_usual_ones_are_not_in_keys():
    usual, half = (ScheduleSweep(**SMALL, **more).simulations() for more in ({}, HALF))
    assert {(cell.precision, cell.optimizer) for cell in half} == {("bfloat16", "adamw")}
    assert [cell.changed(precision="float32", optimizer="sgd").id for cell in half] == [cell.id for cell in usual]
    assert not any("precision" in cell.settings() for cell in usual)
    assert {cell.optimizer for cell in ScheduleSweep(**SMALL, optimizer="adam", emulated=("never",)).emulations()} == {
        "adam"
    }


def test_the_cells_in_half_precision_stand_beside_the_same_ones_in_single():
    cells = SuiteConfig().schedules.simulations()
    half = [cell for cell in cells if cell.precision == "bfloat16"]
    assert {(cell.model, cell.schedule_devices, cell.chunks) for cell in half} == set(
        product(("gpt2-xl", "vit"), (8, 32), (16,))
    )
    known = {cell.id for cell in cells}
    assert all(cell.changed(precision="float32", optimizer="sgd").id in known for cell in half)


def test_emulated_cells_have_their_twins_among_the_simulated_ones():
    sweep = ScheduleSweep(**SMALL, emulated=("never",))
    emulated = sweep.emulations()
    assert {cell.chunks for cell in emulated} == {2}
    assert {cell.twin.id for cell in emulated} <= {cell.id for cell in sweep.simulations()}


@pytest.mark.parametrize(
    ("machine", "processes", "transfers"),
    [
        (Machine("cpu", 1), {1, 2}, {"direct"}),
        (Machine("cuda", 2), {1, 2}, {"direct"}),
        (Machine("cuda", 1), {1}, {"host"}),
    ],
)
def test_schedules_are_measured_in_one_process_and_in_one_per_device(machine, processes, transfers):
    cells = [run.cell for run in MeasuredSchedules().runs(machine)]
    assert {cell.processes for cell in cells} == processes
    assert {cell.transfer for cell in cells} == transfers
    assert {cell.schedule_devices for cell in cells} == {2}
    assert [cell.unsupported() for cell in cells if cell.unsupported()] == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"chunks": [16, 256]}, "must be at most batch_size = 128, got 256"),
        ({"model": "gpt2", "devices": 16}, "must be at most the 26 layers of gpt2, got 32"),
        (
            {"precision": "bfloat16", "emulated": ["never"]},
            "must be empty with precision bfloat16, got never; the engine is emulated in float32",
        ),
        ({"devices": 32, "emulated": ["never"]}, "must be at most 16 where cells are emulated, got 32"),
    ],
)
def test_what_does_not_fit_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({"schedules": {"simulated": {"mine": settings}}})


def test_the_table_has_the_cells_of_all_sweeps_once():
    cells = SuiteConfig().experiments()["schedules"].simulations()
    assert len({cell.id for cell in cells}) == len(cells)
    assert {cell.hardware for cell in cells} == {"p40", "h100"}
    assert {2, 4, 8, 16, 32, 64} == {cell.schedule_devices for cell in cells}
