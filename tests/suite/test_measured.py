"""The steps that were measured on GPUs, and how far the simulator is from them."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import mean

import pytest

from gpipe_bench.cli import main
from gpipe_bench.components import PUBLISHED
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.results import schema
from gpipe_bench.suite.published import measured
from gpipe_bench.suite.published.measured import TABLES, MeasuredStep, measured_steps
from gpipe_bench.suite.simulated_cells import SimulatedCell
from tests.project.tree import ROOT

PIPELINES = TABLES["h200-pipelines"]
COLUMNS = schema.TABLES["rows"].headers[-1]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def steps(traces):
    return list(measured_steps(TABLES["h200-steps"], traces))


@pytest.fixture(scope="module")
def pipelines(traces):
    return list(measured_steps(PIPELINES, traces))


@pytest.fixture(scope="module")
def as_in_profile(traces):
    """The same pipelines with the host of the profile."""
    return list(measured_steps(replace(PIPELINES, launch_us=None), traces))


def errors(steps, **wanted):
    own = (step for step in steps if all(getattr(step, name) == value for name, value in wanted.items()))
    return [abs(step.error_fraction) for step in own]


@pytest.mark.parametrize(("bound", "count", "average", "most"), [("device", 17, 0.04, 0.15), ("host", 8, 0.15, 0.30)])
def test_steps_of_one_device_are_predicted(steps, bound, count, average, most):
    found = errors(steps, bound_by=bound)
    assert len(found) == count
    assert mean(found) < average
    assert max(found) < most


def test_peaks_of_memory_are_predicted(steps):
    known = [step for step in steps if step.measured_gib]
    assert len(known) == 3
    assert [step.simulated_gib for step in known] == pytest.approx([step.measured_gib for step in known], rel=0.02)


def test_a_loop_tells_the_time_of_the_host(pipelines, as_in_profile):
    rows = read_rows(REFERENCE_FOLDER / "measured" / PIPELINES.rows, COLUMNS)
    loops = [row.step_time_ms for row in rows if row.source.endswith(PIPELINES.host_of)]
    simulated = mean(step.simulated_ms for step in as_in_profile if step.run_as == PIPELINES.host_of)
    assert len(loops) == 4
    assert round(load_profile("h200").host_us * mean(loops) / simulated, 1) == PIPELINES.launch_us
    assert max(errors(pipelines, run_as=PIPELINES.host_of)) < 0.03


def test_the_page_says_how_far_pipelines_are_off_with_both_hosts(pipelines, as_in_profile):
    text = (ROOT / "docs" / "simulator_errors.md").read_text(encoding="utf-8")
    page = " ".join(text.split())
    kinds = {step.run_as for step in pipelines} - {PIPELINES.host_of}
    assert len(kinds) == 5
    for kind in kinds:
        assert re.search(rf"\| {kind} \|[^\n]* {mean(errors(pipelines, run_as=kind)):.1%} \|$", text, re.MULTILINE), (
            kind
        )
    before = mean(step.error_fraction for step in as_in_profile if step.run_as in kinds)
    assert f"simulated too short, by {-100 * before:.0f} % on average" in page
    assert {step.bound_by for step in pipelines} == {"host"}


def test_each_published_variant_is_predicted_roughly_and_in_the_measured_order(traces):
    found = {step.cell.variant: step for step in measured_steps(TABLES["h100-steps"], traces)}
    assert set(found) == set(PUBLISHED)
    assert all(-0.01 < step.error_fraction < 0.13 for step in found.values())
    for kind in ("measured_ms", "simulated_ms"):
        times = [getattr(found[variant], kind) for variant in PUBLISHED]
        assert times == sorted(times, reverse=True)


def test_rows_say_who_measured_them_and_what_is_not_known():
    rows = read_rows(REFERENCE_FOLDER / "measured" / "1x-nvidia-h200" / "single.csv", COLUMNS)
    assert {(row.evidence, row.status, row.commit, row.dirty) for row in rows} == {("measured", "ok", "", None)}
    assert all("not by this suite" in row.source for row in rows)


def test_simulated_rows_stand_beside_them():
    measured_rows, simulated = (
        read_rows(REFERENCE_FOLDER / place / "single.csv", COLUMNS)
        for place in ("measured/1x-nvidia-h200", "simulated/h200")
    )
    assert [(row.model, row.batch_size) for row in simulated] == [(row.model, row.batch_size) for row in measured_rows]


def made(simulated_ms, **changes):
    facts = {"run_as": "", "measured_ms": 10.0, "host_ms": None, "measured_gib": None, "simulated_gib": 1.0}
    return MeasuredStep(cell=SimulatedCell(), simulated_ms=simulated_ms, **{**facts, **changes})


@pytest.mark.parametrize(("host_ms", "bound"), [(9.0, "device"), (9.1, "host"), (None, "")])
def test_bounds_are_told_by_the_host_that_was_measured(host_ms, bound):
    assert made(11.0, host_ms=host_ms).bound_by == bound


def test_the_command_prints_each_step_and_mean_errors(monkeypatch, capsys):
    found = [made(9.0), made(12.0, measured_gib=2.0), made(15.0, host_ms=1.0), made(11.0, run_as=PIPELINES.host_of)]
    monkeypatch.setattr(measured, "measured_steps", lambda *_: iter(found))
    with pytest.raises(SystemExit) as ended:
        main(["predictions", "--table", "h200-pipelines"])
    assert not ended.value.code
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "all: mean absolute error 15.0 % of 2 steps, largest 20.0 %",
        "bound by the device: mean absolute error 50.0 % of 1 steps, largest 50.0 %",
        f"{PIPELINES.host_of}, which tells launch_us = 41.4: mean absolute error 10.0 % of 1 steps, largest 10.0 %",
        "peaks of allocated memory: mean absolute error 50.0 % of 1 steps, largest 50.0 %",
    ]


def test_where_the_model_is_missing_the_table_is_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    measured.print_measured(PIPELINES)
    assert "left out: their model is examples/transformer_blocks.py of a checkout" in capsys.readouterr().out
