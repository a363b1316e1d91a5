"""Work that was killed goes on where it stopped: nothing is lost, doubled or half-written."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import yaml

from tests.workflow.checkouts import MODEL, checkout, snakemake_in

SWEEP = {"model": "unet", "model_args": MODEL, "partitions": [1, 2], "chunks": [1, 2], "batch_size": 4}
NAMES = {"first": "p40", "second": "v100", "third": "h100"}
CONFIG = {
    "device": "cpu",
    "sweep": {
        "simulated": {name: {**SWEEP, "microbatch_size": 0, "profile": profile} for name, profile in NAMES.items()}
    },
}
TARGETS = [f"results/sweep_{name}.csv" for name in NAMES]
ARGUMENTS = (*TARGETS, "--configfile", "resume.yaml")
# A job makes its log when it starts, so a number of logs is a moment of the run.
JOBS = 2 * len(NAMES)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The tables of a run that nobody interrupted."""
    place = prepared(tmp_path_factory.mktemp("whole"))
    done = snakemake_in(place)(*ARGUMENTS)
    assert done.returncode == 0, done.stdout
    return {name: (place / name).read_bytes() for name in TARGETS}


def prepared(place):
    checkout(place)
    (place / "resume.yaml").write_text(yaml.safe_dump(CONFIG))
    return place


def killed(place, logs):
    """Kill a run with all of its jobs as soon as ``logs`` of them have begun; whether it was still running."""
    command = [sys.executable, "-m", "snakemake", "--cores", "2", *ARGUMENTS]
    run = subprocess.Popen(
        command, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while run.poll() is None and len(list((place / "logs").rglob("*.log"))) < logs:
        time.sleep(0.005)
    running = run.poll() is None
    if running:
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    return running


def finished(place):
    """Every result that is there, with the time of its last change; one that cannot be read fails the test."""
    found = {}
    for path in (place / "results" / "simulated").glob("*.json"):
        json.loads(path.read_text())
        found[path] = path.stat().st_mtime_ns
    return found


@pytest.mark.timeout(600)  # four starts of Snakemake with their jobs
def test_a_run_killed_at_random_points_ends_with_the_same_tables(whole, tmp_path):
    place = prepared(tmp_path)
    points = sorted(random.Random(20200421).sample(range(1, JOBS), 3))
    kept = {}
    for logs in points:
        assert killed(place, logs)
        now = finished(place)
        assert {path: now.get(path) for path in kept} == kept, "what was done is done once"
        kept = now
        unlocked = subprocess.run(
            [sys.executable, "-m", "snakemake", "--unlock", *ARGUMENTS],
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
        )
        assert unlocked.returncode == 0, unlocked.stderr
    done = snakemake_in(place)(*ARGUMENTS)
    assert done.returncode == 0, done.stdout
    assert {name: (place / name).read_bytes() for name in TARGETS} == whole
    assert {path: finished(place)[path] for path in kept} == kept
    assert list(place.rglob(".writing-*")) == []
