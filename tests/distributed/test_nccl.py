"""Which communicator a tensor goes over, and when; ``tests/schedules/test_messages.py`` proves the order on these.

That transfers wait for the streams of devices, and these for them, is tested in ``tests/emulator/inside``.
"""

from __future__ import annotations

from itertools import permutations

import torch

from gpipe_bench.distributed.nccl import DeviceGroup


class Backend:
    """Notes what is begun on it. NCCL has a communicator for every two ranks of a group."""

    def __init__(self, name, rank, notes):
        self.name, self.own, self.notes = name, rank, notes

    def rank(self):
        return self.own

    def size(self):
        return 3

    def note(self, what, tensors, rank, tag):
        self.notes.append((what, self.name, min(self.own, rank), max(self.own, rank)))
        return self

    def send(self, tensors, rank, tag):
        return self.note("send", tensors, rank, tag)

    def recv(self, tensors, rank, tag):
        return self.note("receive", tensors, rank, tag)

    def wait(self):
        self.notes.append("wait")


def group(rank):
    notes = []
    return notes, DeviceGroup(*(Backend(name, rank, notes) for name in ("host", "upwards", "downwards")))


ON_DEVICE, IN_HOST_MEMORY = [torch.empty(1, device="meta")], [torch.empty(1)]


def test_every_direction_between_two_ranks_has_a_communicator_of_its_own():
    used = {}
    for source, target in permutations(range(3), 2):
        notes, sender = group(source)
        sender.send(ON_DEVICE, target, 0)
        notes_there, receiver = group(target)
        receiver.recv(ON_DEVICE, source, 0).wait()
        assert notes[0][1:] == notes_there[0][1:]
        used[source, target] = notes[0][1:]
    assert len({*used.values()}) == len(used) == 6


def test_a_receive_on_the_device_is_begun_when_it_is_waited_for():
    notes, receiver = group(0)
    work = receiver.recv(ON_DEVICE, 1, 0)
    assert notes == []
    work.wait()
    assert notes == [("receive", "downwards", 0, 1), "wait"]


def test_what_is_in_host_memory_goes_over_the_group_of_the_host_at_once():
    notes, member = group(1)
    member.send(IN_HOST_MEMORY, 2, 0)
    member.recv(IN_HOST_MEMORY, 0, 0)
    assert notes == [("send", "host", 1, 2), ("receive", "host", 0, 1)]


def test_communicators_are_made_in_an_order_of_all_ranks(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    notes, member = group(1)
    member.connect({(2, 1), (0, 2), (1, 0), (0, 1)}, torch.device("meta"))
    assert [note for note in notes if note != "wait"] == [
        ("receive", "upwards", 0, 1),
        ("send", "downwards", 0, 1),
        ("receive", "downwards", 1, 2),
    ]
