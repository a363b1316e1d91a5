"""The recorder: events from several threads, on the host's clock and on devices' clocks."""

import threading

import pytest
import torch

from gpipe_bench.engine.observer import Task
from gpipe_bench.measure.timeline import Recorder
from tests.measure.simulated import Device, new_event, now_us

CPU = torch.device("cpu")


def task(kind="forward", i=0, j=0):
    return Task(kind, i, j, CPU, None, "compute")


def test_an_event_has_all_of_its_task():
    recorder = Recorder()
    recorder.finish(recorder.start(Task("copy", 3, 1, CPU, None, "copy")), 64)
    (event,) = recorder.events()
    assert (event.device, event.stream, event.kind) == ("cpu", "copy", "copy")
    assert (event.microbatch, event.partition, event.bytes) == (3, 1, 64)


def test_times_are_those_between_construction_and_now():
    recorder = Recorder()
    before = now_us(recorder)
    token = recorder.start(task())
    between = now_us(recorder)
    recorder.finish(token, 0)
    (event,) = recorder.events()
    assert 0 <= before <= event.start_us <= between <= event.end_us <= now_us(recorder)
    assert event.issue_us == event.start_us


def test_events_come_in_order_of_their_starts():
    recorder = Recorder()
    tokens = [recorder.start(task(i=i)) for i in range(3)]
    for token in reversed(tokens):
        recorder.finish(token, 0)
    assert [event.microbatch for event in recorder.events()] == [0, 1, 2]


def test_the_last_of_several_finishes_counts():
    recorder = Recorder()
    token = recorder.start(task("backward"))
    recorder.finish(token, 1)
    middle = now_us(recorder)
    recorder.finish(token, 2)
    (event,) = recorder.events()
    assert event.end_us >= middle
    assert event.bytes == 2


def test_a_task_that_was_never_finished_is_reported_by_name():
    recorder = Recorder()
    recorder.finish(recorder.start(task()), 0)
    recorder.start(task("backward", 2, 1))
    with pytest.raises(RuntimeError, match=r"got 1 unfinished: backward \(2,1\)"):
        recorder.events()


def test_events_can_be_read_twice_and_none_is_none():
    recorder = Recorder()
    assert recorder.events() == []
    recorder.finish(recorder.start(task()), 0)
    assert recorder.events() == recorder.events()


def test_threads_do_not_lose_events():
    recorder, together = Recorder(), threading.Barrier(4)

    def work(j):
        together.wait()
        for i in range(200):
            recorder.finish(recorder.start(task(i=i, j=j)), i)

    threads = [threading.Thread(target=work, args=(j,)) for j in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {(event.microbatch, event.partition): event.bytes for event in recorder.events()}
    assert found == {(i, j): i for i in range(200) for j in range(4)}


def test_a_task_may_be_finished_in_another_thread():
    recorder = Recorder()
    token = recorder.start(task())
    thread = threading.Thread(target=recorder.finish, args=(token, 8))
    thread.start()
    thread.join()
    assert recorder.events()[0].bytes == 8


class TestOnStreams:
    def test_nothing_waits_for_the_device_before_events_are_read(self):
        device = Device(torch.device("cuda", 0))
        recorder = Recorder(new_event=new_event)
        recorder.finish(recorder.start(device.task("forward", 0, 0)), 0)
        assert device.synchronized == 0
        recorder.events()
        assert device.synchronized > 0

    def test_duration_is_the_device_s_and_issue_the_host_s(self):
        device = Device(torch.device("cuda", 0))
        recorder = Recorder(new_event=new_event)
        token = recorder.start(device.task("forward", 0, 0))
        device.now_ms += 5
        recorder.finish(token, 0)
        issued = now_us(recorder)
        (event,) = recorder.events()
        assert event.end_us - event.start_us == pytest.approx(5000)
        assert 0 <= event.issue_us <= issued

    def test_the_last_finish_counts_there_too(self):
        device = Device(torch.device("cuda", 0))
        recorder = Recorder(new_event=new_event)
        token = recorder.start(device.task("backward", 0, 0))
        for _ in range(3):
            device.now_ms += 2
            recorder.finish(token, 0)
        (event,) = recorder.events()
        assert event.end_us - event.start_us == pytest.approx(6000)

    def test_devices_whose_clocks_differ_share_one_zero(self):
        devices = [Device(torch.device("cuda", 0), now_ms=17.0), Device(torch.device("cuda", 1), now_ms=9000.0)]
        recorder = Recorder(new_event=new_event)
        for j, device in enumerate(devices):
            token = recorder.start(device.task("forward", 0, j))
            device.now_ms += 1
            recorder.finish(token, 0)
        first, second = recorder.events()
        # Both clocks stand still but for the task, so both tasks ended when the markers were reached: now.
        bound_us = sum(recorder.clock_error_us.values()) + abs(now_us(recorder) - first.end_us)
        assert abs(first.end_us - second.end_us) <= bound_us
        assert first.end_us <= now_us(recorder)
        assert second.end_us <= now_us(recorder)
        assert set(recorder.clock_error_us) == {"cuda:0", "cuda:1"}

    def test_a_copy_through_the_host_is_timed_from_the_sender_s_stream_to_the_receiver_s(self):
        sender, receiver = Device(torch.device("cuda", 0)), Device(torch.device("cuda", 1))
        recorder = Recorder(new_event=new_event)
        before_us = now_us(recorder)
        token = recorder.start(Task("copy", 0, 1, sender.device, sender.stream(), "copy", receiver.stream()))
        receiver.now_ms += 3
        recorder.finish(token, 64)
        (event,) = recorder.events()
        assert (event.device, event.partition, event.bytes) == ("cuda:0", 1, 64)
        # Neither clock goes on after the copy: each event stands at its device's present, which is no earlier.
        assert before_us <= event.start_us <= event.end_us <= now_us(recorder)
        assert set(recorder.clock_error_us) == {"cuda:0", "cuda:1"}

    def test_a_copy_through_the_host_does_not_end_before_it_starts(self):
        sender, receiver = Device(torch.device("cuda", 0)), Device(torch.device("cuda", 1))
        recorder = Recorder(new_event=new_event)
        receiver.on_synchronize = lambda: setattr(receiver, "now_ms", receiver.now_ms + 1000)
        recorder.finish(
            recorder.start(Task("copy", 0, 1, sender.device, sender.stream(), "copy", receiver.stream())), 64
        )
        (event,) = recorder.events()
        assert event.end_us == event.start_us

    def test_an_unfinished_task_is_reported_there_too(self):
        recorder = Recorder(new_event=new_event)
        recorder.start(Device(torch.device("cuda", 0)).task("copy_grad", 1, 2, "copy"))
        with pytest.raises(RuntimeError, match=r"copy_grad \(1,2\)"):
            recorder.events()
