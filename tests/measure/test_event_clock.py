"""Finding the host time of a device's events, in simulated time."""

import itertools

import pytest
import torch

from gpipe_bench.measure.timeline import EventClock
from tests.measure.simulated import Device, Event, new_event

NS_PER_MS = 1e6


class Host:
    """A host clock; the device's runs with it, from another zero.

    Each reading is followed by a pause (the marker is on its way), each wait by another (so is the news of it).
    """

    def __init__(self, device, pauses_ns):
        self.now_ns = 0
        self.device = device
        self.offset_ms = device.now_ms
        self.pauses_ns = iter(pauses_ns)
        device.on_synchronize = self.pause

    def pause(self):
        self.elapse(next(self.pauses_ns))

    def elapse(self, ns):
        self.now_ns += ns
        self.device.now_ms = self.offset_ms + self.now_ns / NS_PER_MS

    def read(self):
        now = self.now_ns
        self.pause()
        return now


def calibrated(pauses_ns, work_ns=40_000_000):
    """The clock whose first event was at host time 0, found after ``work_ns``.

    Pauses come in threes: before the marker, after it, and between two tries.
    """
    device = Device(torch.device("cuda", 0), now_ms=7000.0)
    host = Host(device, itertools.chain(pauses_ns, itertools.repeat(1_000_000)))
    first = Event()
    first.record(device.stream())
    host.elapse(work_ns)
    return device, host, EventClock.calibrate(first, device.stream(), new_event=new_event, host_ns=host.read)


def test_a_marker_in_the_middle_gives_the_exact_time():
    _, _, clock = calibrated([10_000, 10_000, 0] * 16)
    assert clock.first_ns == pytest.approx(0, abs=1)
    assert clock.error_ns == 10_000


@pytest.mark.parametrize("pauses_ns", [(30_000, 0, 0), (0, 30_000, 0)])
def test_at_the_edges_the_bound_is_reached_and_holds(pauses_ns):
    _, _, clock = calibrated(pauses_ns * 16)
    assert abs(clock.first_ns) == pytest.approx(15_000, abs=1)
    assert clock.error_ns == 15_000


def test_the_narrowest_try_counts():
    _, _, clock = calibrated([90_000, 10_000, 0, 4_000, 2_000, 0, 50_000, 50_000, 0])
    assert clock.error_ns == 3_000
    assert abs(clock.first_ns) <= 3_000


def test_other_events_are_placed_by_the_device_s_own_clock():
    device, host, clock = calibrated([10_000, 10_000, 0] * 16)
    host.elapse(3_000_000)
    event = Event()
    event.record(device.stream())
    assert clock.host_ns(event) == pytest.approx(host.now_ns, abs=1)
