"""The race checker finds planted races, and nothing where there is none."""

from __future__ import annotations

import threading

import pytest
import torch

from gpipe_bench.emulator.library import devices
from gpipe_bench.emulator.races import find_races
from gpipe_bench.emulator.recording import recording
from gpipe_bench.machine.trace import Record

FIRST, SECOND = devices(2)


def found(program, *arguments):
    """Kinds of the races of a program, in order."""
    with recording() as trace:
        program(*arguments)
    return [race.kind for race in find_races(trace.records)]


@pytest.fixture
def side():
    """A stream of the first device besides its default one."""
    return torch.Stream(FIRST)


@pytest.fixture
def main():
    return torch.accelerator.current_stream(FIRST)


@pytest.fixture
def x():
    return torch.ones(8, device=FIRST)


def test_one_stream_never_races(x):
    def program():
        y = x * 2
        y.add_(1)
        del y
        torch.ones(8, device=FIRST).sum()

    assert found(program) == []


@pytest.mark.parametrize(("waits", "races"), [(True, []), (False, ["read"])])
def test_reading_what_another_stream_writes(side, main, x, waits, races):
    def program():
        x.mul_(2)
        if waits:
            side.wait_stream(main)
        with side:
            x.sum()

    assert found(program) == races


@pytest.mark.parametrize(("waits", "races"), [(True, []), (False, ["write"])])
def test_writing_what_another_stream_reads(side, main, x, waits, races):
    def program():
        with side:
            x.sum()
        if waits:
            main.wait_stream(side)
        x.mul_(2)

    assert found(program) == races


@pytest.mark.parametrize(("waits", "races"), [(True, []), (False, ["write"])])
def test_writing_what_another_stream_writes(side, main, x, waits, races):
    def program():
        with side:
            x.add_(1)
        if waits:
            main.wait_stream(side)
        x.mul_(2)

    assert found(program) == races


@pytest.mark.parametrize(("end", "races"), [(4, []), (5, ["read"])])
def test_only_bytes_that_both_use_race(side, x, end, races):
    def program():
        x[:end].mul_(2)
        with side:
            x[4:].sum()

    assert found(program) == races


def test_a_write_to_a_part_keeps_the_write_to_the_rest(side, main, x):
    def program():
        x.mul_(2)
        side.wait_stream(main)
        x[:4].mul_(2)
        with side:
            x[4:].sum()
            x[:4].sum()

    assert found(program) == ["read"]


def test_two_readers_do_not_race(side, x):
    def program():
        x.sum()
        with side:
            x.sum()

    assert found(program) == []


def test_a_wait_covers_what_came_before_it_only(side, main, x):
    def program():
        side.wait_stream(main)
        x.mul_(2)
        with side:
            x.sum()

    assert found(program) == ["read"]


def test_an_event_passes_on_what_its_stream_waited_for(side, main, x):
    third = torch.Stream(SECOND)

    def program():
        x.mul_(2)
        third.wait_stream(main)
        side.wait_stream(third)
        with side:
            x.sum()

    assert found(program) == []


@pytest.mark.parametrize("how", ["stream", "device", "event", "number"])
def test_the_host_orders_what_it_waits_for(side, main, x, how):
    def program():
        x.mul_(2)
        event = main.record_event()
        if how == "stream":
            main.synchronize()
        elif how == "device":
            torch.accelerator.synchronize(FIRST)
        elif how == "event":
            event.synchronize()
        else:
            torch.ones(1, device=FIRST).item()
        with side:
            x.sum()

    assert found(program) == []


def test_waiting_for_another_device_orders_nothing(side, x):
    def program():
        x.mul_(2)
        torch.accelerator.synchronize(SECOND)
        with side:
            x.sum()

    assert found(program) == ["read"]


@pytest.mark.parametrize(("records", "races"), [(True, []), (False, ["free"])])
def test_freeing_what_another_stream_uses(side, main, records, races):
    def program():
        y = torch.ones(8, device=FIRST)
        side.wait_stream(main)
        with side:
            y.sum()
        if records:
            y.record_stream(side)
        del y
        torch.ones(8, device=FIRST)

    assert found(program) == races


@pytest.mark.parametrize(("waits", "races"), [(True, []), (False, ["free"])])
def test_a_wait_before_the_next_allocation_is_early_enough(side, main, waits, races):
    def program():
        y = torch.ones(8, device=FIRST)
        side.wait_stream(main)
        with side:
            y.sum()
        del y
        if waits:
            main.wait_stream(side)
        torch.ones(8, device=FIRST)

    assert found(program) == races


def test_freeing_is_safe_once_the_own_stream_has_waited(side, main):
    def program():
        y = torch.ones(8, device=FIRST)
        side.wait_stream(main)
        with side:
            y.sum()
        main.wait_stream(side)
        del y

    assert found(program) == []


def test_recording_another_stream_does_not_help(side, main):
    third = torch.Stream(FIRST)

    def program():
        y = torch.ones(8, device=FIRST)
        side.wait_stream(main)
        with side:
            y.sum()
        y.record_stream(third)
        del y
        torch.ones(8, device=FIRST)

    assert found(program) == ["free"]


def test_fresh_memory_may_still_be_in_use_on_its_own_stream(side):
    def program():
        y = torch.empty(8, device=FIRST)
        with side:
            y.fill_(1)
        y.record_stream(side)

    assert found(program) == ["write"]


def test_a_copy_on_side_streams_needs_waits_on_both_ends(x):
    sender, receiver = torch.Stream(FIRST), torch.Stream(SECOND)

    def program(before, after):
        x.mul_(2)
        if before:
            sender.wait_stream(torch.accelerator.current_stream(FIRST))
        with receiver, sender:
            y = x.to(SECOND)
        if after:
            torch.accelerator.current_stream(SECOND).wait_stream(receiver)
        y.record_stream(torch.accelerator.current_stream(SECOND))
        y.sum()

    assert found(program, True, True) == []
    assert found(program, False, True) == ["read"]
    assert found(program, True, False) == ["read"]


def test_pinned_memory_between_two_copies(x):
    host = torch.empty(8, pin_memory=True)
    receiver = torch.accelerator.current_stream(SECOND)

    def program(waits):
        host.copy_(x, non_blocking=True)
        if waits:
            receiver.wait_stream(torch.accelerator.current_stream(FIRST))
        host.to(SECOND, non_blocking=True)

    assert found(program, True) == []
    assert found(program, False) == ["read"]


def test_streams_of_other_threads_race_too(side, x):
    def program():
        def other():
            with side:
                x.sum()

        x.mul_(2)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    assert found(program) == ["read"]


def test_what_was_issued_before_the_recording_counts_as_done(side, x):
    x.mul_(2)

    def program():
        with side:
            x.sum()

    assert found(program) == []


def test_autograd_orders_a_plain_backward_pass_over_streams_and_devices(side):
    weight = torch.ones(8, device=FIRST, requires_grad=True)

    def program():
        side.wait_stream(torch.accelerator.current_stream(FIRST))
        with side:
            y = (weight * 2).to(SECOND)
        z = y * 3
        torch.accelerator.current_stream(FIRST).wait_stream(side)
        z.sum().backward()

    assert found(program) == []


def test_a_race_says_who_and_where():
    records = [
        Record("kernel", "mul", 0, 0, writes=(7,)),
        Record("kernel", "sum", 0, 3, thread=2, reads=(7,)),
    ]
    (race,) = find_races(records)
    assert str(race) == (
        "read of block 7: kernel sum on device 0 stream 3 thread 2 does not wait for "
        "kernel mul on device 0 stream 0 thread 0"
    )


@pytest.mark.parametrize(("waits", "races"), [(True, []), (False, ["transfer"])])
def test_a_copy_through_the_host_waits_for_its_receiver(main, x, waits, races):
    receiver = torch.accelerator.current_stream(SECOND)
    y = torch.ones(8, device=SECOND)
    third = torch.ones(8, device=devices(3)[2])
    staged = torch.empty(8, pin_memory=True)

    def program():
        y.add_(1)
        third.add_(1)
        if waits:
            main.wait_stream(receiver)
        staged.copy_(x, non_blocking=True)
        receiver.wait_stream(main)
        staged.to(SECOND, non_blocking=True)

    assert found(program) == races


def test_tensors_of_one_transfer_share_a_wait_for_the_receiver(main, x):
    receiver = torch.accelerator.current_stream(SECOND)
    staged = [torch.empty(8, pin_memory=True) for _ in range(2)]
    y = torch.ones(8, device=SECOND)
    third = torch.ones(8, device=devices(3)[2])

    def program():
        y.add_(1)
        third.add_(1)
        main.wait_stream(receiver)
        for host in staged:
            host.copy_(x, non_blocking=True)
            receiver.wait_stream(main)
            host.to(SECOND, non_blocking=True)

    assert found(program) == []
