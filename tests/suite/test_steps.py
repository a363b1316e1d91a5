"""What Snakemake says of jobs as a line each: how many, what, time left; the end of the log of a failure."""

from __future__ import annotations

import io
import logging

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from gpipe_bench.suite.running import steps as module
from gpipe_bench.suite.running.steps import Steps


class Terminal(io.StringIO):
    def isatty(self):
        return True


def record(message="", **extra):
    made = logging.makeLogRecord({"msg": message, "levelno": logging.INFO})
    made.__dict__.update(extra)
    return made


def begun(rule, jobid=0, **wildcards):
    return record(event=LogEvent.JOB_INFO, rule_name=rule, wildcards=wildcards, jobid=jobid)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_line_says_which_job_of_how_many_and_what_is_left(clock):
    out = io.StringIO()
    steps = Steps({"unet-1": "measuring 1f1b, 3 repeats"}, out=out)
    assert not steps.filter(record(event=LogEvent.RUN_INFO, stats={"run_cell": 9, "trace_virtual": 1, "total": 10}))
    assert not steps.filter(begun("trace_virtual", experiment="ablation", variant="baseline"))
    assert not steps.filter(record(event=LogEvent.PROGRESS, done=1, total=10))
    assert not steps.filter(begun("run_cell", cell="unet-1"))
    assert out.getvalue().splitlines() == [
        "[1/10] writing a trace: ablation baseline … about 2 min left",
        "[2/10] measuring 1f1b, 3 repeats … about 2 min left",
    ]


def test_what_is_left_is_known_by_the_kind_of_job(clock):
    """A job that took a minute says how long others of its rule take, and nothing of quick ones."""
    out = io.StringIO()
    steps = Steps({}, out=out)
    steps.filter(record(event=LogEvent.RUN_INFO, stats={"emulate": 2, "figure": 4, "total": 6}))
    for number, (rule, time_s) in enumerate([("emulate", 60.0), ("figure", 1.0), ("figure", 1.0), ("emulate", 60.0)]):
        steps.filter(begun(rule, jobid=number))
        clock[0] += time_s
        steps.filter(record(event=LogEvent.JOB_FINISHED, job_id=number))
    left = [line.partition("about ")[2] for line in out.getvalue().splitlines()]
    assert left == ["92 s left", "72 s left", "63 s left", "62 s left"]


def test_a_terminal_has_one_line_which_goes_at_the_end(clock):
    out = Terminal()
    steps = Steps({}, out=out)
    for event in (begun("figure"), begun("report"), record(event=LogEvent.PROGRESS, done=2, total=2)):
        steps.filter(event)
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r\033[2K")


def test_a_failure_shows_the_end_of_its_log_and_what_to_do(tmp_path):
    log = tmp_path / "redraw.log"
    log.write_text("".join(f"line {number}\n" for number in range(30)))
    out = io.StringIO()
    Steps({}, out=out).filter(record(event=LogEvent.JOB_ERROR, rule_name="redraw", log=[str(log)]))
    first, *shown, last = out.getvalue().splitlines()
    assert first == "failed: drawing the figures of the reference results"
    assert shown == [f"the end of {log}:", *(f"  line {number}" for number in range(10, 30))]
    assert last.endswith("the same command goes on from here.")


@pytest.mark.parametrize(
    "said",
    [
        "Terminating processes on user request, this might take some time.",
        "Will exit after finishing currently running jobs (scheduler).",
    ],
)
def test_an_interruption_says_how_to_go_on_and_nothing_else(said):
    """Snakemake says it several times after SIGTERM, and reports the jobs that it cut off as failed."""
    out = io.StringIO()
    steps = Steps({}, out=out)
    cut_off = record(event=LogEvent.JOB_ERROR, rule_name="collect", log=[])
    for one in (record(said), record(said), record("RuleException: exit status 130"), cut_off):
        assert not steps.filter(one)
    assert out.getvalue() == ("Interrupted. Finished jobs keep their results: the same command goes on from here.\n")


def test_warnings_and_what_has_nothing_to_do_are_passed_on():
    steps = Steps({}, out=io.StringIO())
    assert steps.filter(record("Nothing to be done."))
    assert steps.filter(record("the disk is slow", levelno=logging.WARNING))


def test_a_dry_run_is_left_to_snakemake():
    out = io.StringIO()
    assert Steps({}, lambda: True, out).filter(begun("figure"))
    assert out.getvalue() == ""
