"""The trace of a simulated step: a file that is read again as it was, runs as it did, and that explain reads."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from gpipe_bench.cli import main
from gpipe_bench.components import Components
from gpipe_bench.errors import TraceError
from gpipe_bench.machine.replay import DeviceMemory, Replay
from gpipe_bench.machine.trace_file import difference, read_trace, write_trace
from gpipe_bench.results.traced import read_step
from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.steps.writer import CALLER, TraceWriter
from gpipe_bench.simulator.workloads.workload import Kernels
from tests.simulator.support import Plain, task, workload

CASES = {
    "paper": Settings(Components(), "except_last", steps=2, memory=False),
    "baseline of PyTorch 1.3": Settings(Components(fork_join=False), "always", "published", steps=3, memory=False),
    "1f1b": Settings(schedule="1f1b", steps=2, memory=False),
    "zb_v through the host": Settings(schedule="zb_v", transfer="host", steps=2, memory=False),
}


@pytest.fixture
def command(capsys):
    def run(*words):
        with pytest.raises(SystemExit) as caught:
            main([*map(str, words)])
        printed = capsys.readouterr()
        assert not caught.value.code, printed.err
        return printed.out

    return run


@pytest.mark.parametrize("name", CASES)
def test_a_trace_that_is_read_again_runs_as_before(name, tmp_path):
    settings = CASES[name]
    work, machine = workload(4, [task(10_000, 24_000, 3)] * 4, [(0, 3), (1, 2)]), Plain(copy=700)
    replay = run(work, machine, settings).replay
    write_trace(tmp_path / "step.jsonl.gz", replay.trace, replay.rows())
    again = read_trace(tmp_path / "step.jsonl.gz")
    assert difference(replay.trace, again).row is None
    assert [one[:3] for one in again.tasks] == [one[:3] for one in replay.trace.tasks]
    second = Replay(again, machine)
    second.run()
    first = replay.rows()
    assert (second.rows().begin_ns, second.rows().end_ns) == (first.begin_ns, first.end_ns)
    assert second.rows().host_ns == first.host_ns
    assert first.makespan_ns > 0


def test_launches_and_gradients_are_in_the_file(tmp_path, command):
    small = "--model", "gpt2", "--partitions", 2, "--chunks", 2, "--batch-size", 4, "--profile", "h100"
    command("simulate", *small, "--trace", tmp_path / "step.jsonl.gz")
    lines = [json.loads(line) for line in gzip.decompress((tmp_path / "step.jsonl.gz").read_bytes()).splitlines()]
    kernels = [line for line in lines if line.get("name") == "backward"]
    assert kernels
    assert all(len(line["launch_ends"]) == line["launches"] for line in kernels)
    assert all(line["launch_ends"][-1] == line["duration_ns"] for line in kernels)
    assert any(line.get("adding_launches") and line.get("gradients") for line in kernels)


def test_explain_reads_it_as_it_reads_the_timeline(tmp_path, command):
    texts = []
    for name in ("step.json", "step.jsonl", "step.json.gz", "step.jsonl.gz"):
        command("simulate", "--model", "unet", "--partitions", 4, "--schedule", "1f1b", "--trace", tmp_path / name)
        texts.append(command("explain", tmp_path / name))
    assert len({*texts}) == 1
    assert (tmp_path / "step.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert "step of" in texts[0]


def test_explain_names_the_period_of_steps_that_overlap(tmp_path, command):
    small = "--model", "gpt2", "--partitions", 2, "--chunks", 2, "--batch-size", 4, "--profile", "h100"
    for name in ("step.json", "step.jsonl"):
        told = command("simulate", *small, "--trace", tmp_path / name)
        (period,) = re.findall(r"([0-9.]+) ms per step", told)
        explained, span = re.findall(r"([0-9.]+) ms", command("explain", tmp_path / name))[:2]
        assert f"{float(explained):.2f}" == period != f"{float(span):.2f}"


def test_what_allocators_gave_back_is_in_the_file(tmp_path, command):
    path, memory = tmp_path / "step.jsonl", DeviceMemory(1, 2, 3, 4, 5, 6, 0)
    replay = run(workload(2, [task(10_000, 24_000, 3)] * 2), Plain(copy=700), CASES["1f1b"]).replay
    write_trace(path, replay.trace, replay.rows(), step_ns=5, memory=[memory, memory._replace(flushes=3)])
    assert "gave cached memory back while the device was idle: 3 times on device 1, in all" in command("explain", path)
    assert difference(replay.trace, read_trace(path)).row is None
    head = json.loads(path.read_text().splitlines()[0])
    assert DeviceMemory(**head["memory"][0]) == memory


WRONG = {
    "a thread below 0": ("kernel", {"thread": -5}, "thread, stream"),
    "a stream far above all": ("kernel", {"stream": 10**9}, "thread, stream"),
    "a device below the host": ("kernel", {"device": -2}, "device and peer from -1"),
    "a task above all": ("kernel", {"task": 10**9}, "task must be from 0 to"),
    "launches below 0": ("kernel", {"launches": -1}, "launches, adding_launches, gradients and task must be 0 or more"),
    "fewer ends than launches": ("kernel", {"launches": 3, "launch_ends": [1, 2]}, "launch_ends must have one number"),
    "more ends than launches": ("kernel", {"launches": 1, "launch_ends": [1, 2]}, "launch_ends must have one number"),
    "a host that is busy for less than nothing": ("host", {"duration_ns": -7}, "a busy host must have a duration"),
    "a node without a number": ("node", {"writes": []}, "a node must write one block"),
    "a version again": ("signal", {"version": 1}, "versions must ascend"),
    "a pass within itself": ("backward", {"pass": 10**6}, "above the backward pass"),
    "a root of no nested pass": ("root", {"version": 1}, "must be of a nested pass before it|must have a root"),
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Of a small pipeline of PyTorch 1.3, with all kinds of rows."""
    path = tmp_path_factory.mktemp("rows") / "step.jsonl"
    settings = CASES["baseline of PyTorch 1.3"]
    replay = run(workload(2, [task(10_000, 24_000, 3)] * 2), Plain(copy=700), settings).replay
    write_trace(path, replay.trace, replay.rows())
    return path.read_text().splitlines()


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_cannot_run_are_refused(name, lines, tmp_path):
    kind, change, words = WRONG[name]
    # The last one: what is before it is right.
    place = max(place for place, line in enumerate(lines[1:], 1) if json.loads(line)["kind"] == kind)
    changed = json.dumps({**json.loads(lines[place]), **change})
    (tmp_path / "step.jsonl").write_text("\n".join([*lines[:place], changed, *lines[place + 1 :]]))
    with pytest.raises(TraceError, match=words):
        Replay(read_trace(tmp_path / "step.jsonl"), Plain(copy=700))


def test_a_trace_that_was_cut_is_refused(lines, tmp_path):
    for end in range(1, len(lines)):
        (tmp_path / "step.jsonl").write_text("\n".join(lines[:end]))
        with pytest.raises(TraceError, match=f"the {len(lines) - 1} rows of its first line, got {end - 1} in"):
            read_trace(tmp_path / "step.jsonl")
    with pytest.raises(TraceError, match=f"rows of its first line, got {end - 1} in"):
        read_step([tmp_path / "step.jsonl"])


def test_a_part_of_a_trace_that_does_not_say_its_rows_is_refused_or_runs(lines, tmp_path):
    outcomes = set()
    head = json.loads(lines[0])
    del head["rows"]
    for end in range(1, len(lines)):
        (tmp_path / "step.jsonl").write_text("\n".join([json.dumps(head), *lines[1:end]]))
        try:
            Replay(read_trace(tmp_path / "step.jsonl"), Plain(copy=700)).run()
            outcomes.add("runs")
        except TraceError:
            outcomes.add("refused")
    assert outcomes == {"runs", "refused"}


def test_each_row_has_the_ends_of_its_own_kernels():
    """Also where these are gone when the next ones are made, in the same place in memory."""
    writer = TraceWriter()
    for end in range(20):
        writer.issue(CALLER, writer.kernels((0, 0), Kernels(100, 2, ends_ns=(end, 100)), "forward"))
    trace = writer.trace(1)
    assert [trace.launch_ends[row.first_end - 1] for row in trace.rows] == [*range(20)]
