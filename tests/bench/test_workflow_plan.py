"""What the workflow asks the package: jobs, raw results of each experiment, options."""

from __future__ import annotations

import json
from datetime import date

import pytest

from gpipe_bench.bench.advice.advice import AdviceRequest
from gpipe_bench.bench.experiments.workflow import make_plan
from gpipe_bench.bench.spec.cell_files import read_cells
from gpipe_bench.bench.spec.cells import MeasuredCell
from gpipe_bench.bench.spec.emulated_cells import EmulatedCell
from gpipe_bench.bench.spec.simulated_cells import SimulatedCell
from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.errors import ConfigError


@pytest.fixture(scope="module")
def plan():
    return make_plan({"device": "cpu"}, [])


def test_simulations_go_before_runs(plan):
    raw = plan.raw["ablation"]
    kinds = [path.split("/")[1] for path in raw]
    assert list(dict.fromkeys(kinds)) == ["simulated", "emulated", "raw"]
    assert {cell.variant for cell in plan.simulated["ablation"]} == {c.label for c in Components.factorial()}


def test_every_experiment_is_made_from_something(plan):
    assert all(plan.raw.values())
    assert [path for path in plan.raw["speed"] if "/published-" in path] == [
        "results/simulated/published-unet-speed.json",
        "results/simulated/published-amoebanet-d-speed.json",
    ]


def test_every_emulated_cell_has_a_simulated_twin_in_its_table(plan):
    for name, cells in plan.emulated.items():
        known = {cell.id for cell in plan.simulated[name]}
        assert [cell.id for cell in cells if cell.twin.id not in known] == [], name


def test_the_profile_of_a_job_is_a_file(plan):
    assert all(job.profile.endswith(("p40.yaml", "h100.yaml")) for job in plan.jobs.values())


def test_an_experiment_takes_its_own_cells_from_shared_files(plan):
    assert len(plan.cells["ablation"].split(",")) == 3 * 32
    assert plan.cells["sweep_measured"] == "none"
    everything = {cell.id.rpartition("-")[2] for group in (*plan.groups, *plan.emulating) for cell in group.cells}
    assert all(set(text.split(",")) <= everything | {"none"} for text in plan.cells.values())


def test_only_experiments_with_timelines_keep_them(plan):
    kept = {name for group in plan.groups for name in group.timelines}
    assert kept == {cell.id for name in ("ablation", "schedules_timelines") for cell in plan.simulated[name]}
    kept = {name for group in plan.emulating for name in group.timelines}
    assert kept == {cell.id for cell in plan.emulated["ablation"]}


def test_the_published_variants_of_both_kinds(plan):
    assert plan.published("ablation") == []
    asked = make_plan({"device": "cpu", "ablation": {"cpu": {"variants": "published"}}}, [])
    assert tuple(asked.published("ablation")) == PUBLISHED
    assert tuple(plan.published("ablation", "simulated")) == PUBLISHED
    assert tuple(plan.published("ablation", "emulated")) == PUBLISHED
    assert plan.published("sweep_measured") == []


def test_a_cpu_needs_no_accelerators(plan):
    assert {cell.accelerators for cell in plan.measured.values()} == {0}


def test_one_job_measures_all_cells_that_take_turns(plan):
    own = {run.cell.id for run in plan.runs["ablation"]}
    (job,) = (job for name, job in plan.timed.items() if name.startswith("turns-"))
    assert job.only.split(",") == list(dict.fromkeys(run.cell.id for run in plan.runs["ablation"]))
    assert (job.repeats, job.accelerators, job.hosts) == (3, 0, 1)
    others = {name: job for name, job in plan.timed.items() if not name.startswith("turns-")}
    assert {name: [cell.id for cell in job.cells] for name, job in others.items()} == {
        name: [name] for name in plan.measured if name not in own
    }
    assert [path for path in plan.raw["ablation"] if "/raw/" in path] == [str(plan.runs["ablation"][0].path)]


def test_a_job_runs_its_cells_as_often_as_the_experiment_that_asks_for_most():
    asked = {"device": "cpu", "ablation": {"cpu": {"repeats": 4, "variants": "published"}}}
    plan = make_plan({**asked, "sweep": {"measured": {"cpu": {"repeats": 7}}}}, [])
    repeats = {name.partition("-")[0]: plan.timed[name].repeats for name in plan.timed if plan.timed[name].repeats > 3}
    assert repeats == {"turns": 4, "measured": 7}


def test_requests_for_advice_are_data_by_name(plan):
    assert set(plan.advice) == {"unet"}
    asked = make_plan({"device": "cpu", "advice": {"mine": {"model": "vit", "devices": 2}}}, []).advice
    assert AdviceRequest(**json.loads(asked["mine"])) == AdviceRequest(model="vit", devices=2)


def test_every_cell_stands_in_the_file_of_cells(plan, tmp_path):
    plan.write_cells(tmp_path / "cells.json")
    kinds = (MeasuredCell, SimulatedCell, EmulatedCell)
    cells = [cell for kind in kinds for cell in read_cells(tmp_path / "cells.json", kind)]
    asked = [*plan.measured, *(cell.id for job in plan.jobs.values() for cell in job.cells)]
    assert sorted(cell.id for cell in cells) == sorted(asked)


def test_a_request_for_advice_has_a_name_for_files():
    with pytest.raises(ConfigError, match=r"advice must have names of lower-case letters, digits .*, got 'My box'"):
        make_plan({"device": "cpu", "advice": {"My box": {}}}, [])


def test_problems_of_files_and_of_the_command_line_are_said_together(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("ablation: {cpu: {chunks: 0}}")
    with pytest.raises(ConfigError) as caught:
        make_plan({"device": "tpu", "ablation": {"cpu": {"chunks": 0}}}, [str(path)])
    assert caught.value.problems == (
        f"{path}: ablation.cpu.chunks must be at least 1, got 0; raise it",
        "--config: device must be one of auto, cpu, cuda, got 'tpu'; use 'cpu'",
    )


def test_a_file_that_is_no_plain_yaml_is_one_problem(tmp_path):
    (tmp_path / "a.yaml").write_text("2020-01-01: 1")
    with pytest.raises(ConfigError) as caught:
        make_plan({date(2020, 1, 1): 1}, [str(tmp_path / "a.yaml")])
    (problem,) = caught.value.problems
    assert "key 2020-01-01 must be text" in problem


def test_planning_is_quick_enough_to_be_done_at_every_start(plan):
    """A profile is read once, not once per cell."""
    from gpipe_bench.bench.spec import simulated_cells

    before = simulated_cells._read.cache_info().misses
    make_plan({"device": "cpu"}, [])
    assert simulated_cells._read.cache_info().misses == before


def test_advice_is_verified_as_far_as_there_is_a_reference(plan):
    assert "advice_unet" in plan.verified
    asked = make_plan({"device": "cpu", "advice": {"mine": {"model": "vit", "devices": 2}}}, [])
    assert not [name for name in asked.verified if name.startswith("advice")]


def test_only_what_was_changed_may_lack_cells_of_the_reference(plan):
    assert plan.verified
    assert plan.allowed_parts == []
    changes = {"sweep": {"simulated": {"unet": {"chunks": [1, 2]}}}, "speed": {"simulated_tables": ["unet-speed"]}}
    less = make_plan({"device": "cpu", **changes}, [])
    assert sorted(less.allowed_parts[1::2]) == ["speed", "sweep_unet"]
    assert set(less.allowed_parts[::2]) == {"--part"}
    advised = make_plan({"device": "cpu", "advice": {"unet": {"model": "unet", "devices": 4}}}, [])
    assert advised.allowed_parts == ["--part", "advice_unet"]
    more = {"sweep": {"simulated": {"unet": {"chunks": [1, 2, 3, 4, 8, 16, 32, 64, 128]}}}}
    assert make_plan({"device": "cpu", **more}, []).allowed_parts == []
