"""The workflow on a real Slurm cluster: ``make test-slurm`` starts one on loopback for it.

Three checkouts, one Slurm job per cell: a small sweep on the CPU, a cell of two processes on two nodes, and a cell for
two GPUs that Slurm grants but no driver knows.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess

import pytest
import yaml

from tests.workflow.checkouts import checkout, snakemake_in

TINY = {"model": "unet", "model_args": "depth=1;B=1;C=2;size=4", "chunks": [1, 2], "batch_size": 4}
RUN_ONCE = {"run": "measured", "warmup": 0, "steps": 1, "repeats": 1, "balance": "8-9"}
SIMULATED = {"grid": {**TINY, "run": "simulated", "partitions": [1, 2], "profile": "p40"}}
ON_CPU = {"cpu": None, "cpu_pipelines": None, "tiny": {**TINY, **RUN_ONCE}}
ON_GPUS = {"gpu": None, "tiny": {**TINY, **RUN_ONCE, "where": "gpu", "chunks": 2, "checkpoint": "always"}}
ON_TWO_NODES = {
    "measured": None,
    "tiny": {**TINY, **RUN_ONCE, "chunks": 2, "checkpoint": "always", "schedule": "1f1b", "processes": 2, "hosts": 2},
}
OPTIONS = (
    *("--workflow-profile", "profiles/slurm", "--slurm-status-command", "squeue"),
    *("--slurm-init-seconds-before-status-checks", "2", "--seconds-between-status-checks", "2"),
)


def answers():
    """Whether there is a Slurm that answers."""
    if shutil.which("sinfo") is None:
        return False
    try:
        return subprocess.run(["sinfo"], capture_output=True, timeout=20, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


pytestmark = [
    pytest.mark.skipif(not answers(), reason="no Slurm answers here; make test-slurm starts one"),
    pytest.mark.timeout(900),
]


def run(place, config, *targets):
    """Rows of the targets, and the ids of the Slurm jobs that made them."""
    checkout(place)
    (place / "slurm.yaml").write_text(yaml.safe_dump(config))
    done = snakemake_in(place)(*OPTIONS, "--configfile", "slurm.yaml", "--", *targets)
    logs = [f"{path}:\n{path.read_text()}" for path in place.rglob("*.log") if "slurm_logs" in str(path)]
    assert done.returncode == 0, "\n".join([done.stdout, *logs])
    rows = []
    for target in targets:
        with (place / target).open(newline="") as file:
            rows += list(csv.DictReader(file))
    return rows, re.findall(r"SLURM jobid (\d+)", done.stdout)


def job(number):
    """What Slurm says of a job."""
    shown = subprocess.run(["scontrol", "show", "job", number], capture_output=True, text=True, check=True)
    return dict(word.partition("=")[::2] for word in shown.stdout.split() if "=" in word)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    config = {"device": "cpu", "experiments": {"sweep_tiny": SIMULATED, "sweep_measured": ON_CPU}}
    return run(tmp_path_factory.mktemp("cpu"), config, "results/sweep_tiny.csv", "results/sweep_measured.csv")


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    config = {"device": "cpu", "experiments": {"sweep_processes": ON_TWO_NODES}}
    return run(tmp_path_factory.mktemp("nodes"), config, "results/sweep_processes.csv")


@pytest.fixture(scope="module")
def granted(tmp_path_factory):
    config = {"device": "cuda", "device_count": 2, "experiments": {"sweep_measured": ON_GPUS}}
    return run(tmp_path_factory.mktemp("gpu"), config, "results/sweep_measured.csv")


def test_a_sweep_runs_through_slurm(swept):
    rows, jobs = swept
    found = sorted((row["evidence"], row["partitions"], row["chunks"], row["status"]) for row in rows)
    measured = [("measured", "2", chunks, "ok") for chunks in "12"]
    assert found == measured + [("simulated", n, m, "ok") for n in "12" for m in "12"]
    assert all(float(row["throughput_samples_per_s"]) > 0 for row in rows)
    # One job per measured cell and one for all simulated ones; tables are put together here.
    assert len(jobs) == 3
    assert {job(number)["JobState"] for number in jobs} == {"COMPLETED"}


def test_measured_cells_have_their_node_for_themselves(swept):
    _, jobs = swept
    exclusive = [job(number)["OverSubscribe"] == "NO" for number in jobs]
    assert exclusive.count(True) == 2


def test_processes_of_a_cell_are_on_two_nodes(spread):
    (row,), (number,) = spread
    assert (row["status"], row["reason"]) == ("ok", "")
    assert (row["processes"], row["hosts"], row["device_count"]) == ("2", "2", "2")
    assert float(row["throughput_samples_per_s"]) > 0
    assert float(row["clock_error_us"]) > 0
    assert job(number)["NumNodes"] == "2"


def test_gpus_are_requested(granted):
    _, (number,) = granted
    assert re.search(r"gpu:2\b", job(number).get("TresPerJob", ""))


def test_a_job_with_fewer_devices_than_its_cell_needs_refuses_with_a_row(granted):
    (row,), _ = granted
    assert (row["status"], row["partitions"], row["device_count"]) == ("skipped", "2", "2")
    assert "devices must be at most the 0 cuda devices that PyTorch sees here, got 2" in row["reason"]
    assert row["throughput_samples_per_s"] == ""
