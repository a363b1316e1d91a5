"""What the Slurm profile asks for, found by a dry run: no Slurm is needed for that."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.project.tree import ROOT
from tests.workflow.checkouts import checkout, snakemake_in

SWEEP = {
    "run": "measured",
    "model": "unet",
    "model_args": "depth=1;B=1;C=2;size=4",
    "chunks": 2,
    "checkpoint": "always",
    "batch_size": 4,
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """The dry run of a sweep over one, two and four of the GPUs that a job may have, and of processes on two hosts."""
    place = checkout(tmp_path_factory.mktemp("profile"))
    sweep = {**SWEEP, "balance": [17, "8-9", "4-4-4-5"]}
    spread = {**SWEEP, "balance": "8-9", "schedule": "1f1b", "processes": 2, "hosts": 2}
    experiments = {
        "sweep_measured": {"gpu": None, "mine": sweep},
        "sweep_processes": {"measured": None, "mine": spread},
    }
    config = {"device": "cuda", "device_count": 4, "experiments": experiments}
    (place / "slurm.yaml").write_text(yaml.safe_dump(config))
    options = ("--workflow-profile", "profiles/slurm", "--configfile", "slurm.yaml", "--dry-run")
    done = snakemake_in(place)(*options, "--", *(f"results/{name}.csv" for name in experiments))
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_cell_asks_for_the_gpus_that_it_needs(plan):
    cells = re.findall(r"wildcards: cell=\S*-n(\d)-\S*\n.*?gpu=(\d)", plan, re.DOTALL)
    assert sorted(cells) == [("1", "1"), ("2", "2"), ("2", "2"), ("4", "4")]


def test_a_cell_asks_for_the_nodes_that_its_processes_are_on(plan):
    assert re.findall(r"wildcards: cell=\S*-p(\d)-\S*\n.*?nodes=(\d)", plan, re.DOTALL) == [("2", "2")]


def test_every_measured_cell_has_its_node_for_itself(plan):
    jobs = [block for block in plan.split("rule ") if block.startswith("run_cell")]
    assert len(jobs) == 4
    assert all("slurm_extra=--exclusive" in job for job in jobs)


def test_timed_jobs_do_not_wait_for_each_other():
    """On one machine they do; on a cluster each has a node of its own."""
    profile = yaml.safe_load((ROOT / "profiles" / "slurm" / "profile.yaml").read_text())
    assert profile["resources"]["timing_slot"] >= profile["jobs"]
    assert profile["executor"] == "slurm"
