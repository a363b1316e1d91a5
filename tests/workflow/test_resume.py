"""Work that was killed goes on where it stopped: nothing is lost, doubled or half-written."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import pytest
import yaml

from tests.workflow.checkouts import MODEL, checkout, snakemake_in

SWEEP = {
    "run": "simulated",
    "model": "unet",
    "model_args": MODEL,
    "partitions": [1, 2],
    "chunks": [1, 2],
    "batch_size": 4,
}
NAMES = {"first": "p40", "second": "v100"}
CONFIG = {
    "device": "cpu",
    "experiments": {f"sweep_{name}": {"grid": {**SWEEP, "profile": profile}} for name, profile in NAMES.items()},
}
TARGETS = [f"results/sweep_{name}.csv" for name in NAMES]
ARGUMENTS = (*TARGETS, "--configfile", "resume.yaml")


class Whole(NamedTuple):
    """The tables of a run that nobody interrupted, and how long it took."""

    tables: dict[str, bytes]
    seconds: float


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody interrupts."""
    place = prepared(tmp_path_factory.mktemp("whole"))
    start = time.monotonic()
    done = snakemake_in(place)(*ARGUMENTS)
    assert done.returncode == 0, done.stdout
    return Whole({name: (place / name).read_bytes() for name in TARGETS}, time.monotonic() - start)


def prepared(place):
    checkout(place)
    (place / "resume.yaml").write_text(yaml.safe_dump(CONFIG))
    return place


def killed(place, due: Callable[[], bool], *options):
    """Kill a run with all of its jobs as soon as that is ``due``; whether it was still running."""
    command = [sys.executable, "-m", "snakemake", "--cores", "2", *options, *ARGUMENTS]
    run = subprocess.Popen(
        command, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while run.poll() is None and not due():
        time.sleep(0.005)
    running = run.poll() is None
    if running:
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    return running


def soon_after(place, files, seconds):
    """Due so long after a run has changed one of some files: the logs of jobs that begin, or results."""

    def state():
        found = {}
        for path in place.glob(files):
            # Snakemake removes what it makes again.
            with suppress(FileNotFoundError):
                found[path] = path.stat().st_mtime_ns
        return found

    before, moments = state(), []

    def due():
        if not moments and state() != before:
            moments.append(time.monotonic() + seconds)
        return bool(moments) and time.monotonic() >= moments[0]

    return due


def unlock(place):
    """What has to be said after a Snakemake that was killed outright."""
    command = [sys.executable, "-m", "snakemake", "--unlock", *ARGUMENTS]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def finished(place, whole):
    """Every finished result, with the time of its last change; one that is not whole fails the test, and so a table.

    Snakemake makes a result again whose job it did not see end, though it is there and whole: a mark says so.
    """
    found = {}
    for path in (place / "results" / "simulated").glob("*.json"):
        json.loads(path.read_text())
        mark = base64.urlsafe_b64encode(str(path.relative_to(place)).encode()).decode()
        if not (place / ".snakemake" / "incomplete" / mark).exists():
            found[path] = path.stat().st_mtime_ns
    tables = {name: (place / name).read_bytes() for name in TARGETS if (place / name).exists()}
    assert tables == {name: whole.tables[name] for name in tables}
    return found


def resumed(place, kept, whole):
    """Run what is left: the tables are those of the whole run, and what was there is as it was."""
    done = snakemake_in(place)(*ARGUMENTS)
    assert done.returncode == 0, done.stdout
    assert {name: (place / name).read_bytes() for name in TARGETS} == whole.tables
    assert {path: finished(place, whole)[path] for path in kept} == kept
    assert list(place.rglob(".writing-*")) == []


@pytest.mark.slow
@pytest.mark.timeout(600)  # five starts of Snakemake with their jobs
def test_a_run_killed_at_any_moment_ends_with_the_same_tables(whole, tmp_path):
    """As a job begins; seeded times after one began, and after a file appeared: before Snakemake knows it."""
    place, chance = prepared(tmp_path), random.Random(20200421)
    assert killed(place, soon_after(place, "logs/*/*.log", 0))
    kept = finished(place, whole)
    unlock(place)
    kills = 0
    for files, longest in (("results/simulated/*.json", 0.02), ("logs/*/*.log", 0.4), ("results/*.csv", 0.02)):
        # What unlocks is tried above.
        if not killed(place, soon_after(place, files, chance.uniform(0, longest) * whole.seconds), "--nolock"):
            break
        kills += 1
        now = finished(place, whole)
        assert {path: now.get(path) for path in kept} == kept, "what was done is done once"
        kept = now
    assert kills
    resumed(place, kept, whole)


@pytest.mark.timeout(300)  # two starts of Snakemake with their jobs
@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_says_how_to_go_on_and_nothing_is_lost(tmp_path, sent):
    """Ctrl+C at the terminal: a real SIGINT for Snakemake and its jobs, as the second job begins."""
    place = prepared(tmp_path)
    command = [sys.executable, "-m", "snakemake", "--cores", "1", *ARGUMENTS]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen(command, cwd=place, start_new_session=True, **said)
    first = next(line for line in run.stdout if line.startswith("[1/4]"))
    next(line for line in run.stdout if line.startswith("[2/4]"))
    os.killpg(run.pid, sent)
    rest, _ = run.communicate()
    assert run.returncode != 0
    assert rest == "Interrupted. Finished jobs keep their results: the same command goes on from here.\n"
    (kept,) = (place / "results" / "simulated").glob("*.json")
    before = kept.stat().st_mtime_ns
    # The same command, without unlocking anything: what was done is not done again.
    done = subprocess.run(command, cwd=place, check=False, **said)
    assert done.returncode == 0, done.stdout
    assert kept.stat().st_mtime_ns == before
    assert first.partition("] ")[2].strip() not in done.stdout
    assert {len((place / name).read_text().splitlines()) for name in TARGETS} == {5}
    assert list(place.rglob(".writing-*")) == []
