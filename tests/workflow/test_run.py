"""A tiny real run of the workflow, from configuration to table, figures and traces; the second run does nothing."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from gpipe_bench.emulator.build import obstacle
from tests.workflow.checkouts import ROOT, checkout, snakemake_in

pytestmark = pytest.mark.timeout(600)  # the run takes a minute on an idle machine
ABLATION = ("ablation", "--configfile", "tiny.yaml")
PUBLISHED = ("baseline", "dep-str-ptl")
SIMULATED = ("baseline", "dep-x-x", "dep-str-x", "dep-str-ptl")
OUTPUTS = {
    *(f"results/ablation{table}.csv" for table in ("", "_devices", "_steps", "_events", "_configurations")),
    *(
        f"figures/ablation{name}_{evidence}.{suffix}"
        for name in ("", "_shares", "_timelines")
        for evidence in ("simulated", "emulated", "measured")
        for suffix in ("svg", "pdf", "png")
    ),
    *(f"results/traces/ablation/{variant}.json" for variant in PUBLISHED),
    *(f"results/traces/ablation/simulated_{variant}.json" for variant in SIMULATED),
    *(f"results/traces/ablation/emulated_{variant}.json" for variant in PUBLISHED),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run, and what the run printed."""
    place = checkout(tmp_path_factory.mktemp("run"))
    done = snakemake_in(place)(*ABLATION)
    assert done.returncode == 0, done.stdout
    return place, done.stdout


def files(place, *folders):
    """Files below some folders, but for the reference results, which are no rule's."""
    found = {str(path.relative_to(place)) for name in folders for path in (place / name).rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith("results/reference/")}


def rows_of(place, evidence):
    with (place / "results" / "ablation.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["evidence"] == evidence]


def test_everything_promised_is_there(run):
    place, _ = run
    made = files(place, "results", "figures")
    assert made >= OUTPUTS
    others = {name for name in made - OUTPUTS if not name.startswith("results/raw/")}
    # One job simulates all variants with one autograd engine, and one emulates: they share a model and a profile.
    assert Counter(name.rpartition("-")[0] for name in others) == {
        "results/simulated/unet-p40-n1-32": 2,
        "results/emulated/unet-p40-n1-32": 1,
    }
    assert all((place / name).stat().st_size > 0 for name in made)


def test_rows_are_measured_or_say_why_not(run):
    place, _ = run
    rows = rows_of(place, "measured")
    assert [(row["variant"], row["partitions"], row["schedule"], row["status"]) for row in rows] == [
        ("baseline", "2", "gpipe", "ok"),
        ("dep-str-ptl", "2", "gpipe", "unsupported"),
        ("dep-x-ptl", "1", "gpipe", "ok"),
        ("dep-x-ptl", "1", "gpipe", "ok"),
        ("dep-x-ptl", "2", "1f1b", "ok"),
    ]
    assert all(float(row["throughput_samples_per_s"]) > 0 for row in rows if row["status"] == "ok")
    assert "dep-x-ptl" in rows[1]["reason"]


def test_every_combination_is_simulated(run):
    place, _ = run
    rows = rows_of(place, "simulated")
    assert Counter((row["status"], row["profile"], row["flavour"]) for row in rows) == {
        ("ok", "p40", "published"): 32,
        ("ok", "p40", "current"): 2,
    }
    assert all(float(row["throughput_samples_per_s"]) > 0 for row in rows)


def test_what_is_emulated_is_a_row_for_each_step(run):
    place, _ = run
    rows = rows_of(place, "emulated")
    if obstacle():
        assert {(row["status"], row["reason"]) for row in rows} == {("skipped", obstacle())}
        return
    found = [(row["variant"], row["repeat"]) for row in rows if row["status"] == "ok"]
    assert found == [("baseline", "0"), ("dep-str-ptl", "0")]
    for variant in PUBLISHED:
        trace = json.loads((place / f"results/traces/ablation/emulated_{variant}.json").read_text())
        assert trace["otherData"]["evidence"] == "emulated"
        assert {"forward", "recompute", "backward"} <= {event.get("cat") for event in trace["traceEvents"]}


def test_a_simulated_trace_says_so(run):
    place, _ = run
    for variant in SIMULATED:
        trace = json.loads((place / f"results/traces/ablation/simulated_{variant}.json").read_text())
        assert trace["otherData"]["evidence"] == "simulated"
        assert {"forward", "recompute", "backward"} <= {event.get("cat") for event in trace["traceEvents"]}


def test_the_measured_trace_is_not_the_simulated_one(run):
    place, _ = run
    trace = json.loads((place / "results/traces/ablation/baseline.json").read_text())
    assert trace["otherData"]["evidence"] == "measured"


def test_traces_hold_tasks_of_the_variant_or_why_there_are_none(run):
    place, _ = run
    ran, unsupported = (json.loads((place / f"results/traces/ablation/{name}.json").read_text()) for name in PUBLISHED)
    assert {"forward", "backward"} <= {event.get("cat") for event in ran["traceEvents"]}
    assert "copy_streams needs an accelerator" in unsupported["otherData"]["remark"]


def test_the_run_ends_with_the_table_and_the_paths(run):
    _, printed = run
    end = printed.split("] figure ")[-1].split("] trace")[-1]
    for word in (
        "baseline",
        "plain loop",
        "1f1b",
        "measured",
        "simulated",
        "results/ablation.csv",
        "figures/ablation_measured.png",
    ):
        assert word in end


def test_a_job_is_a_line(run):
    _, printed = run
    lines = [line for line in printed.splitlines() if line.startswith("[")]
    total = len(lines)
    assert [line.split()[0] for line in lines] == [f"[{number}/{total}]" for number in range(1, total + 1)]
    assert any("] measuring 5 pipelines in turns, 1 repeat" in line for line in lines)
    assert "jobid" not in printed


def test_every_job_left_a_log(run):
    place, _ = run
    jobs = files(place, "results/raw")
    assert len(jobs) == 1  # all cells that are measured take turns
    logs = files(place, "logs")
    # One with the autograd engine of the published runs, one with that of today.
    assert sum(name.startswith("logs/simulate/unet-p40-n1-32-") for name in logs) == 2
    assert {name.replace("results/raw", "logs/run_cell").replace(".json", ".log") for name in jobs} <= logs
    assert {
        "logs/collect/ablation.log",
        "logs/figure/ablation_measured.log",
        "logs/trace/ablation/baseline.log",
    } <= logs


def test_every_output_is_ignored_by_git(run):
    """A committed output would make the target say that there is nothing to be done on a fresh clone."""
    place, _ = run
    names = "\n".join(sorted(files(place, "results", "figures", "logs")))
    command = ["git", "check-ignore", "--stdin", "--no-index"]
    ignored = subprocess.run(command, cwd=ROOT, input=names, capture_output=True, text=True, check=False)
    if ignored.returncode == 128:
        pytest.skip("the tests do not run in a git checkout")
    assert ignored.stdout.split() == names.split()


def test_a_second_run_does_nothing(run):
    place, _ = run
    before = {name: (place / name).stat().st_mtime_ns for name in files(place, "results", "figures")}
    again = snakemake_in(place)(*ABLATION)
    assert again.returncode == 0
    assert "Nothing to be done" in again.stdout
    assert {name: (place / name).stat().st_mtime_ns for name in files(place, "results", "figures")} == before


def test_a_job_that_fails_shows_why(place, snakemake):
    table = place / "results/reference/simulated/p40/ablation.csv"
    table.write_text(table.read_text().replace(",ok,", ",fine,", 1))
    done = snakemake("figures/redrawn/simulated-p40/ablation.svg")
    assert done.returncode == 1
    shown = done.stdout.split("the end of logs/redraw.log:\n")[1]
    assert "error: table must have the digest that datapackage.json records" in shown
    assert "Finished jobs keep their results: the same command goes on from here." in shown


def make(place, *words):
    """``make ablation`` in a checkout, whose environment is that of the tests."""
    programs = {".venv/bin/python": "", ".venv/bin/snakemake": "-m snakemake", "scripts/setup.sh": "-c ''"}
    for name, program in programs.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        (place / name).chmod(0o755)
    command = ["make", "--file", str(ROOT / "Makefile"), "ablation", f"ARGS={' '.join(words)}"]
    # Of an environment for another PyTorch, which `make test TORCH=...` names.
    given = {name: value for name, value in os.environ.items() if name != "TORCH"}
    return subprocess.run(command, cwd=place, env=given, capture_output=True, text=True, check=False)


def test_make_ends_with_the_table_when_nothing_is_to_be_done_too(run):
    place, _ = run
    done = make(place, "--configfile", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    assert "Nothing to be done" in done.stderr
    for word in ("baseline", "plain loop", "results/ablation.csv"):
        assert word in done.stdout


@pytest.mark.slow  # Snakemake runs the same jobs above
def test_make_runs_jobs_in_a_new_checkout(tmp_path):
    place = checkout(tmp_path)
    done = make(place, "--configfile", "tiny.yaml", "--until", "simulate")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(files(place, "results/simulated")) == 2


@pytest.mark.parametrize(
    ("edited", "again", "kept"),
    [
        ("gpipe_bench/engine/gpipe.py", {"run_cell", "collect", "figure", "trace"}, {"simulate"}),
        (
            "gpipe_bench/figures/style.py",
            {"figure"},
            {"run_cell", "simulate", "collect", "trace"},
        ),
        ("gpipe_bench/simulator/steps/run.py", {"simulate", "collect", "figure"}, {"run_cell"}),
    ],
)
def test_an_edit_repeats_what_depends_on_it_and_nothing_else(run, edited, again, kept):
    place, _ = run
    source = place / edited
    text = source.read_text()
    source.write_text(text + "\n# edited\n")
    try:
        planned = snakemake_in(place)("--dry-run", *ABLATION).stdout
    finally:
        source.write_text(text)
    rules = {line.split()[0] for line in planned.splitlines() if len(line.split()) == 2 and line.split()[1].isdigit()}
    assert again <= rules
    assert not kept & rules
