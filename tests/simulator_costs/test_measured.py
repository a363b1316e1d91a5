"""The steps that were measured on an H200, and how far the simulator is from them."""

from __future__ import annotations

from statistics import mean

import pytest

from gpipe_bench.cli import main
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.results.rows import Row
from gpipe_bench.simulator.measured import TABLE, MeasuredStep, measured_steps


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    return list(measured_steps(tmp_path_factory.mktemp("traces")))


def errors(steps, bound):
    return [abs(step.error_fraction) for step in steps if step.bound_by == bound]


def test_steps_that_are_bound_by_the_device_are_predicted(steps):
    found = errors(steps, "device")
    assert len(found) == 17
    assert mean(found) < 0.055
    assert max(found) < 0.15


def test_steps_that_are_bound_by_the_host_are_predicted_roughly(steps):
    found = errors(steps, "host")
    assert len(found) == 8
    assert mean(found) < 0.15
    assert max(found) < 0.30


def test_peaks_of_memory_are_predicted(steps):
    known = [step for step in steps if step.measured_gib]
    assert len(known) == 3
    assert [step.simulated_gib for step in known] == pytest.approx([step.measured_gib for step in known], rel=0.02)


def test_rows_say_who_measured_them_and_what_is_not_known():
    rows = read_rows(REFERENCE_FOLDER / "measured" / "1x-nvidia-h200" / "single.csv", Row.columns())
    assert {(row.evidence, row.status, row.commit, row.dirty) for row in rows} == {("measured", "ok", "", None)}
    assert all("not by this suite" in row.source for row in rows)


def test_simulated_rows_stand_beside_them():
    measured, simulated = (
        read_rows(REFERENCE_FOLDER / place / "single.csv", Row.columns())
        for place in ("measured/1x-nvidia-h200", "simulated/h200")
    )
    assert [(row.model, row.batch_size) for row in simulated] == [(row.model, row.batch_size) for row in measured]


def test_bounds_are_told_by_the_host_that_was_measured():
    step = MeasuredStep("unet", "float32", 1, 10.0, 11.0, 9.0, None, 0.0)
    assert (step.bound_by, step.error_fraction) == ("device", pytest.approx(0.1))


def test_the_command_prints_them(steps, monkeypatch, capsys):
    monkeypatch.setattr("gpipe_bench.simulator.measured.measured_steps", lambda _: iter(steps))
    with pytest.raises(SystemExit) as caught:
        main(["predictions", "--table", TABLE])
    assert not caught.value.code
    printed = capsys.readouterr().out
    assert "bound by the device: mean absolute error" in printed
    assert "peaks of allocated memory: mean absolute error" in printed
    assert printed.count("unet") == 9
