"""What the workflow asks the package: jobs, tables and what they are made from, options."""

from __future__ import annotations

import json
import re
from datetime import date

import pytest

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.errors import ConfigError
from gpipe_bench.suite.advice.advice import AdviceRequest
from gpipe_bench.suite.cell_files import read_cells
from gpipe_bench.suite.cells import CELL_PATTERN, MeasuredCell
from gpipe_bench.suite.emulated_cells import EmulatedCell
from gpipe_bench.suite.experiments.config import parse_config
from gpipe_bench.suite.experiments.plan import GROUP_PATTERN, advice_settings, make_plan
from gpipe_bench.suite.experiments.plan import plan as plan_of
from gpipe_bench.suite.machine import Machine
from gpipe_bench.suite.simulated_cells import SimulatedCell
from tests.suite.cells_of import over_default

NET = {"run": "simulated", "model": "unet", "model_args": "depth=1;B=1;C=2;size=4", "partitions": 2, "batch_size": 4}


def changed(**changes):
    """The plan of the default configuration with changes, on a CPU."""
    return make_plan(over_default({"device": "cpu", **changes}), [])


def jobs_of(**experiments):
    """The jobs of these experiments alone."""
    return plan_of(parse_config({"experiments": experiments, "advice": {}}), Machine("cpu", 1)).jobs


@pytest.fixture(scope="module")
def plan():
    return make_plan({"device": "cpu"}, [])


def test_simulations_go_before_runs(plan):
    raw = plan.tables["ablation"].raw
    kinds = [path.split("/")[1] for path in raw]
    assert list(dict.fromkeys(kinds)) == ["simulated", "emulated", "raw"]
    assert {cell.variant for cell in plan.tables["ablation"].simulated} == {c.label for c in Components.factorial()}


def test_every_experiment_is_made_from_something(plan):
    assert all(table.raw for table in plan.tables.values())
    assert [path for path in plan.tables["speed"].raw if "/published-" in path] == [
        "results/simulated/published-unet-speed.json",
        "results/simulated/published-amoebanet-d-speed.json",
    ]


def test_the_profile_of_a_job_is_a_file(plan):
    assert all(
        job.profile.endswith(("p40.yaml", "h100.yaml", "a100.yaml"))
        for job in plan.named("simulated", "emulated").values()
    )


def test_an_experiment_takes_its_own_cells_from_shared_files(plan):
    assert len(plan.tables["ablation"].digests.split(",")) == 3 * 32
    assert plan.tables["sweep_measured"].digests == "none"
    everything = {cell.id.rpartition("-")[2] for job in plan.jobs for cell in job.cells}
    assert all(set(table.digests.split(",")) <= everything | {"none"} for table in plan.tables.values())


def test_only_experiments_with_timelines_keep_them(plan):
    kept = {name for job in plan.jobs for name in job.timelines}
    names = ("ablation", "schedules_timelines")
    cells = [cell for name in names for cell in (*plan.tables[name].simulated, *plan.tables[name].emulated)]
    assert kept == {cell.id for cell in cells}


def test_the_published_variants_of_both_kinds(plan):
    assert plan.published("ablation") == []
    asked = changed(experiments={"ablation": {"cpu": {"variant": "published"}}})
    assert tuple(asked.published("ablation")) == PUBLISHED
    assert tuple(plan.published("ablation", "simulated")) == PUBLISHED
    assert tuple(plan.published("ablation", "emulated")) == PUBLISHED
    assert plan.published("sweep_measured") == plan.published("none") == []


def test_one_job_measures_all_cells_that_take_turns(plan):
    runs = plan.tables["ablation"].runs
    (job,) = (job for job in plan.named("measured").values() if job.name.startswith("turns-"))
    assert job.only.split(",") == list(dict.fromkeys(run.cell.id for run in runs))
    assert (job.repeats, job.accelerators, job.hosts) == (3, 0, 1)
    assert all([cell.id for cell in one.cells] == [one.name] for one in plan.named("measured").values() if one != job)
    assert [path for path in plan.tables["ablation"].raw if "/raw/" in path] == [str(runs[0].path)]


def test_a_job_runs_its_cells_as_often_as_the_experiment_that_asks_for_most():
    block = {**NET, "run": "measured", "chunks": 2}
    (job,) = jobs_of(a={"a": {**block, "repeats": 2}}, b={"a": {**block, "repeats": 7}})
    assert job.repeats == 7


def test_a_cell_that_two_experiments_ask_for_is_simulated_once():
    (job,) = jobs_of(a={"a": {**NET, "chunks": [2, 4]}}, b={"a": {**NET, "chunks": [4, 1], "timelines": True}})
    assert [cell.chunks for cell in job.cells] == [2, 4, 1]
    assert job.kept == ",".join(cell.id for cell in job.cells[1:])


def test_jobs_share_a_model_and_a_profile():
    same = {**NET, "chunks": 2}
    jobs = jobs_of(
        a={"a": same, "b": {**same, "profile": "v100"}, "c": {**same, "model_args": "depth=1;B=1;C=4;size=4"}}
    )
    assert [len(job.cells) for job in jobs] == [1, 1, 1]
    assert len({job.name for job in jobs}) == 3


def test_pipelines_of_many_partitions_have_a_job_of_their_own():
    many = {"model_args": "depth=3;B=1;C=2;size=16", "partitions": [1, 32, 33]}
    assert [[cell.partitions for cell in job.cells] for job in jobs_of(a={"a": {**NET, **many}})] == [[1, 32], [33]]


def test_a_long_job_is_cut():
    jobs = jobs_of(a={"a": {**NET, "batch_size": 400, "chunks": [*range(1, 251)]}})
    assert [len(job.cells) for job in jobs] == [150, 100]
    assert len({job.path for job in jobs}) == 2


def test_an_emulation_has_a_file_of_its_own():
    (job,) = jobs_of(a={"a": {**NET, "run": "emulated"}})
    assert job.path == f"results/emulated/{job.name}.json"


def test_names_of_jobs_are_those_that_rules_accept(plan):
    virtual = plan.named("simulated", "emulated").values()
    assert all(re.fullmatch(GROUP_PATTERN, job.name) for job in virtual)
    assert all(re.fullmatch(CELL_PATTERN, cell.id) for job in plan.jobs for cell in job.cells)
    assert all(re.fullmatch(CELL_PATTERN, name) for name in plan.named("measured"))
    # A shell takes 128 KiB in a word.
    assert max(len(job.only) for job in virtual) < 30_000


def test_requests_for_advice_are_data_by_name(plan):
    assert set(plan.advice) == {"unet"}
    asked = advice_settings(changed(advice={"mine": {"model": "vit", "devices": 2}}))
    assert AdviceRequest(**json.loads(asked["mine"])) == AdviceRequest(model="vit", devices=2)


def test_every_cell_stands_in_the_file_of_cells(plan, tmp_path):
    path = plan.write_cells(tmp_path)
    assert plan.write_cells(tmp_path) == path
    kinds = (MeasuredCell, SimulatedCell, EmulatedCell)
    cells = [cell for kind in kinds for cell in read_cells(path, kind)]
    assert sorted(cell.id for cell in cells) == sorted(cell.id for job in plan.jobs for cell in job.cells)


def test_a_request_for_advice_has_a_name_for_files():
    with pytest.raises(ConfigError, match=r"advice must have names of lower-case letters, digits .*, got 'My box'"):
        changed(advice={"My box": {}})


def test_problems_of_files_and_of_the_command_line_are_said_together(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("experiments: {ablation: {cpu: {steps: 0}}}")
    with pytest.raises(ConfigError) as caught:
        changed(device="tpu", experiments={"ablation": {"cpu": {"steps": 0}}})
    with pytest.raises(ConfigError) as both:
        make_plan(over_default({"device": "tpu", "experiments": {"ablation": {"cpu": {"steps": 0}}}}), [str(path)])
    rule = "experiments.ablation.cpu.steps must be a whole number of at least 1, got 0; use 1 or more"
    assert both.value.problems == (
        "--config: device must be one of auto, cpu, cuda, got 'tpu'; use 'cpu'",
        f"{path}: {rule}",
    )
    assert caught.value.problems[1] == f"--config: {rule}"


def test_a_file_that_is_no_plain_yaml_is_one_problem(tmp_path):
    (tmp_path / "a.yaml").write_text("2020-01-01: 1")
    with pytest.raises(ConfigError) as caught:
        make_plan({date(2020, 1, 1): 1}, [str(tmp_path / "a.yaml")])
    (problem,) = caught.value.problems
    assert "key 2020-01-01 must be text" in problem


def test_planning_is_quick_enough_to_be_done_at_every_start(plan):
    """A profile is read once, not once per cell."""
    from gpipe_bench.machine import profile

    before = profile._parsed.cache_info().misses
    make_plan({"device": "cpu"}, [])
    assert profile._parsed.cache_info().misses == before


def test_advice_is_verified_as_far_as_there_is_a_reference(plan):
    assert "advice_unet" in plan.verified
    asked = changed(advice={"mine": {"model": "vit", "devices": 2}, "unet": None})
    assert not [name for name in asked.verified if name.startswith("advice")]


def test_only_what_was_changed_may_lack_cells_of_the_reference(plan):
    assert plan.verified
    assert plan.allowed_parts == []
    less = {"sweep_unet": {"simulated": {"chunks": [1, 2]}}, "speed": {"printed": {"table": "unet-speed"}}}
    found = changed(experiments=less).allowed_parts
    assert (found[::2], sorted(found[1::2])) == (["--part"] * 2, ["speed", "sweep_unet"])
    assert changed(advice={"unet": {"devices": 4}}).allowed_parts == ["--part", "advice_unet"]
    more = {"sweep_unet": {"simulated": {"chunks": [1, 2, 3, 4, 8, 16, 32, 64, 128]}}}
    assert changed(experiments=more).allowed_parts == []
