"""Devices, streams, events, threads, generators: PyTorch's generic interfaces see several accelerators."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from gpipe_bench.emulator.library import devices, thread_index
from gpipe_bench.emulator.recording import recording
from gpipe_bench.machine.trace import HOST

FIRST, SECOND, THIRD = devices(3)


def test_eight_devices_are_the_accelerator():
    assert torch.accelerator.current_accelerator() == torch.device("virtual")
    assert torch.accelerator.device_count() == torch.virtual.device_count() == 8
    with pytest.raises(RuntimeError, match="device must be one of 0 to 7, got 8"):
        torch.empty(1, device="virtual:8")


def test_a_tensor_lives_on_its_device():
    x = torch.ones(2, 3, device=SECOND)
    assert x.device == SECOND
    assert x.is_virtual
    assert torch.equal((x.t() + 1).cpu(), torch.full((3, 2), 2.0))


def test_without_an_index_a_tensor_goes_to_the_current_device():
    torch.accelerator.set_device_index(5)
    assert torch.empty(1, device="virtual").device == torch.device("virtual", 5)


def test_kernels_refuse_to_mix_devices():
    x = torch.ones(2, device=FIRST)
    with pytest.raises(RuntimeError, match="at least two devices, virtual:0 and virtual:1"):
        x + torch.ones(2, device=SECOND)
    with pytest.raises(RuntimeError, match="at least two devices, virtual:0 and cpu"):
        x + torch.ones(2)
    assert (x + torch.tensor(2.0)).cpu().tolist() == [3.0, 3.0]
    assert x[torch.tensor([1])].cpu().tolist() == [1.0]


def test_device_and_stream_are_current_per_thread():
    stream = torch.Stream(THIRD)
    seen = []

    def other():
        seen.append((torch.accelerator.current_device_index(), torch.accelerator.current_stream(THIRD).stream_id))
        torch.accelerator.set_stream(stream)
        seen.append((torch.accelerator.current_device_index(), torch.accelerator.current_stream(THIRD).stream_id))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [(0, 0), (2, stream.stream_id)]
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_stream(THIRD).stream_id == 0


def test_more_than_32_streams_share():
    streams = [torch.Stream(FIRST) for _ in range(33)]
    assert len({stream.stream_id for stream in streams}) == 32
    assert streams[0] == streams[32] != streams[1]


def test_streams_of_high_priority_have_a_pool_of_their_own():
    ordinary, high = ({torch.Stream(FIRST, priority=priority).stream_id for _ in range(40)} for priority in (0, -1))
    assert len(ordinary) == len(high) == 32
    assert not ordinary & high


def test_work_goes_to_the_current_stream_of_its_device():
    x = torch.ones(2, device=SECOND)
    stream = torch.Stream(SECOND)
    with recording() as trace:
        x + 1
        with stream:
            x * 2
    (add, mul) = trace.of("kernel")
    assert (add.name, add.queue, mul.name, mul.queue) == ("add", (1, 0), "mul", (1, stream.stream_id))
    assert add.thread == thread_index()
    assert trace.of("alloc")[1].stream == stream.stream_id


def test_wait_stream_is_an_event():
    one, other = torch.Stream(FIRST), torch.Stream(SECOND)
    with recording() as trace:
        one.wait_stream(other)
    (record, wait) = trace.records
    assert (record.kind, record.queue, wait.kind, wait.queue) == (
        "record",
        (1, other.stream_id),
        "wait",
        (0, one.stream_id),
    )
    assert record.version == wait.version


def test_waiting_for_an_event_means_its_last_recording():
    stream = torch.Stream(FIRST)
    event = torch.Event("virtual")
    with recording() as trace:
        event.record(stream)
        event.record(stream)
        torch.accelerator.current_stream(SECOND).wait_event(event)
    assert trace.records[2].version == trace.records[1].version != trace.records[0].version


def test_synchronising_is_on_record():
    stream = torch.Stream(SECOND)
    event = torch.Event("virtual")
    with recording() as trace:
        event.record(stream)
        event.synchronize()
        stream.synchronize()
        torch.accelerator.synchronize(THIRD)
    assert [(record.kind, record.device) for record in trace.records[1:]] == [
        ("sync_event", HOST),
        ("sync_stream", 1),
        ("sync_device", 2),
    ]
    assert event.query()
    assert stream.query()


def test_a_copy_between_devices_has_a_barrier_both_ways():
    x = torch.arange(3.0, device=FIRST)
    sender, receiver = torch.Stream(FIRST), torch.Stream(SECOND)
    torch.accelerator.set_stream(receiver)
    torch.accelerator.set_stream(sender)
    with recording() as trace:
        y = x.to(SECOND, non_blocking=True)
    assert y.cpu().tolist() == [0.0, 1.0, 2.0]
    here, there = (0, sender.stream_id), (1, receiver.stream_id)
    assert [(record.kind, record.queue) for record in trace.records] == [
        ("alloc", there),
        ("record", there),
        ("wait", here),
        ("copy", here),
        ("record", here),
        ("wait", there),
    ]
    copy = trace.of("copy")[0]
    assert (copy.name, copy.peer, copy.nbytes) == ("device_to_device", 1, 12)


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "waits"),
    [
        (False, False, (True, True)),
        (False, True, (False, True)),
        (True, False, (True, True)),
        (True, True, (False,) * 2),
    ],
)
def test_who_waits_for_a_copy_with_the_host(pinned, non_blocking, waits):
    there = torch.ones(4, pin_memory=pinned)
    back = torch.empty(4, pin_memory=pinned)
    assert there.is_pinned() == pinned
    with recording() as trace:
        x = there.to(FIRST, non_blocking=non_blocking)
        marks = len(trace.records)
        back.copy_(x, non_blocking=non_blocking)
    found = tuple(any(record.kind == "sync_stream" for record in part)
                  for part in (trace.records[:marks], trace.records[marks:]))  # fmt: skip
    assert found == waits
    assert back.tolist() == [1.0] * 4


def test_the_host_waits_for_a_number_and_for_a_size():
    x = torch.arange(3.0, device=FIRST)
    with recording() as trace:
        assert x.sum().item() == 3.0
        assert x.nonzero().shape == (2, 1)
    assert [record.name for record in trace.records if record.kind in ("kernel", "sync_stream")] == [
        "sum",
        "_local_scalar_dense",
        "",
        "nonzero",
        "",
    ]


def test_views_share_memory_and_are_no_kernels():
    x = torch.zeros(2, 3, device=FIRST)
    with recording() as trace:
        view = x.t()[1:].unsqueeze(0)
        view.add_(1)
    assert [record.name for record in trace.records] == ["add_"]
    assert x.cpu().tolist() == [[0, 1, 1], [0, 1, 1]]
    assert view._base is x


def test_autograd_runs_a_thread_per_device():
    layers = [nn.Linear(3, 3).to(device) for device in devices(4)]

    def forward(x):
        for layer, device in zip(layers, devices(4), strict=True):
            x = layer(x.to(device))
        return x.sum()

    loss = forward(torch.ones(2, 3))
    with recording() as trace:
        loss.backward()
    threads = {}
    for record in trace.of("kernel"):
        threads.setdefault(record.device, set()).add(record.thread)
    # The gradient of the loss itself is made by the calling thread.
    threads[3].discard(thread_index())
    assert all(len(found) == 1 for found in threads.values())
    assert len(set.union(*threads.values()) | {thread_index()}) == 5


def test_generators_belong_to_devices():
    torch.manual_seed(5)
    numbers = [torch.rand(3, device=device).cpu() for device in devices(2)]
    assert torch.equal(*numbers)
    state = torch.virtual.get_rng_state(FIRST)
    one = torch.rand(3, device=FIRST).cpu()
    torch.virtual.set_rng_state(state, FIRST)
    assert torch.equal(one, torch.rand(3, device=FIRST).cpu())
    generator = torch.Generator(FIRST).manual_seed(5)
    assert generator.device == FIRST
    assert torch.equal(numbers[0], torch.rand(3, device=FIRST, generator=generator).cpu())


def test_devices_draw_without_disturbing_each_other_or_the_cpu():
    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.virtual.get_rng_state(SECOND)
    nn.functional.dropout(torch.ones(100, device=FIRST)).sum()
    torch.randn(3, device=FIRST).bernoulli_(0.5)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], torch.virtual.get_rng_state(SECOND))


def test_a_dropout_mask_comes_back_with_the_state():
    x = torch.ones(100, device=FIRST)
    state = torch.virtual.get_rng_state(FIRST)
    masks = []
    for _ in range(2):
        torch.virtual.set_rng_state(state, FIRST)
        masks.append(nn.functional.dropout(x).cpu())
    assert torch.equal(*masks)
    assert set(masks[0].tolist()) == {0.0, 2.0}
