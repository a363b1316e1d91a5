"""Cells of several processes: who starts them, what comes of them, and of those that are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from gpipe_bench.cli import main
from gpipe_bench.errors import ConfigError
from gpipe_bench.measure import rank_clock
from gpipe_bench.measure import timeline as recording
from gpipe_bench.results.timeline import TimelineEvent, write_trace
from gpipe_bench.suite.running import measured
from gpipe_bench.suite.running.ranks import Ranks, launch_command, rank_environment, rank_here
from gpipe_bench.suite.running.run import finished, run_cell
from tests.distributed.ranks import run_processes
from tests.project.tree import ROOT
from tests.suite.cells_of import cell

TWO = {"schedule": "gpipe", "transfer": "direct", "processes": 2}
FOUR_ON_TWO = {"partitions": 4, "balance": "7-7-7-8", **TWO, "processes": 4, "hosts": 2}
AHEAD_NS = 1_000_000_000_000
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def started(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


# --- who starts them -------------------------------------------------------------------------------------------------


def test_a_process_alone_has_no_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert rank_here(cell(**TWO)) is None


def test_a_process_that_torchrun_started_joins(monkeypatch):
    started(monkeypatch, RANK=3, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2)
    assert rank_here(cell(**FOUR_ON_TWO)) == 3


@pytest.mark.parametrize("changes", [{"processes": 2, "partitions": 2, "balance": "14-15"}, {"hosts": 1}])
def test_another_number_of_processes_is_refused(monkeypatch, changes):
    started(monkeypatch, RANK=0, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2)
    with pytest.raises(ConfigError, match="--processes and --hosts must be the 4 and 2 that were started, got "):
        rank_here(cell(**{**FOUR_ON_TWO, **changes}))


def test_torchrun_starts_the_processes_of_one_repeat(monkeypatch, tmp_path, capsys):
    started(monkeypatch, RANK=0, WORLD_SIZE=2)
    with pytest.raises(SystemExit) as caught:
        main(["run", "--processes", "2", "--repeats", "3", "--out", str(tmp_path / "a.json")])
    assert caught.value.code == 2
    rule = "--repeats must be 0 where torchrun has started the processes of one repeat, got 3"
    assert rule in capsys.readouterr().err


def test_torchrun_starts_the_ranks_of_one_host():
    assert launch_command(cell(**TWO), {}) == [*TORCHRUN, "--standalone", "--local-addr", "localhost"]


def test_in_a_job_of_slurm_srun_starts_torchrun_on_each_host():
    words = launch_command(cell(**FOUR_ON_TWO), {"SLURM_JOB_ID": "7"})
    place = words.index(sys.executable)
    assert words[:place] == ["srun", "--overlap", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1"]
    assert words[place:][:5] == TORCHRUN
    assert words[-2:] == ["--rdzv-id", "7"]


def test_the_step_of_all_hosts_does_not_take_its_size_from_that_of_one():
    given = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "PATH": "/bin"}
    expected = {"SLURM_JOB_ID": "7", "PATH": "/bin", "OMP_NUM_THREADS": "2"}
    assert rank_environment(cell(**FOUR_ON_TWO, threads=2), given) == expected


def test_several_hosts_need_somebody_who_starts_them():
    with pytest.raises(ConfigError, match=r"hosts must be 1 where neither torchrun nor .* got 2; start it on each"):
        launch_command(cell(**FOUR_ON_TWO), {})


# --- what comes of them ----------------------------------------------------------------------------------------------


def measure(rank, ahead_ns):
    """The result on a rank whose clock is ahead of that of rank 0."""
    true = time.perf_counter_ns
    rank_clock.perf_counter_ns = recording.perf_counter_ns = lambda: true() + rank * ahead_ns
    return finished(measured._measured(cell(**TWO), 1, Ranks(rank, 2)))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_processes(2, tmp_path_factory.mktemp("ranks"), measure, AHEAD_NS)


def test_every_rank_has_the_result_of_all(results):
    first, second = results
    assert first.steps == second.steps
    assert [device["peak_allocated_gib"] for device in first.devices] == [
        device["peak_allocated_gib"] for device in second.devices
    ]
    row = first.row
    assert (row.status, row.processes, row.hosts, row.device_count, row.repeat) == ("ok", 2, 1, 1, 1)
    assert row.throughput_samples_per_s == pytest.approx(4e3 / row.step_time_ms)
    assert row.peak_allocated_gib == pytest.approx(sum(device["peak_allocated_gib"] for device in first.devices))
    assert all(device["peak_allocated_gib"] > 0 for device in first.devices)


def test_events_of_all_ranks_are_on_one_clock(results):
    result = results[0]
    events = {(each["kind"], each["microbatch"], each["partition"]): each for each in result.events}
    assert {partition for _, _, partition in events} == {0, 1}
    error_us = result.row.clock_error_us
    assert 0 < error_us < AHEAD_NS / 1e3 / 100
    for i in range(2):
        first, second = events["forward", i, 0], events["forward", i, 1]
        assert second["start_us"] > first["end_us"] - error_us
        assert events["backward", i, 0]["start_us"] > events["backward", i, 1]["end_us"] - error_us


def test_the_trace_says_by_how_much_clocks_may_be_off(results, tmp_path):
    row = results[0].row
    write_trace(tmp_path / "a.json", row.variant, row, [TimelineEvent(**event) for event in results[0].events])
    trace = json.loads((tmp_path / "a.json").read_text())
    assert trace["otherData"]["clock_error_us"] == f"{row.clock_error_us:.1f}"
    assert {each["pid"] for each in trace["traceEvents"]} == {0, 1}


def test_torchrun_starts_what_measures(monkeypatch):
    monkeypatch.chdir(ROOT)
    row = run_cell(cell(**TWO), 2).row
    assert (row.status, row.reason, row.repeat, row.processes) == ("ok", "", 2, 2)


# --- failures --------------------------------------------------------------------------------------------------------

VICTIM = """
import os, signal
from torch import nn

class Layer(nn.Linear):
    def forward(self, x):
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

def net(victim=0):
    layers = [Layer(4, 4), Layer(4, 4)]
    for place, layer in enumerate(layers):
        layer.dies = place == victim
    return nn.Sequential(*layers)

def net_batch(batch_size, victim=0):
    import torch
    return torch.rand(batch_size, 4)
"""


@pytest.mark.parametrize(
    ("victim", "reason"),
    [(0, "PeerError: rank 0 must write a result, got none from torchrun, which ended with 1"), (1, "rank 1 is gone")],
)
def test_a_rank_that_is_killed_is_a_row_with_the_reason(victim, reason, tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(VICTIM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    own = {"model": "net.py:net", "model_args": f"victim={victim}", "balance": "1-1"}
    row = run_cell(cell(**TWO, **own), 0).row
    assert (row.status, row.processes) == ("error", 2)
    assert reason in row.reason


RUNNER = """
import os, sys
from gpipe_bench.suite.running.ranks import _run
_run([sys.executable, "-c", "import sys, time; print('up', file=sys.stderr, flush=True); time.sleep(600)"], os.environ)
"""


def test_what_was_started_ends_with_a_process_that_is_killed():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", RUNNER], env=environment, stderr=subprocess.PIPE, text=True) as runner:
        assert runner.stderr.readline() == "up\n"
        runner.kill()
        # It ends when nobody has the stream any more.
        assert runner.stderr.read() == ""
