"""A model of one's own in the configuration: measured, swept and advised on, and after an edit all that again."""

from __future__ import annotations

import csv
import os
import re
import sys

import pytest
import yaml

from gpipe_bench.errors import ConfigError
from gpipe_bench.suite.experiments.plan import GROUP_PATTERN, advice_models, advice_settings, make_plan
from tests.suite.cells_of import over_default
from tests.workflow.checkouts import checkout, snakemake_in

pytestmark = pytest.mark.timeout(600)  # the run takes half a minute on an idle machine
NET = """
import torch
from parts import block
from torch import nn

def net(width=4, depth=3):
    return nn.Sequential(*(block(width) for _ in range(depth)))

def net_batch(batch_size, width=4):
    return torch.rand(batch_size, width)
"""
PARTS = "from torch import nn\ndef block(width): return nn.Linear(width, width)\n"
NAME = "nets/net.py:net"
OWN = {"model": NAME, "model_args": "width=8"}
SHORT = {"warmup": 0, "steps": 1, "repeats": 1}
MEASURED = {"run": "measured", **OWN, **SHORT, "balance": "2-1", "batch_size": 2, "chunks": 2}
CONFIG = {
    "device": "cpu",
    "experiments": {
        "ablation": {"cpu": None, "mine": {**MEASURED, "turns": True, "schedule": [None, "1f1b"]}},
        "sweep_mine": {"grid": {"run": "simulated", **OWN, "partitions": [1, 2], "chunks": [1, 2], "batch_size": 4}},
        "sweep_measured": {"cpu": None, "cpu_pipelines": None, "mine": {**MEASURED, "checkpoint": "always"}},
        "sweep_processes": {"measured": None, "mine": {**MEASURED, "schedule": "1f1b", "processes": 2}},
    },
    "advice": {"mine": {**OWN, "devices": 2, "batch_size": 4}},
}
PLANNED = over_default(CONFIG)
TABLES = [f"results/{name}.csv" for name in ("sweep_mine", "sweep_measured", "advice_mine")]
ARGUMENTS = (*TABLES, "--configfile", "own.yaml")


def add_model(place):
    (place / "nets").mkdir()
    (place / "nets" / "net.py").write_text(NET)
    (place / "nets" / "parts.py").write_text(PARTS)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder with a model, which Python forgets afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    add_model(tmp_path)
    yield tmp_path
    sys.modules.pop("parts", None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run."""
    place = checkout(tmp_path_factory.mktemp("own"))
    add_model(place)
    (place / "own.yaml").write_text(yaml.safe_dump(CONFIG))
    done = snakemake_in(place)(*ARGUMENTS, XDG_CACHE_HOME=str(place / "cache"))
    assert done.returncode == 0, done.stdout
    return place


@pytest.mark.parametrize("edited", ["net.py", "parts.py"])
def test_a_plan_has_other_jobs_after_an_edit(folder, edited):
    before = make_plan(PLANNED, [])
    models = advice_models(before)
    assert make_plan(PLANNED, []) == before
    with (folder / "nets" / edited).open("a") as file:
        file.write("\n# edited\n")
    after = make_plan(PLANNED, [])
    # All cells of the ablation and of the measured sweep are of this model; those of schedules are not.
    assert {
        cell.model for job in after.jobs if job in before.jobs for cell in job.cells if cell.evidence == "measured"
    } == {"gpt2"}
    virtual = [{*plan.named("simulated", "emulated")} for plan in (before, after)]
    changed = virtual[0] - virtual[1]
    assert changed
    assert all(name.startswith("nets-net-py-net-") for name in changed)
    assert advice_settings(after) == advice_settings(before)
    assert models["mine"] != advice_models(after)["mine"]


@pytest.mark.usefixtures("folder")
def test_names_of_jobs_are_names_of_files():
    plan = make_plan(PLANNED, [])
    assert all(re.fullmatch(GROUP_PATTERN, name) for name in plan.named("simulated", "emulated"))
    assert not any("/" in name or ":" in name for name in plan.named("measured"))


@pytest.mark.usefixtures("folder")
def test_mistakes_of_a_configuration_name_their_keys():
    wrong = {
        "experiments": {"mine": {"grid": {"run": "simulated", "model": "nets/nett.py:net"}}},
        "advice": {"mine": {"model": NAME, "model_args": "wdth=3"}},
    }
    with pytest.raises(ConfigError) as caught:
        make_plan(wrong, [])
    assert tuple(problem.partition(", which counts")[0] for problem in caught.value.problems) == (
        f"--config: advice.mine.model_args: argument of {NAME} must be one it declares, got 'wdth'; use 'width'",
        "--config: experiments.mine.grid.model must be in a file that exists, got 'nets/nett.py:net'; correct the path",
    )


@pytest.mark.usefixtures("folder")
def test_arguments_that_are_left_out_are_those_of_the_model():
    shared = {"model": NAME, "balance": "2-1"}
    blocks = {run: {**shared, "run": run} for run in ("measured", "simulated", "emulated")}
    plan = make_plan({"device": "cpu", "experiments": {"mine": blocks}, "advice": {}}, [])
    cells = [cell for job in plan.jobs for cell in job.cells]
    assert {cell.settings()["model_args"] for cell in cells} == {"width=4;depth=3"}


def test_every_table_has_its_rows(run):
    for table in TABLES:
        with (run / table).open() as file:
            rows = list(csv.DictReader(file))
        assert {(row["model"], row["model_args"], row["status"]) for row in rows} == {(NAME, "width=8;depth=3", "ok")}
        assert {row["evidence"] for row in rows} == {"measured" if "measured" in table else "simulated"}
    assert all(os.sep not in path.name and ":" not in path.name for path in run.glob("results/**/*"))


def test_configurations_say_which_files_were_run(run):
    text = (run / "results/sweep_measured_configurations.csv").read_text()
    assert '""model_files"": ""' in text


@pytest.mark.slow  # test_run.py edits the package, and a plan has other jobs after an edit of a model
def test_a_second_run_does_nothing_and_an_edit_runs_all_again(run):
    dry = snakemake_in(run)
    assert "Nothing to be done" in dry(*ARGUMENTS, "--dry-run").stdout
    with (run / "nets" / "parts.py").open("a") as file:
        file.write("\n# edited\n")
    after = dry(*ARGUMENTS, "--dry-run").stdout
    for rule in ("run_cell", "simulate", "advise", "collect"):
        assert rule in after
