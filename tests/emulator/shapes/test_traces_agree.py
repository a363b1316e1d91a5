"""A simulated and an emulated trace of one pipeline differ in durations alone, task by task.

The emulated trace is recorded from the real engine, kernel by kernel; the simulated one is written by the paper's
program, or a schedule, task by task. So what is compared is what both say of tasks: the same ones, on the same devices,
with the same bytes, in the same order on every stream, and behind the same other tasks, by streams and events.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple
from itertools import product

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.emulator import emulate, prepare
from gpipe_bench.machine.trace import KINDS
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from gpipe_bench.simulator import simulate
from gpipe_bench.skip import peek, skippable, stash
from tests.cover import cover

PROFILE = "p40"
M, N = 3, 3


def outline(step):
    """Each task of the last step, with those of that step that ended before it begins; and the order of streams."""
    rows, tasks, turn = step.replay.trace.rows, step.replay.trace.tasks, step.replay.rows().turn
    done, events, before = defaultdict(set), {}, {}
    marks = [place for place, row in enumerate(rows) if KINDS[row.kind] == "mark"]
    for place in sorted(range(len(rows)), key=turn.__getitem__):
        row, stream = rows[place], (rows[place].device, rows[place].stream)
        kind = KINDS[row.kind]
        if kind == "record":
            events[row.version] = set(done[stream])
        elif kind == "wait":
            done[stream] |= events[row.version]
        elif kind in {"kernel", "copy"} and row.task:
            streams = [stream, (row.peer, row.peer_stream)] if row.peer >= 0 else [stream]
            known = set().union(*(done[one] for one in streams))
            if row.task not in before:
                before[row.task] = (place, known)
            for one in streams:
                done[one] = known | {row.task}
    last = [task for task, (place, _) in before.items() if marks[-2] < place]
    name = {task: tasks[task - 1][:3] for task in last}
    of_each = {
        name[task]: (tasks[task - 1][:6], sorted(name[one] for one in before[task][1] & name.keys())) for task in last
    }
    streams = defaultdict(list)
    for task in last:
        row = rows[before[task][0]]
        streams[row.device, row.stream].append(name[task])
    return of_each, sorted((device, order) for (device, _), order in streams.items())


def layers(count):
    return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(count)))


@skippable(stash=["image"])
class Encode(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        yield stash("image", x[:, :1024] * 2)
        return x


@skippable(peek=["image"])
class Read(nn.Linear):
    def forward(self, x):
        image = yield peek("image")
        return super().forward(x) + torch.cat([image] * 4, 1)


def reading_layers():
    """Six partitions of a layer or two, of which four read what the first one stashes, and one has two readers."""
    return nn.Sequential(
        Encode(4096, 4096),
        *(Read(4096, 4096) for _ in range(3)),
        nn.Linear(4096, 4096),
        *(Read(4096, 4096) for _ in range(2)),
    )


# Without copy streams two host threads issue to one stream, and what comes first is a matter of the host's time.
ASIDE = [one for one in Components.factorial() if one.copy_streams]
CASES = [
    *((None, *one) for one in cover(product(ASIDE, CHECKPOINT_MODES), lambda one: (*astuple(one[0]), one[1]))),
    *product(("gpipe", "1f1b", "zb_h1", "v_half"), ASIDE[:1], CHECKPOINT_MODES),
]


@pytest.mark.parametrize(("schedule", "components", "checkpoint"), CASES)
def test_they_differ_in_durations_alone(schedule, components, checkpoint):
    prepare(PROFILE)
    partitions = 2 * N if schedule == "v_half" else N
    settings = {
        "balance": [1] * partitions, "batch_size": 32 * M, "chunks": M, "components": components,
        "checkpoint": checkpoint, "schedule": schedule, "profile": PROFILE, "sample": torch.zeros(1, 4096),
        "keep_trace": True,
    }  # fmt: skip
    simulated, emulated = (outline(call(layers(partitions), **settings)) for call in (simulate, emulate))
    assert simulated == emulated
    assert {kind for kind, *_ in simulated[0]} >= {"forward", "copy", "copy_grad"}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("schedule", "devices"),
    [(None, 6), (None, 3), ("gpipe", 6), ("1f1b", 6), ("zb_h1", 6), ("interleaved", 3), ("v_half", 3)],
)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_they_do_where_layers_read_a_skip_many_times(checkpoint, schedule, devices, shared):
    prepare(PROFILE)
    for portals in (True, False):
        settings = {
            "balance": [1, 1, 2, 1, 1, 1], "batch_size": 32 * M, "chunks": M, "checkpoint": checkpoint,
            "components": Components(portals=portals, shared=shared), "schedule": schedule, "profile": PROFILE,
            "sample": torch.zeros(1, 4096), "keep_trace": True,
        }  # fmt: skip
        if schedule is None:
            settings["devices"] = [j % devices for j in range(6)] if shared else range(6)
        simulated, emulated = (outline(call(reading_layers(), **settings)) for call in (simulate, emulate))
        for of_each, _ in (simulated, emulated):
            # The simulator's bytes of a forward pass are those of values, without skips.
            for name, (task, behind) in of_each.items():
                of_each[name] = task[: 5 if name[0] in {"forward", "recompute"} else 6], behind
        assert simulated == emulated, portals
        assert not portals or {kind for kind, *_ in simulated[0]} >= {"portal", "portal_grad"}


def test_tasks_of_an_emulated_trace_have_times():
    prepare(PROFILE)
    settings = {"balance": [1] * N, "batch_size": 32 * M, "chunks": M, "profile": PROFILE}
    replay = emulate(layers(N), **settings, sample=torch.zeros(1, 4096), keep_trace=True).replay
    times = replay.tasks()
    assert len(times.start_ns) == len(replay.trace.tasks) > 0
    assert all(0 <= start < end for start, end in zip(times.start_ns, times.end_ns, strict=True))


@pytest.mark.parametrize("devices", [[1, 0], [1, 0, 0, 1]])
def test_devices_are_those_of_the_schedule_or_of_partitions(devices):
    prepare(PROFILE)
    step = emulate(
        layers(4), balance=[1] * 4, batch_size=4, chunks=2, profile=PROFILE, schedule="zb_v", devices=devices,
        sample=torch.zeros(1, 4096),
    )  # fmt: skip
    assert {event.partition: event.device for event in step.events if event.kind == "forward"} == {
        0: "cuda:1", 1: "cuda:0", 2: "cuda:0", 3: "cuda:1"
    }  # fmt: skip
