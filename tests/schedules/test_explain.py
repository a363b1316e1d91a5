"""What ``explain`` reads in a trace: shares of time by hand, and the traces of the simulator and of PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from gpipe_bench.cli import application
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.explain import alternatives, by_arithmetic, read_step, split
from gpipe_bench.results.timeline import TimelineEvent, chrome_trace
from gpipe_bench.schedules import Durations, named_schedule, timing
from gpipe_bench.simulator import simulate

HERE = Path(__file__).parent


def write(path: Path, rows: list[tuple[str, str, int, int, float, float, float]]) -> Path:
    """A timeline of ours from (device, kind, i, j, issue, start, end)."""
    events = [TimelineEvent(device, "compute", kind, i, j, *times, 0) for device, kind, i, j, *times in rows]
    path.write_text(json.dumps(chrome_trace(events, title="by hand", metadata={})))
    return path


@pytest.fixture
def by_hand(tmp_path):
    """Two devices; the second one's forward pass could run at 10, and is issued at 14."""
    return write(
        tmp_path / "trace.json",
        [
            ("a", "forward", 0, 0, 0, 0, 10),
            ("b", "forward", 0, 1, 14, 15, 25),
            ("b", "backward", 0, 1, 5, 25, 45),
            ("a", "backward", 0, 0, 6, 45, 65),
        ],
    )


def test_the_time_of_each_device_is_split(by_hand):
    step = read_step([by_hand])
    assert step.devices == ("a", "b")
    assert step.length_us == 65
    for shares, _ in split(step):
        assert shares.compute_fraction == pytest.approx(30 / 65)
        assert shares.bubble_fraction == pytest.approx(35 / 65)


def test_the_host_has_what_it_had_not_issued_though_it_could_run(by_hand):
    (_, first), (_, second) = split(read_step([by_hand]))
    assert first == 0
    assert second == pytest.approx(4 / 65)


def test_the_traced_order_is_computed_from_its_durations(by_hand):
    assert by_arithmetic(read_step([by_hand])) == pytest.approx(60)


def test_other_schedules_take_what_their_arithmetic_says(by_hand):
    ways = {(way.schedule, way.microbatches, way.checkpoint): way for way in alternatives(read_step([by_hand]))}
    assert ways["1f1b", 1, "never"].length_us == pytest.approx(60)
    # The recomputation of the last partition delays its backward pass; that of the first one has run by then.
    assert ways["1f1b", 1, "always"].length_us == pytest.approx(70)
    # Twice the micro-batches of half the samples.
    halves = timing(named_schedule("zb_h1", 2, 2, 2), Durations(5, 5, 5)).makespan
    assert ways["zb_h1", 2, "never"].length_us == pytest.approx(halves)
    # Four partitions of half a device.
    quarters = timing(named_schedule("zb_v", 2, 4, 2), Durations(2.5, 2.5, 2.5)).makespan
    assert ways["zb_v", 2, "never"].length_us == pytest.approx(quarters)


def test_a_simulated_timeline_gives_the_shares_of_the_simulation(tmp_path):
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    found = simulate(layers, balance=[4, 4], batch_size=64, chunks=4, schedule="1f1b", sample=torch.empty(1, 512))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(chrome_trace(found.events, title="simulated", metadata={})))
    step = read_step([path])
    assert len(step.schedule.devices) == 2
    for (shares, _), device in zip(split(step), found.devices, strict=True):
        # The step of a simulation also has the loss and the optimizer.
        computed = device.compute_fraction * found.step_time_ms * 1000
        assert shares.compute_fraction * step.length_us == pytest.approx(computed, rel=0.01)
    assert by_arithmetic(step) == pytest.approx(step.length_us, rel=0.1)


def test_a_trace_that_torch_wrote_of_each_rank_is_read(tmp_path):
    ranks = [
        subprocess.Popen([sys.executable, HERE / "torch_trace.py", tmp_path, str(rank)], stderr=subprocess.DEVNULL)
        for rank in (0, 1)
    ]
    assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    paths = [tmp_path / "rank0.json", tmp_path / "rank1.json"]
    step = read_step(paths)
    assert step.devices == ("rank 0", "rank 1")
    assert step.on_host
    assert not step.issued
    passes = [(event.kind, event.microbatch, event.partition) for event in step.computations]
    assert sorted(passes) == sorted(product(("backward", "forward"), range(4), range(4)))
    done = CliRunner().invoke(application(), ["explain", *map(str, paths)])
    assert done.exit_code == 0, done.output
    assert "These ranges are the host's" in done.output
    assert "zb_v" in done.output
    with pytest.raises(ConfigError, match=r"all stages, got none of \[1\]; name the files of all ranks"):
        read_step(paths[:1])


def test_ranges_of_schedules_with_one_stage_are_read(tmp_path):
    for rank in (0, 1):
        names = [f"{what} {i}" for what in ("Forward", "Backward") for i in (0, 1)]
        rows = [
            {"ph": "X", "cat": "gpu_user_annotation", "name": name, "ts": 10.0 * k + 5 * rank, "dur": 4.0}
            for k, name in enumerate(names)
        ]
        group = {"rank": rank, "world_size": 2}
        (tmp_path / f"{rank}.json").write_text(json.dumps({"traceEvents": rows, "distributedInfo": group}))
    step = read_step([tmp_path / "0.json", tmp_path / "1.json"])
    assert [event.partition for event in step.computations] == [0, 1] * 4
    assert not step.on_host
    done = CliRunner().invoke(application(), ["explain", str(tmp_path / "0.json")])
    assert "note: 2 processes ran, and 1 of them are read; name the others" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"), [("{", "must be a Chrome trace in JSON"), ('{"traceEvents": []}', "got none in")]
)
def test_a_file_without_actions_is_refused(tmp_path, text, words):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_step([path])
