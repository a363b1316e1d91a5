"""Lists with messages: each begins where its list has it, after the work before it and those of its two ranks."""

from __future__ import annotations

import pytest

from gpipe_bench.errors import ConfigError, ScheduleError
from gpipe_bench.schedules import (
    SCHEDULES,
    MessageEnd,
    Schedule,
    check,
    derived,
    named_schedule,
    read_csv,
    stuck,
    to_csv,
    with_messages,
)
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from gpipe_bench.simulator import simulate
from gpipe_bench.simulator.steps.run import run
from gpipe_bench.simulator.steps.settings import Settings
from tests.simulator.support import Plain, task, workload
from tests.simulator.test_lives import heavy
from tests.simulator.test_schedules import starts

DURATIONS = {"F": 10, "B": 24, "I": 12, "W": 12}
COPY = 3


def lowered(name, m, devices):
    """A schedule with the messages that PyTorch adds."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    n = devices * (2 if name in TWO_PER_DEVICE else 1)
    schedule = named_schedule(name, m, n, devices)
    fields = [row.split(",") for row in to_csv(schedule).splitlines()]
    actions = {rank: [schedules._Action.from_str(field) for field in row] for rank, row in enumerate(fields)}
    rows = schedules._add_send_recv(actions, schedule.placement.__getitem__, n)
    return check(read_csv("".join(",".join(map(str, row)) + "\n" for row in rows.values()))).schedule


def recurrence(schedule):
    """When each action of two devices begins, and when the last one and the last message have ended."""
    queues = [list(row) for row in schedule.messages]
    # When the work of each device, and the one stream of messages between the two, has ended so far.
    work, stream = [0, 0], 0
    begun, posted, arrived = {}, {}, {}
    while any(queues):
        for device, row in enumerate(queues):
            while row:
                one = row[0]
                if isinstance(one, MessageEnd):
                    posted[one] = work[device]
                    if one.other in posted:
                        stream = max(stream, posted[one], posted[one.other]) + COPY
                        arrived[one.other if one.sends else one] = stream
                else:
                    taken = MessageEnd(False, "F" if one.kind == "F" else "B", one.i, one.j)
                    awaited = one.kind != "W" and taken in schedule.messages[device]
                    if awaited and taken not in arrived:
                        break
                    begun[one] = max(work[device], arrived[taken] if awaited else 0)
                    work[device] = begun[one] + DURATIONS[one.kind]
                row.pop(0)
    return {tuple(one): start for one, start in begun.items()}, max(*work, stream)


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_begin_where_pytorchs_list_has_them(name):
    schedule = lowered(name, 6, 2)
    if lines := stuck(derived(schedule), "pair"):
        pytest.skip(lines[0])
    chosen = Settings(schedule=schedule, checkpoint="never", memory=False)
    work = workload(6, [task(10, 24, 2)] * schedule.partitions)
    assert starts(work, Plain(copy=COPY), chosen) == recurrence(schedule)
    # Hosts run ahead, so in one thread they say the same.
    chosen = Settings(schedule=schedule, checkpoint="never", memory=False, workers=False)
    assert starts(work, Plain(copy=COPY), chosen) == recurrence(schedule)


def test_a_message_begins_after_the_work_before_it():
    first, second = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0B0",
        "1RECV_F0,1F0,1RECV_F1,1F1,1B1,1SEND_B1,1B0,1SEND_B0",
    )
    schedule = read_csv(f"{first}\n{second}\n")
    assert schedule == with_messages(named_schedule("gpipe", 2, 2, 2))
    work, machine = workload(2, [task(10, 24)] * 2), Plain(copy=COPY)
    found, _ = starts(work, machine, Settings(schedule=schedule, checkpoint="never"))
    # F(1,1) could begin at 23: its message does so only then.
    assert found["F", 1, 1] == 10 + COPY + 10 + COPY
    # B(1,1) ends at 60, and the messages of both backward passes overlap nothing on device 0.
    assert (found["B", 1, 0], found["B", 0, 0]) == (60 + COPY, 60 + COPY + 24 + COPY)
    overlapped, _ = starts(work, machine, Settings(schedule="gpipe", checkpoint="never"))
    assert overlapped["F", 1, 1] == 10 + COPY + 10
    assert overlapped["B", 0, 0] == 57 + COPY + 24


def test_a_result_is_sent_where_the_list_sends_it():
    rows = [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,(0F2;0B0)OVERLAP_F_B,0SEND_F2,0RECV_B1,0B1,0RECV_B2,0B2",
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1RECV_F2,1B1,1SEND_B1,1F2,1B2,1SEND_B2",
    ]
    schedule = check(read_csv("\n".join(rows))).schedule
    work = workload(3, [task(10, 24)] * 2)
    found, end = starts(work, Plain(copy=COPY), Settings(schedule=schedule, checkpoint="never"))
    assert (found, end) == recurrence(schedule)
    # Its result exists at 30, and is sent after B(0,0).
    assert found["F", 2, 0] == 20
    assert found["F", 2, 1] >= found["B", 0, 0] + 24 + COPY


@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "looped_bfs"])
def test_memory_does_not_depend_on_where_messages_are(name):
    schedule = lowered(name, 6, 2)
    work = workload(6, [heavy(forward=10, backward=20)] * schedule.partitions)
    peaks = [
        run(work, Plain(copy=0), Settings(schedule=given, checkpoint="never", steps=steps)).peak_live_bytes
        for given, steps in ((Schedule(schedule.devices), 3), (schedule, 3), (schedule, 1))
    ]
    assert peaks[0] == peaks[1] == peaks[2]


def simulated(schedule, **options):
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return simulate(
        model, balance=[1, 1], batch_size=2, chunks=2, schedule=schedule, sample=torch.zeros(2, 4), **options
    )


def test_what_cannot_run_is_refused():
    own = with_messages(named_schedule("1f1b", 2, 2, 2))
    # Both ranks begin with another message of the one stream.
    with pytest.raises(ScheduleError, match=r"got a list that is stuck, rank 0 is stuck at .*; move SEND or RECV"):
        simulated(own)
    with pytest.raises(ConfigError, match="transfer must be 'direct', got 'host' with SEND and RECV in the schedule"):
        simulated(with_messages(named_schedule("gpipe", 2, 2, 2)), transfer="host")
