"""No device waits for ever for another one, whatever the schedule and the skips, where sends last until their receive.

The transport is simulated: messages meet one by one, on channels whose ends take operations in the order in which they
were begun. The same schedules do wait for ever if sends hold up actions, or if both directions share a channel.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from zlib import crc32

import pytest

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import SCHEDULES, check, named_schedule, with_recomputation
from gpipe_bench.schedules.messages import Message, channels, sent, taken
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from tests.cover import EVERY_CASE

DEVICES = range(2, 9) if EVERY_CASE else (2, 3, 6)
MICROBATCHES = range(1, 17) if EVERY_CASE else (1, 2, 5, 8)


def nested(n):
    """Skips of a U-Net."""
    return [(k, n - 1 - k) for k in range(n // 2)]


def to_the_last(n):
    return [(k, n - 1) for k in range(n - 1)]


def at_random(n):
    draw = random.Random(crc32(f"skips {n}".encode()))
    return [tuple(sorted(draw.choices(range(n), k=2))) for _ in range(2 * n)]


def to_all(n):
    """Each partition reads what all before it have stashed."""
    return [tuple(range(k, n)) for k in range(n)]


def to_some(n):
    draw = random.Random(crc32(f"readers {n}".encode()))
    return [tuple(sorted(draw.choices(range(n), k=4))) for _ in range(2 * n)]


SKIPS = {
    "none": lambda _: [],
    "nested": nested,
    "to the last": to_the_last,
    "at random": at_random,
    "to all": to_all,
    "to some": to_some,
}


def cases(name):
    """(schedule, skips) of all sizes."""
    for p in DEVICES:
        n = 2 * p if name in TWO_PER_DEVICE else p
        for m in MICROBATCHES:
            schedule = with_recomputation(named_schedule(name, m, n, p), m - 1)
            yield from ((schedule, kind, make(n)) for kind, make in SKIPS.items())


def programs(schedule, skips):
    """For each device what it takes from others and sends to them, in order: (whether it sends, other, message)."""
    homes = schedule.placement
    source = {message: homes[action.j] for action in schedule for message in sent(action, homes, skips)}
    found = []
    for device, row in enumerate(schedule.devices):
        steps = []
        for action in row:
            steps += [(False, source[message], message) for message in taken(action, homes, skips)]
            steps += [(True, homes[message.j], message) for message in sent(action, homes, skips)]
        found.append([step for step in steps if step[1] != device])
    return found


def directed(sender, receiver):
    return sender, receiver


def shared(sender, receiver):
    return min(sender, receiver), max(sender, receiver)


class Transport:
    """Devices on channels; two ends meet when the next operation of one is to send, and of the other to receive.

    A device that needs a message begins to receive all that its sender sends before it, and then the message.
    """

    def __init__(self, steps, channel, *, blocking=False):
        self.steps, self.channel, self.blocking = steps, channel, blocking
        self.place, self.arrived, self.begun = [0] * len(steps), set(), set()
        self.operations = defaultdict(deque)
        self.to_send = defaultdict(deque)
        for device, program in enumerate(steps):
            for sends, other, message in program:
                if sends:
                    self.to_send[device, other].append(message)

    def begin(self, sends, device, other, message):
        if (sends, message) not in self.begun:
            self.begun.add((sends, message))
            ends = (device, other) if sends else (other, device)
            self.operations[self.channel(*ends), device].append((sends, other, message))

    def run(self, device):
        """Go on until the device has to wait."""
        for sends, other, message in self.steps[device][self.place[device] :]:
            if not sends:
                while (sends, message) not in self.begun:
                    self.begin(sends, device, other, self.to_send[other, device].popleft())
            self.begin(sends, device, other, message)
            if message not in self.arrived and (self.blocking or not sends):
                return
            self.place[device] += 1

    def meet(self):
        """Carry out all operations whose other end has come to them."""
        for (channel, device), queue in [*self.operations.items()]:
            while queue and queue[0][0]:
                _, other, message = queue[0]
                there = self.operations[channel, other]
                if not there or there[0][0]:
                    break
                assert there.popleft() == (False, device, message)
                queue.popleft()
                self.arrived.add(message)

    def ends(self):
        """Whether all devices come to their ends."""
        before = None
        while before != (state := (sum(self.place), len(self.arrived))):
            before = state
            for device in range(len(self.steps)):
                self.run(device)
            self.meet()
        return state[0] == sum(map(len, self.steps))


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_device_waits_for_ever_for_another_one(name):
    for schedule, _, skips in cases(name):
        check(schedule, skips)
        assert Transport(programs(schedule, skips), directed).ends()


@pytest.mark.parametrize("options", [{"channel": directed, "blocking": True}, {"channel": shared}], ids=str)
def test_other_transports_wait_for_ever(options):
    """Without skips wherever a device has a backward pass before a forward pass."""
    stuck = 0
    for name in SCHEDULES:
        for schedule, kind, skips in cases(name):
            if kind == "none" and not schedule.forwards_first:
                assert not Transport(programs(schedule, skips), **options).ends()
                stuck += 1
    assert stuck > 50


def test_what_a_schedule_of_ones_own_sends_from_device_to_device():
    schedule = named_schedule("zb_h1", 1, 3, 3)
    found = channels(schedule, [(0, 2), (1, 2)])
    sends = {ends: [str(message) for message, _ in channel.sent] for ends, channel in found.items()}
    assert sends == {
        (0, 1): ["activation of micro-batch 0 to partition 1"],
        (0, 2): ["activation of skip 0 of micro-batch 0 to partition 2"],
        (1, 2): [
            "activation of micro-batch 0 to partition 2",
            "activation of skip 1 of micro-batch 0 to partition 2",
        ],
        (2, 1): ["gradient of micro-batch 0 to partition 1", "gradient of skip 1 of micro-batch 0 to partition 1"],
        (2, 0): ["gradient of skip 0 of micro-batch 0 to partition 0"],
        (1, 0): ["gradient of micro-batch 0 to partition 0"],
    }


def test_messages_that_cross_are_named():
    """Partitions 0, 1 and 2, 3 on two devices: the skip from 0 to 3 is sent before what partition 2 needs."""
    first = [("F", 0, 0), ("F", 0, 1), ("B", 0, 1), ("B", 0, 0)]
    second = [("F", 0, 2), ("F", 0, 3), ("B", 0, 3), ("B", 0, 2)]
    assert check([first, second]).crossed == ()
    assert check([first, second], [(1, 2)]).crossed == ()
    assert check([first, second], [(0, 3)]).crossed == (
        (Message("F", 0, 2), Message("F", 0, 3, 0)),
        (Message("B", 0, 1), Message("B", 0, 0, 0)),
    )


BLOCKS = 16


def copies(name, devices, chains):
    """Tensors that go forward from device to device, for each micro-batch."""
    n = devices * (1 + (name in TWO_PER_DEVICE))
    schedule = named_schedule(name, 4, n, devices)
    messages = [message for each in channels(schedule, chains(BLOCKS // n)).values() for message, _ in each.sent]
    forward = sum(message.way == "F" for message in messages)
    assert len(messages) >= 2 * forward
    return forward / 4


def block_attention_residuals(per):
    """Each of 16 blocks reads the outputs of all earlier ones, ``per`` blocks in a partition."""
    return [tuple(reader // per for reader in range(block, BLOCKS)) for block in range(BLOCKS)]


def a_copy_per_reader(per):
    return [(chain[0], reader) for chain in block_attention_residuals(per) for reader in chain[1:]]


@pytest.mark.parametrize(
    ("schedule", "devices", "once", "per_reader"), [("1f1b", 4, 27, 99), ("interleaved", 4, 43, 103)]
)
def test_a_skip_that_is_read_many_times_comes_to_each_device_once(schedule, devices, once, per_reader):
    assert copies(schedule, devices, block_attention_residuals) == once
    assert copies(schedule, devices, a_copy_per_reader) == per_reader


def test_a_skip_goes_on_from_where_it_is_and_its_gradients_go_back_from_reader_to_reader():
    schedule = named_schedule("interleaved", 1, 4, 2)
    found = channels(schedule, [(0, 1, 2, 3)])
    sends = {
        ends: [str(message) for message, _ in channel.sent if message.skip is not None]
        for ends, channel in found.items()
    }
    assert sends == {
        (0, 1): [
            "activation of skip 0 of micro-batch 0 to partition 1",
            "gradient of skip 0 of micro-batch 0 to partition 1",
        ],
        (1, 0): [
            "gradient of skip 0 of micro-batch 0 to partition 2",
            "gradient of skip 0 of micro-batch 0 to partition 0",
        ],
    }


@pytest.mark.parametrize("skip", [(1, 0), (0, 2), (-1, 1), (0, 1, 0)])
def test_a_skip_that_leads_nowhere_is_refused(skip):
    with pytest.raises(ScheduleError, match="a skip must lead to later partitions, or stay in its own, got one from"):
        check(named_schedule("1f1b", 2, 2, 2), [(0, 1), skip])
