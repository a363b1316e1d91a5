"""What ``explain`` reads in a trace: shares by hand, real traces of PyTorch whose stages slept, and our own traces.

``torch_trace.py`` made the real traces, and says what their files hold.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from gpipe_bench.cli import application
from gpipe_bench.errors import ConfigError, ScheduleError, TraceError
from gpipe_bench.results.explain import alternatives, by_arithmetic, shifts, split
from gpipe_bench.results.timeline import TimelineEvent, chrome_trace
from gpipe_bench.results.trace_lines import HEAD
from gpipe_bench.results.traced import read_step
from gpipe_bench.schedules import SCHEDULES, Action, Durations, named_schedule, timing, with_recomputation
from gpipe_bench.schedules.actions import in_pairs
from gpipe_bench.schedules.table import partition_count
from gpipe_bench.simulator import simulate
from tests.cover import EVERY_CASE
from tests.project.pages import PAGES, blocks
from tests.schedules.torch_trace import FOLDER, MS, NAMES, ONE_STAGE, SPLIT, UNEVEN

REAL = [(name, p) for name in NAMES for p in (2, 4)]
OURS = dict(
    zip(NAMES, ("gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zb", "zb_v", "dualpipe_v"), strict=True)
)


def real(name: str, p: int | str, folder: Path = FOLDER) -> dict[str, Any]:
    return json.loads(gzip.decompress((folder / f"{name}-p{p}.json.gz").read_bytes()))


def files(folder: Path, traces: Sequence[dict[str, Any]]) -> list[Path]:
    """A file for each rank."""
    paths = [folder / f"rank{rank}.json" for rank in range(len(traces))]
    for path, trace in zip(paths, traces, strict=True):
        path.write_text(json.dumps(trace))
    return paths


def slept_order(row: Sequence[Sequence[Any]]) -> list[Action]:
    """The sleeps of a rank, where those of one backward pass may come in both orders."""
    order = [Action(*one[:3]) for one in row]
    for k in range(len(order) - 1):
        if order[k].kind == "W" and order[k + 1] == Action("I", *order[k][1:]):
            order[k : k + 2] = order[k + 1], order[k]
    return order


def sleeps(action: Action, split: bool) -> list[Action]:
    """The sleeps of an action: where PyTorch splits a backward pass, W of stage 0 does all of it."""
    kind, i, j = action
    if kind == "F":
        return [action]
    if kind == "B" or (split and j == 0):
        return [] if kind == "I" else [Action("I", i, j), Action("W", i, j)]
    return [action]


def nominal(n: int, split: bool, slept: dict[str, float] = MS) -> list[Durations]:
    """The durations of the stages, in microseconds."""
    f, i, w = (1000 * slept[kind] for kind in "FIW")
    return [Durations(f, 0, i + w) if split and j == 0 else Durations(f, i, w) for j in range(n)]


def cut(parts: list[Durations], n: int) -> list[Durations]:
    """Two parts for each, or one for each two."""
    if n > len(parts):
        halves = [Durations(part.forward / 2, part.inputs / 2, part.weights / 2) for part in parts]
        return list(chain.from_iterable(zip(halves, halves, strict=True)))
    twos = zip(parts[::2], parts[1::2], strict=True)
    both = [Durations(a.forward + b.forward, a.inputs + b.inputs, a.weights + b.weights) for a, b in twos]
    return both if n < len(parts) else parts


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


def test_gradients_that_a_partition_waits_for_and_does_not_compute_keep_their_place(tmp_path):
    """The schedule has I(0,0) before F(2,0), and the trace does not."""
    first = [("forward", 0, 0, 10), ("forward", 1, 10, 20), ("forward", 2, 40, 50), ("backward_weights", 0, 60, 80)]
    second = [("forward", 0, 10, 20), ("backward", 0, 20, 40), ("forward", 1, 40, 50), ("backward", 1, 50, 70)]
    first += [("backward_weights", i, 60 + 20 * i, 80 + 20 * i) for i in (1, 2)]
    second += [("forward", 2, 70, 80), ("backward", 2, 80, 100)]
    rows = [(name, kind, i, j, start, start, end)
            for name, j, row in (("a", 0, first), ("b", 1, second)) for kind, i, start, end in row]  # fmt: skip
    step = read_step([write(tmp_path / "trace.json", rows)])
    assert " ".join(map(str, step.schedule.devices[0])) == (
        "F(0,0) F(1,0) I(0,0) F(2,0) W(0,0) I(1,0) W(1,0) I(2,0) W(2,0)"
    )
    assert by_arithmetic(step) == pytest.approx(step.length_us)


def test_two_steps_are_compared_action_by_action(by_hand, tmp_path):
    """The other one's backward passes take 4 longer, so that the last one starts 4 later."""
    rows = [
        ("a", "forward", 0, 0, 0, 100, 110),
        ("b", "forward", 0, 1, 114, 115, 125),
        ("b", "backward", 0, 1, 105, 125, 149),
        ("a", "backward", 0, 0, 106, 149, 173),
    ]
    found = shifts(read_step([write(tmp_path / "late.json", rows)]), read_step([by_hand]))
    assert [(one.device, *one.action) for one in found] == [
        ("a", "F", 0, 0), ("b", "F", 0, 1), ("b", "B", 0, 1), ("a", "B", 0, 0)
    ]  # fmt: skip
    assert [(one.expected_us, one.actual_us) for one in found][-1] == ((45, 65), (49, 73))
    assert [(one.late_us, one.off_us) for one in found] == [(0, 0), (0, 0), (0, 4), (4, 8)]


def test_a_step_is_compared_with_a_schedule_of_its_durations(by_hand):
    found = shifts(read_step([by_hand]), named_schedule("1f1b", 1, 2, 2))
    assert [one.late_us for one in found] == [0, 5, 5, 5]
    with pytest.raises(ScheduleError, match="must be for the partitions of the traced step, got 3 for a step of 2"):
        shifts(read_step([by_hand]), named_schedule("1f1b", 1, 3, 3))


@pytest.mark.parametrize(("name", "n"), [("1f1b", 2), ("zb_v", 4), ("dualpipe_v", 4)])
def test_a_step_without_transfers_is_as_its_own_durations_say(tmp_path, name, n):
    schedule = named_schedule(name, 4, n, 2)
    times = timing(schedule)
    names = {"F": "forward", "B": "backward", "I": "backward_inputs", "W": "backward_weights"}
    rows = [(f"d{device}", names[action.kind], action.i, action.j, 0, times.start[action], times.end[action])
            for device, row in enumerate(schedule.devices) for action in row]  # fmt: skip
    found = shifts(read_step([write(tmp_path / "trace.json", rows)]), schedule)
    assert {one.off_us for one in found} == {0}
    assert {one.action for one in found} == {*schedule}


@pytest.mark.parametrize(("name", "p"), REAL)
def test_shares_and_order_of_real_traces_are_those_of_the_sleeps(tmp_path, name, p):
    found = real(name, p)
    step = read_step(files(tmp_path, found["traces"]))
    end = max(row[-1][-1] for row in found["slept"])
    assert step.on_host
    assert not step.issued
    assert step.devices == tuple(f"rank {rank}" for rank in range(p))
    assert step.length_us == pytest.approx(end, rel=0.01)
    for (shares, _), row, actions in zip(split(step), found["slept"], step.schedule.devices, strict=True):
        share = sum(until - since for *_, since, until in row) / end
        assert shares.compute_fraction == pytest.approx(share, abs=0.015)
        assert shares.imbalance_fraction + shares.bubble_fraction == pytest.approx(1 - share, abs=0.015)
        assert list(chain.from_iterable(sleeps(a, step.schedule.splits) for a in actions)) == slept_order(row)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", ONE_STAGE)
def test_the_bubble_of_real_traces_is_that_of_the_formula(tmp_path, name, p):
    m = 2 * p
    for shares, _ in split(read_step(files(tmp_path, real(name, p)["traces"]))):
        assert shares.imbalance_fraction + shares.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=0.01)


@pytest.mark.parametrize(
    ("name", "p", "slept"), [*((*one, {}) for one in REAL), *((name, p, UNEVEN) for name in SPLIT for p in (2, 4))]
)
def test_steps_of_other_schedules_are_those_of_the_sleeps(tmp_path, name, p, slept):
    step = read_step(files(tmp_path, real(name, f"{p}-uneven" if slept else p)["traces"]))
    schedule = step.schedule
    durations = nominal(schedule.partitions, schedule.splits, {**MS, **slept})
    ways = {way.schedule: way for way in alternatives(step) if (way.microbatches, way.checkpoint) == (2 * p, "never")}
    assert ways.keys() == set(SCHEDULES)
    for other, way in ways.items():
        n = partition_count(other, p)
        # A rank of PyTorch runs both of a pair before it sends the result of one.
        truth = timing(named_schedule(other, 2 * p, n, p), cut(durations, n), overlap=1).makespan
        assert way.length_us == pytest.approx(truth, rel=0.02)
    assert by_arithmetic(step) == pytest.approx(step.length_us, rel=0.02)


@pytest.mark.parametrize(("name", "p"), REAL)
def test_steps_of_other_schedules_are_those_that_pytorch_took(tmp_path, name, p):
    step = read_step(files(tmp_path, real(name, p)["traces"]))
    ways = {way.schedule: way for way in alternatives(step) if (way.microbatches, way.checkpoint) == (2 * p, "never")}
    for other in ONE_STAGE if name in ONE_STAGE else set(NAMES) - set(ONE_STAGE):
        took = read_step(files(tmp_path, real(other, p)["traces"])).length_us
        assert ways[OURS[other]].length_us == pytest.approx(took, rel=0.02)


@pytest.mark.parametrize(("name", "said"), [("1F1B", True), ("ZBVZeroBubble", False)])
def test_explain_says_that_it_cannot_tell_inputs_from_weights(tmp_path, name, said):
    paths = files(tmp_path, real(name, 2)["traces"])
    done = CliRunner().invoke(application(), ["explain", *map(str, paths)])
    assert done.exit_code == 0
    assert ("does not tell I from W" in done.output) == said


def test_ratios_over_a_real_step_of_gpipe_are_those_of_the_formulas(tmp_path):
    step = read_step(files(tmp_path, real("GPipe", 4)["traces"]))
    ways = {way.schedule: way for way in alternatives(step) if (way.microbatches, way.checkpoint) == (8, "never")}
    assert ways["1f1b"].length_us / step.length_us == pytest.approx(1, abs=0.01)
    assert ways["interleaved"].length_us / step.length_us == pytest.approx((16 + 3) / 2 / (8 + 3), abs=0.01)


@pytest.mark.parametrize(("name", "p"), REAL)
def test_a_missing_rank_is_named(tmp_path, name, p):
    paths = files(tmp_path, real(name, p)["traces"])
    for rank in range(p):
        with pytest.raises(
            ConfigError, match=f"all ranks of a pipeline, got none of rank {rank}; name their files, too"
        ):
            read_step([path for path in paths if path != paths[rank]])


def without_ranks(name: str, p: int) -> list[dict[str, Any]]:
    """The traces of the ranks, which do not say that they are; those of 1F1B have messages outside of ranges alone."""
    found = real(name, f"{p}-messages" if name == "1F1B" else p)
    return [{"traceEvents": trace["traceEvents"]} for trace in found["traces"]]


@pytest.mark.parametrize(("name", "p"), [(name, p) for name, p in REAL if name != "GPipe"])
def test_a_missing_stage_is_named_where_ranks_are_not_known(tmp_path, name, p):
    paths = files(tmp_path, without_ranks(name, p))
    assert len(read_step(paths).devices) == p
    for rank in range(p):
        with pytest.raises(ConfigError, match=rf"must have all stages, got none of \[.*\b{rank}\b"):
            read_step([path for path in paths if path != paths[rank]])


@pytest.mark.parametrize("p", [2, 4])
def test_a_missing_end_is_named_where_ranges_say_no_stage(tmp_path, p):
    paths = files(tmp_path, without_ranks("GPipe", p))
    assert len(read_step(paths).devices) == p
    for one, got in ((paths[1:], "before that of .*rank1.json"), (paths[:-1], f"after that of .*rank{p - 2}.json")):
        with pytest.raises(ConfigError, match=f"must be of all ranks of a pipeline.*got none of the rank {got}"):
            read_step(one)


def test_ranges_that_say_no_stage_are_refused_in_another_order_and_of_replicas(tmp_path):
    first, *middle, last = files(tmp_path, without_ranks("GPipe", 4))
    with pytest.raises(ConfigError, match=r"before that of .*rank3.json.* and the rank after that of .*rank0.json"):
        read_step([last, *middle, first])
    for inside in (first, last):
        with pytest.raises(ConfigError, match=rf"in the order of its stages, got .*{inside.name} in between"):
            read_step([first, middle[0], inside, last])


@pytest.mark.parametrize(("name", "p"), REAL)
def test_replicas_are_refused_and_one_of_them_is_read(tmp_path, name, p):
    traces = []
    for replica in range(2):
        for rank, trace in enumerate(real(name, p)["traces"]):
            groups = [list(range(2 * p)), list(range(replica * p, replica * p + p)), [rank, rank + p]]
            info = {"rank": replica * p + rank, "world_size": 2 * p, "pg_config": [{"ranks": one} for one in groups]}
            traces.append({**trace, "distributedInfo": info})
    paths = files(tmp_path, traces)
    with pytest.raises(ConfigError, match=r"must be of one pipeline.*name the files of one replica"):
        read_step(paths)
    second = read_step(paths[p:])
    assert second.schedule == read_step(paths[:p]).schedule
    assert second.devices == tuple(f"rank {rank}" for rank in range(p, 2 * p))


def test_a_rank_twice_is_refused(tmp_path):
    paths = files(tmp_path, real("GPipe", 2)["traces"])
    with pytest.raises(ConfigError, match=r"must be of different ranks, got \[0, 0\]"):
        read_step([paths[0], paths[0]])


@pytest.mark.parametrize("kind", ["X", "B"])
@pytest.mark.parametrize(("name", "p"), REAL)
def test_a_range_without_duration_is_named_where_it_is_of_the_last_step(tmp_path, name, p, kind):
    traces = real(name, p)["traces"]
    draw = random.Random(f"{name}{p}{kind}")
    rank = draw.randrange(p)
    rows = sorted((row for row in traces[rank]["traceEvents"] if row["cat"] != "cpu_op"), key=lambda row: row["ts"])
    passes = [row for row in rows if not any(word in row["name"] for word in ("RECV", "SEND", "REDUCE", "SHARD"))]
    whole = read_step(files(tmp_path, traces))
    of_name = {row["name"]: [one for one in passes if one["name"] == row["name"]] for row in passes}
    for first, *_, last in of_name.values() if EVERY_CASE else draw.sample([*of_name.values()], 3):
        length = first.pop("dur")
        assert read_step(files(tmp_path, traces)) == whole
        first["dur"], length = length, last.pop("dur")
        last["ph"] = kind
        got = f"must have a duration, got none for {re.escape(last['name'])} in .*rank{rank}.json;"
        with pytest.raises(ConfigError, match=got):
            read_step(files(tmp_path, traces))
        last |= {"ph": "X", "dur": length}


def test_an_event_of_ours_without_duration_is_named(by_hand):
    trace = json.loads(by_hand.read_text())
    for row in trace["traceEvents"]:
        if row["ph"] == "X":
            length = row.pop("dur")
            by_hand.write_text(json.dumps(trace))
            with pytest.raises(ConfigError, match=f"got none for {row['cat']} of micro-batch 0 in "):
                read_step([by_hand])
            row["dur"] = length


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("name", "p"), REAL)
def test_ranks_whose_clocks_differ_by_more_than_a_hundredth_are_refused(tmp_path, name, p, sign):
    length = read_step(files(tmp_path, real(name, p)["traces"])).length_us
    for rank in range(p):
        for percent in (0.9, 1.1):
            traces = real(name, p)["traces"]
            for row in traces[rank]["traceEvents"]:
                row["ts"] += sign * percent / 100 * length
            paths = files(tmp_path, traces)
            if percent < 1:
                read_step(paths)
                continue
            with pytest.raises(ConfigError, match=r"of clocks that agree within .* on rank . that has .* ms before"):
                read_step(paths)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"])
def test_gpus_whose_clocks_differ_are_refused(tmp_path, name, sign):
    for rank in range(4):
        traces, length, _ = gpu_traces(name, 8, 4, kernels=True)
        for row in traces[rank]["traceEvents"]:
            row["ts"] += sign * 0.015 * length
        with pytest.raises(ConfigError, match="of clocks that agree within"):
            read_step(files(tmp_path, traces))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("name", "p"), REAL)
def test_a_trace_that_is_cut_within_a_step_gives_one_that_is_whole_on_all_ranks(tmp_path, name, p, share):
    def moments(trace):
        """The starts of both steps, and the end of the second."""
        rows = [row for row in trace["traceEvents"] if row["cat"] == "user_annotation"]
        seen = sorted(row["ts"] for row in rows if row["name"] == rows[0]["name"])
        return *seen, max(row["ts"] + row["dur"] for row in rows)

    def cut(trace, since, until):
        rows = [row for row in trace["traceEvents"] if since <= row["ts"] and row["ts"] + row["dur"] <= until]
        return {**trace, "traceEvents": rows}

    def problem(traces):
        try:
            return str(read_step(files(tmp_path, traces)).length_us)
        except ConfigError as error:
            return str(error)

    traces = real(name, p)["traces"]
    times = [moments(trace) for trace in traces]
    second = read_step(files(tmp_path, traces))
    ends = [start for _, start, _ in times]
    first = read_step(files(tmp_path, [cut(trace, 0, end) for trace, end in zip(traces, ends, strict=True)]))
    early = [start + share * (end - start) for start, end, _ in times]
    late = [start + share * (end - start) for _, start, end in times]
    for rank in range(p):
        some = traces[:]
        some[rank] = cut(traces[rank], 0, late[rank])
        assert read_step(files(tmp_path, some)) == first
        some[rank] = cut(traces[rank], early[rank], math.inf)
        if name != "1F1B":
            assert read_step(files(tmp_path, some)) == second
        assert "clocks" not in problem(some)
        some = [cut(trace, 0, end) for trace, end in zip(traces, ends, strict=True)]
        some[rank] = cut(traces[rank], 0, early[rank])
        assert "clocks" not in problem(some)


def test_a_step_without_backward_passes_is_refused_and_one_before_it_is_read(tmp_path):
    traces = real("GPipe", 2)["traces"]
    whole = read_step(files(tmp_path, traces))
    for trace in traces:
        rows = trace["traceEvents"]
        rows += [{**row, "ts": row["ts"] + 1e7} for row in rows if row["name"].startswith("Forward")]
    assert read_step(files(tmp_path, traces)) == whole
    for trace in traces:
        trace["traceEvents"] = [row for row in trace["traceEvents"] if row["name"].startswith("Forward")]
    with pytest.raises(ConfigError, match="got no backward pass; trace a whole step"):
        read_step(files(tmp_path, traces))


def test_the_command_reads_compressed_traces(tmp_path):
    paths = []
    for rank, trace in enumerate(real("ZBVZeroBubble", 2)["traces"]):
        paths.append(tmp_path / f"rank{rank}.json.gz")
        paths[-1].write_bytes(gzip.compress(json.dumps(trace).encode()))
    done = CliRunner().invoke(application(), ["explain", *map(str, paths)])
    assert done.exit_code == 0, done.output
    assert "These ranges are the host's" in done.output
    assert "zb_v" in done.output


def test_the_installed_version_of_torch_writes_traces_that_are_read(tmp_path):
    names = "GPipe", "1F1B", "DualPipeV"
    script = Path(__file__).parent / "torch_trace.py"
    command = [sys.executable, str(script), "--awake", str(tmp_path), *(f"{name}-p2" for name in names)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for name in names:
        step, stored = (read_step(files(tmp_path, real(name, 2, folder)["traces"])) for folder in (tmp_path, FOLDER))
        assert step.schedule == stored.schedule


def gpu_traces(
    name: str, m: int, p: int, kernels: bool, durations: Sequence[Durations] | None = None
) -> tuple[list[dict[str, Any]], float, float]:
    """Traces as of GPUs with NCCL and FSDP, with the step and the bubble: 10 ms a pass, or as given; 0.1 ms a message.

    Kernels that receive spin from their launch on, on a stream of their own. A stream of FSDP has ranges that have the
    names of backward passes.
    """
    n, message = partition_count(name, p), 0.1
    schedule = named_schedule(name, m, n, p)
    times = timing(schedule, durations or Durations(10, 10, 10), message, overlap=1)
    traces = []
    for rank, row in enumerate(schedule.devices):
        spans, free = [], 0.0
        for unit in in_pairs(row, schedule.pairs):
            for kind, i, j in unit:
                source = [a for a in times.end if a.i == i and a.j == j + (-1 if kind == "F" else 1) and a.kind in
                          ("F" if kind == "F" else "BI")]  # fmt: skip
                if kind in "FBI" and source and schedule.placement[source[0].j] != rank:
                    start, arrived = times.end[source[0]], times.end[source[0]] + message
                    label = f"PP:{j}RECV_{'F' if kind == 'F' else 'B'}{i}"
                    spans.append((label, min(free, start), arrived, 20, "nccl_SendRecv"))
            free, names = times.end[unit[0]], [f"{j}{kind}{i}" for kind, i, j in unit]
            label = f"PP:{names[0]}" if len(unit) == 1 else f"PP:({';'.join(names)})OVERLAP_F_B"
            if free > times.start[unit[0]]:
                spans.append((label, times.start[unit[0]], free, 7, "gemm"))
            if unit[-1].kind in "BW":
                spans.append((label, free - 6, free + 1, 24, "nccl_ReduceScatter"))
        rows = []
        for label, start, end, stream, kernel in spans:
            base = {"ph": "X", "pid": 0, "tid": stream, "ts": 1000 * start, "dur": 1000 * (end - start)}
            rows.append({**base, "cat": "gpu_user_annotation", "name": label})
            rows.append({**base, "cat": "user_annotation", "name": label, "pid": 1, "tid": 1, "dur": 50})
            rows += [{**base, "cat": "kernel", "name": kernel}] if kernels else []
        traces.append({"distributedInfo": {"rank": rank, "world_size": p}, "traceEvents": rows})
    return traces, 1000 * times.makespan, times.bubble


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"])
def test_kernels_that_receive_wait_and_other_streams_do_not_compute(tmp_path, name, kernels):
    traces, length, bubble = gpu_traces(name, 8, 4, kernels)
    step = read_step(files(tmp_path, traces))
    assert not step.on_host
    assert step.length_us == pytest.approx(length)
    assert by_arithmetic(step) == pytest.approx(length)
    for shares, _ in split(step):
        assert shares.compute_fraction == pytest.approx(1 - bubble)
        assert shares.copy_fraction < 0.02


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", ["zb_v", "dualpipe_v"])
def test_traces_of_stages_that_differ_give_their_order_and_their_pairs(tmp_path, name, p, seed):
    """Stage 0 has no ranges of I; what its I would wait for may arrive while a pair runs."""
    draw = random.Random(seed)
    speeds = [draw.choice((1, 3, 10)) for _ in range(p)]
    speeds += speeds[::-1]
    durations = [Durations(*(speed * draw.uniform(5, 15) for _ in range(3))) for speed in speeds]
    durations[0] = replace(durations[0], inputs=0)
    traces, length, _ = gpu_traces(name, 2 * p, p, kernels=True, durations=durations)
    step = read_step(files(tmp_path, traces))
    own = named_schedule(name, 2 * p, 2 * p, p)
    assert step.schedule.pairs == own.pairs
    for traced, row in zip(step.schedule.devices, own.devices, strict=True):
        units = [[unit for unit in in_pairs(one, own.pairs) if unit[0][::2] != ("I", 0)] for one in (traced, row)]
        assert units[0] == units[1]
    assert step.length_us == pytest.approx(length)
    assert by_arithmetic(step) == pytest.approx(length)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"])
def test_a_message_tells_of_a_missing_stage_where_ranks_are_not_known(tmp_path, name):
    traces, _, _ = gpu_traces(name, 4, 4, kernels=True)
    for trace in traces:
        del trace["distributedInfo"]
    paths = files(tmp_path, traces)
    for rank in range(4):
        with pytest.raises(ConfigError, match="must have all stages, got none of"):
            read_step([path for path in paths if path != paths[rank]])


def test_ranges_on_the_stream_that_receives_do_not_compute(tmp_path):
    """``Forward 1`` of the second rank has a kernel that receives, and waits 20 ms for a pass of 4 ms."""
    rows = [("Forward 0", 0, 10), ("Forward 1", 10, 20), ("Backward 0", 24, 34), ("Backward 1", 34, 44)]
    later = [("Forward 0", 10, 14), ("Forward 1", 20, 24), ("Backward 0", 14, 20), ("Backward 1", 24, 34)]
    traces = []
    for rank, passes in enumerate((rows, later)):
        kept = []
        for name, start, end in passes:
            base = {"ph": "X", "pid": 0, "tid": 7, "ts": 1000 * start, "dur": 1000 * (end - start)}
            spin = {**base, "tid": 20, "ts": 0, "dur": base["ts"] if rank and "F" in name else 1}
            kept += [{**one, "cat": "gpu_user_annotation", "name": name} for one in (base, spin)]
            kept += [{**base, "cat": "kernel", "name": "gemm"}, {**spin, "cat": "kernel", "name": "ncclSendRecv"}]
        traces.append({"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": kept})
    first, second = (shares for shares, _ in split(read_step(files(tmp_path, traces))))
    assert first.compute_fraction == pytest.approx(40 / 44)
    assert second.compute_fraction == pytest.approx(24 / 44)


def test_a_simulated_timeline_gives_the_shares_of_the_simulation(tmp_path):
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    found = simulate(layers, balance=[4, 4], batch_size=64, chunks=4, schedule="1f1b", sample=torch.empty(1, 512))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(chrome_trace(found.events, title="simulated", metadata={})))
    step = read_step([path])
    for (shares, _), device in zip(split(step), found.devices, strict=True):
        # The step of a simulation also has the loss and the optimizer.
        computed = device.compute_fraction * found.step_time_ms * 1000
        assert shares.compute_fraction * step.length_us == pytest.approx(computed, rel=0.01)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_simulated_timelines_of_all_schedules_give_their_order(tmp_path, name, checkpoint):
    n, m = partition_count(name, 2), 4
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    sample = torch.empty(1, 1024)
    found = simulate(layers, balance=[8 // n] * n, batch_size=16384, chunks=m, schedule=name, checkpoint=checkpoint,
                     sample=sample)  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(chrome_trace(found.events, title="simulated", metadata={})))
    step = read_step([path])
    own = with_recomputation(named_schedule(name, m, n, 2), m if checkpoint == "always" else 0)
    for traced, row in zip(step.schedule.devices, own.devices, strict=True):
        # Gradients of the first inputs take no time, so an I of partition 0 may stand anywhere between its neighbours.
        assert [one for one in traced if one[::2] != ("I", 0)] == [one for one in row if one[::2] != ("I", 0)]
    assert by_arithmetic(step) == pytest.approx(step.length_us, rel=0.05)


@pytest.mark.parametrize("schedule", [None, "gpipe", "zb_v", "dualpipe_v"])
def test_run_writes_a_trace_that_is_explained(tmp_path, schedule):
    out, trace = str(tmp_path / "raw.json"), tmp_path / "trace.json"
    size = "--model-args", "depth=1;B=1;C=2;size=16;in=3;out=1;dropout=0.1", "--batch-size", "4", "--chunks", "4"
    given = ["--schedule", schedule] if schedule else []
    run = ["run", "--out", out, "--trace", str(trace), "--partitions", "4", "--device", "cpu", "--steps", "1", *size]
    done = CliRunner().invoke(application(), [*run, *given])
    assert done.exit_code == 0, done.output
    step = read_step([trace])
    p = 2 if schedule in ("zb_v", "dualpipe_v") else 4
    assert step.devices == tuple(f"device {k} (cpu)" for k in range(p))
    assert len(step.schedule.devices) == p
    assert step.schedule.microbatches == 4
    assert CliRunner().invoke(application(), ["explain", str(trace)]).exit_code == 0


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "must be a Chrome trace in JSON"),
        (
            "a.json",
            '{"traceEvents": [{"ph": "X", "dur": 1, "cat": "forward", "args": {"partition": 0}}]}',
            "must be a Chrome trace in JSON",
        ),
        ("a.json", '{"traceEvents": [{"ph": "X", "dur": 1, "cat": "copy"}]}', "got none in"),
        ("a.json", '{"traceEvents": []}', "got none in .* Schedule1F1B has no ranges"),
        ("a.jsonl", "", "a trace must be a file of JSON lines, .* write it by simulate or emulate --trace"),
        ("a.jsonl", '{"version": 1}\n{', "a trace must be a file of JSON lines"),
        ("a.jsonl", "[]", "a trace must begin with"),
        ("a.jsonl", f"{json.dumps(HEAD)}\n7", "each line of a trace must be a row"),
    ],
)
def test_a_file_without_actions_is_refused(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises((ConfigError, TraceError), match=words):
        read_step([path])


def test_a_compressed_file_that_ends_early_is_refused(tmp_path):
    data = gzip.compress(b'{"traceEvents": []}')
    path = tmp_path / "a.json.gz"
    for end in (5, 12, len(data) - 4):
        path.write_bytes(data[:end])
        with pytest.raises(ConfigError, match="must be a Chrome trace in JSON"):
            read_step([path])


def test_a_timeline_of_ours_stands_alone(tmp_path, by_hand):
    with pytest.raises(ConfigError, match="must be explained alone, got 3 files"):
        read_step([by_hand, *files(tmp_path, real("GPipe", 2)["traces"])])


def test_the_marks_of_the_documentation_are_read(tmp_path):
    """As ``mark`` gives them to a stage of ``Schedule1F1B``."""
    (snippet,) = blocks(PAGES["docs/explain.md"], "python")
    names: dict[str, Any] = {}
    exec(snippet, names)
    stage = SimpleNamespace(stage_index=0, forward_one_chunk=lambda i, *args: args, backward_one_chunk=lambda i: i)
    names["mark"](stage)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        assert stage.forward_one_chunk(0, "x") == ("x",)
        assert stage.backward_one_chunk(0) == 0
    seen.export_chrome_trace(str(tmp_path / "rank0.json"))
    assert read_step([tmp_path / "rank0.json"]).schedule.devices == ((Action("F", 0, 0), Action("B", 0, 0)),)
