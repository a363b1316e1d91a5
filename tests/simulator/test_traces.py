"""The trace of a simulated step: a file that is read again as it was, runs as it did, and that explain reads."""

from __future__ import annotations

import gzip
import json

import pytest

from gpipe_bench.cli import main
from gpipe_bench.components import Components
from gpipe_bench.machine.replay import Replay
from gpipe_bench.machine.trace_file import difference, read_trace, write_trace
from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.steps.trace import root_latencies
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
    second = Replay(again, machine, latencies=root_latencies(work, settings))
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
    for name in ("step.json", "step.jsonl"):
        command("simulate", "--model", "unet", "--partitions", 4, "--schedule", "1f1b", "--trace", tmp_path / name)
        texts.append(command("explain", tmp_path / name))
    assert texts[0] == texts[1]
    assert "step of" in texts[0]
