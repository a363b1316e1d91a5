"""A session keeps to its time, measures the most important first, and leaves few files."""

from __future__ import annotations

import json
import os
import signal
import sys
import tarfile

import pytest

from gpipe_bench.bench.experiments.grid import read_experiment
from gpipe_bench.bench.experiments.session import TINY, Session, SessionPlan, check_unused, run_child, session_runs
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.bench.storage.raw import RawResult
from gpipe_bench.components import PUBLISHED
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.timeline import TimelineEvent, write_trace
from tests.bench.cells_of import ok_result

CPU, GPU = Machine("cpu", 1), Machine("cuda", 1)


def session(folder, runs=(), **settings):
    folder.mkdir(exist_ok=True)
    lines = []
    return Session(SessionPlan(folder, runs, "cpu", **settings), lines.append), lines


def test_published_variants_come_first_round_by_round():
    block = {"run": "measured", "variant": ["published", "factorial"], "repeats": 2, "other_repeats": 1}
    experiment = read_experiment({"all": {**block, "share_devices": True}}, ".".join)
    runs = [(run.cell.variant, run.repeat) for run in session_runs(experiment, GPU)]
    assert runs[:8] == [(variant, repeat) for repeat in range(2) for variant in PUBLISHED]
    assert len(runs) == 8 + 28


def test_the_rehearsal_is_a_valid_workload():
    assert {run.cell.variant for run in session_runs(TINY, CPU)} == set(PUBLISHED)


def test_what_the_budget_does_not_allow_is_a_row_that_says_so(tmp_path):
    under_way, lines = session(tmp_path, session_runs(TINY, CPU), budget_s=0.0)
    under_way.measure()
    rows = under_way.write()
    assert [(row.variant, row.status) for row in rows] == [
        ("baseline", "skipped"),
        ("dep-x-x", "skipped"),
        ("dep-str-x", "unsupported"),
        ("dep-str-ptl", "unsupported"),
    ]
    assert rows[0].reason == "the budget of 0 s did not suffice for this run"
    assert len(lines) == 4
    assert not (tmp_path / "raw").exists()
    assert (tmp_path / "ablation.csv").exists()


def test_a_run_that_leaves_no_result_is_an_error_row(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "gpipe_bench.bench.experiments.session._PACKAGE", (sys.executable, "-c", "import sys; sys.exit(3)")
    )
    under_way, _ = session(tmp_path, session_runs(TINY, CPU)[:1])
    under_way.measure()
    (row,) = under_way.write()
    assert (row.status, row.reason) == ("error", "the process ended with status 3 and without a result; see log.txt")


def test_a_run_that_outlasts_the_budget_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "gpipe_bench.bench.experiments.session._PACKAGE", (sys.executable, "-c", "import signal; signal.pause()")
    )
    under_way, _ = session(tmp_path, session_runs(TINY, CPU)[:2], budget_s=0.5)
    under_way.measure()
    first, second = under_way.write()
    assert (first.status, second.status) == ("skipped", "skipped")
    assert "the budget of 0.5 s is spent" in first.reason
    assert under_way.profile() == "stopped after 0 s"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("pass", "done"),
        ("raise SystemExit(3)", "failed with exit status 3, see log.txt"),
        ("import signal; signal.pause()", "stopped after 1 s"),
    ],
)
def test_the_race_has_its_time_and_no_say_in_the_rest(tmp_path, monkeypatch, code, said):
    monkeypatch.setattr("gpipe_bench.bench.experiments.session._RACE", (sys.executable, "-c", code))
    monkeypatch.setattr("gpipe_bench.bench.experiments.session._RACE_S", 1.0 if "pause" in code else 60.0)
    under_way, lines = session(tmp_path, race=["--preset", "quick"])
    assert under_way.race() == said
    assert lines == [f"race of peers: {said}"]
    assert "run --device cpu --preset quick --out" in (tmp_path / "log.txt").read_text()
    assert session(tmp_path)[0].race() == "not run: not asked for"


def test_traces_show_the_published_runs_nearest_to_the_median(tmp_path):
    under_way, _ = session(tmp_path)
    under_way.results = [ok_result("baseline", repeat, value) for repeat, value in enumerate((10.0, 30.0, 20.0))]
    under_way.results.append(ok_result("dep-x-ptl"))
    under_way.write()
    trace = json.loads((tmp_path / "traces" / "baseline.json").read_text())
    assert trace["otherData"]["repeat"] == "2"
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["baseline.json"]


def test_a_bundle_leaves_at_most_eight_files(tmp_path):
    folder = tmp_path / "gpu"
    under_way, _ = session(folder)
    under_way.results = [ok_result(variant) for variant in PUBLISHED[:2]]
    for name in ("profile.yaml", "log.txt", "raw/a/0.json", "raw/a/1.json", "race/peers.csv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    under_way.write()
    with tarfile.open(under_way.bundle()) as archive:
        packed = {name for name in archive.getnames() if "." in name}
        text = archive.extractfile("gpu/raw/a/1.json").read()
    assert text == b"raw/a/1.json"
    tables = ["ablation.csv", "ablation_devices.csv", "ablation_steps.csv", "ablation_configurations.csv"]
    kept = [*tables, "profile.yaml", "log.txt", "environment.json"]
    inside = ["race/peers.csv", "raw/a/0.json", "raw/a/1.json", "traces/baseline.json", "traces/dep-x-x.json"]
    assert packed == {f"gpu/{name}" for name in [*kept, *inside, "ablation_events.csv"]}
    assert {path.name for path in folder.iterdir()} == {*kept, "bundle.tar.gz"}
    assert len(list(folder.rglob("*"))) == 8


def test_the_environment_says_what_time_and_software_there_was(tmp_path):
    under_way, _ = session(tmp_path, budget_s=100.0)
    under_way.race()
    under_way.write()
    facts = json.loads((tmp_path / "environment.json").read_text())
    assert (facts["race"], facts["budget_s"]) == ("not run: not asked for", 100.0)
    assert 0 <= facts["spent_s"] < 100
    assert "torch" in facts["packages"]


def test_an_earlier_session_is_not_mixed_with_a_new_one(tmp_path):
    check_unused(tmp_path)
    (tmp_path / "raw").mkdir()
    with pytest.raises(ConfigError, match="--out must be a folder without an earlier session"):
        check_unused(tmp_path)


def test_a_child_reports_how_it_ended(tmp_path):
    log = tmp_path / "log.txt"
    assert run_child([sys.executable, "-c", "print('first')"], log, 60) == 0
    assert run_child([sys.executable, "-c", "raise SystemExit(7)"], log, 60) == 7
    assert run_child([sys.executable, "-c", "import os; os.abort()"], log, 60) == -signal.SIGABRT
    text = log.read_text()
    assert "first\n" in text
    assert text.count("$ ") == 3


def test_nothing_that_a_child_started_outlives_it(tmp_path):
    """The grandchild keeps the pipe open for as long as it lives; reading ends when nobody does."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    grandchild = f"import signal; kept = open({str(pipe)!r}, 'w'); print('ready', flush=True); signal.pause()"
    command = [sys.executable, "-c", grandchild]
    program = f"import subprocess; print(subprocess.Popen({command!r}, stdout=-1).stdout.readline())"
    assert run_child([sys.executable, "-c", program], tmp_path / "log.txt", 60) == 0
    assert "ready" in (tmp_path / "log.txt").read_text()
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_trace_says_what_it_shows(tmp_path):
    result: RawResult = ok_result("dep-x-ptl", 1)
    events = [TimelineEvent(**event) for event in result.events]
    remark = "copy streams unsupported on cpu: showing dep-x-ptl"
    write_trace(tmp_path / "a" / "trace.json", "dep-str-ptl", result.row, events, remark)
    trace = json.loads((tmp_path / "a" / "trace.json").read_text())
    assert [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"] == ["forward (0,0)"]
    assert trace["otherData"] == {
        "title": f"unet dep-str-ptl (measured): {remark}",
        "evidence": "measured",
        "variant": "dep-x-ptl",
        "model": "unet depth=2;B=1;C=4;size=16;in=3;out=1;dropout=0.1",
        "device": "cpu Model X",
        "repeat": "1",
        "remark": remark,
        "placement": "0-1",
    }
