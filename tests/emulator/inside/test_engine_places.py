"""Each task runs on its own device, in that device's thread, on the right stream."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from gpipe_bench import Components
from gpipe_bench.emulator.library import thread_index
from gpipe_bench.emulator.races import find_races
from gpipe_bench.emulator.recording import recording
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from tests.emulator.inside.pipelines import (
    BACKWARD_MS,
    FORWARD_MS,
    WAYS,
    Case,
    Watch,
    batch,
    mean_score,
    model,
    score,
    targets,
    working_pipe,
    working_step,
)

ON = Components()
# Each way to run a backward pass on partitions of equal numbers of devices.
PLAIN_WAYS = [(None, "backward"), ("gpipe", "backward"), ("gpipe", "step"), ("1f1b", "step"), ("zb_h1", "step")]


def watched(case):
    """What an observer sees of a step, and its trace."""
    pipe, watch = case.pipe(), Watch()
    x = batch(case.rows, pipe.devices[0]).requires_grad_()
    with pipe.observe(watch), recording() as trace:
        if case.through == "step":
            pipe.step(x, targets(pipe, case.rows), mean_score)
        else:
            score(pipe(x)).backward()
    return watch.seen, trace


def hops_of(trace):
    """Copies between devices."""
    return [record for record in trace.of("copy") if record.name == "device_to_device"]


def threads_of(records):
    """Device -> threads."""
    found = defaultdict(set)
    for record in records:
        found[record.device].add(record.thread)
    return found


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("components", [ON, Components(fork_join=False), Components(copy_streams=False)], ids=str)
def test_forward_and_backward_have_a_thread_per_device(components, checkpoint):
    pipe = working_pipe(4, 3, checkpoint=checkpoint, components=components)
    trace = working_step(pipe)
    # Recomputations have forward kernels, in the threads of backward passes.
    forward = threads_of([record for record in trace.records if record.duration == FORWARD_MS][: 4 * 3])
    backward = threads_of(record for record in trace.records if record.duration == BACKWARD_MS)
    later = threads_of([record for record in trace.records if record.duration == FORWARD_MS][4 * 3 :])
    assert [len(forward[j]) for j in range(4)] == [1] * 4
    assert [len(backward[j]) for j in range(4)] == [1] * 4
    assert len(set.union(*forward.values(), *backward.values(), {thread_index()})) == 9
    assert later == ({} if checkpoint == "never" else backward)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_runtime_has_a_thread_per_device_beside_that_of_autograd(schedule, checkpoint):
    trace = working_step(working_pipe(4, 3, schedule=schedule, checkpoint=checkpoint), "step")
    forward = threads_of(record for record in trace.records if record.duration == FORWARD_MS)
    backward = threads_of(record for record in trace.records if record.duration == BACKWARD_MS)
    assert [len(forward[j]) for j in range(4)] == [1] * 4
    assert [len(backward[j]) for j in range(4)] == [1] * 4
    assert len(set.union(*forward.values(), *backward.values(), {thread_index()})) == 9


def test_the_two_passes_of_a_batch_have_threads_of_their_own():
    trace = working_step(working_pipe(4, 3, schedule="gpipe", checkpoint="always"))
    computing = threads_of(record for record in trace.records if record.duration == FORWARD_MS)
    assert [len(computing[j]) for j in range(4)] == [2] * 4
    assert len(set.union(*computing.values(), {thread_index()})) == 9


@pytest.mark.parametrize(("schedule", "devices"), [("1f1b", (0, 1, 0, 1)), ("interleaved", (0, 1)), ("zb_v", (0, 1))])
def test_the_runtime_has_one_thread_for_all_partitions_of_a_device(schedule, devices):
    seen, _ = watched(Case(devices, 3, ON, "always", "nested", "direct", schedule, "step"))
    found = defaultdict(set)
    for task, thread in seen:
        # A copy is issued by the thread that has computed what is copied.
        found["copies" if task.lane == "copy" else task.device].add(thread)
    copies = found.pop("copies")
    assert [len(threads) for threads in found.values()] == [1, 1]
    assert copies == set.union(*found.values())


@pytest.mark.parametrize("options", [{"workers": "never"}, {"components": Components(clock_cycle=False)}], ids=str)
def test_the_calling_thread_issues_everything_of_the_runtime_if_asked_to(options):
    trace = working_step(working_pipe(4, 3, schedule="1f1b", checkpoint="always", **options), "step")
    forward = threads_of(record for record in trace.records if record.duration == FORWARD_MS)
    assert set.union(*forward.values()) == {thread_index()}


def test_one_thread_issues_everything_without_the_clock_cycle():
    trace = working_step(working_pipe(4, 3, checkpoint="never", components=Components(clock_cycle=False)))
    forward = threads_of(record for record in trace.records if record.duration == FORWARD_MS)
    assert set.union(*forward.values()) == {thread_index()}


def test_a_device_with_two_partitions_has_one_worker():
    pipe = Case((0, 1, 0, 1), 3, ON, "always", "none", "direct").pipe()
    watch = Watch()
    with pipe.observe(watch):
        pipe(batch(6, pipe.devices[0]))
    threads = defaultdict(set)
    for task, thread in watch.seen:
        if task.kind == "forward":
            threads[task.device].add(thread)
    assert [len(found) for found in threads.values()] == [1, 1]


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("copy_streams", [True, False])
@pytest.mark.parametrize(("schedule", "through"), PLAIN_WAYS)
def test_computation_on_the_compute_stream_and_copies_on_copy_streams(schedule, through, copy_streams, checkpoint):
    components = Components(copy_streams=copy_streams)
    pipe = working_pipe(3, 4, schedule=schedule, checkpoint=checkpoint, components=components)
    trace = working_step(pipe, through)
    assert {record.stream for record in trace.records if record.duration in (FORWARD_MS, BACKWARD_MS)} == {0}
    copies = trace.of("copy")
    assert sorted((record.device, record.peer) for record in copies) == sorted([(0, 1), (1, 2), (1, 0), (2, 1)] * 4)
    streams = {record.stream for record in copies}
    assert (0 not in streams) if copy_streams else streams == {0}


@pytest.mark.parametrize(("schedule", "through"), PLAIN_WAYS)
def test_a_copy_stream_per_device_and_microbatch_is_kept(schedule, through):
    pipe = working_pipe(3, 4, schedule=schedule)
    used = []
    for _ in range(3):
        copies = working_step(pipe, through).of("copy")
        # There and back, each copy is on its sender's stream for the micro-batch.
        used.append({record.queue for record in copies if record.peer > record.device})
        assert {record.queue for record in copies if record.device == 1} == {one for one in used[-1] if one[0] == 1}
    assert used[0] == used[1] == used[2]
    assert len(used[0]) == 2 * 4


@pytest.mark.parametrize("schedule", ["interleaved", "zb_v"])
def test_two_partitions_of_a_device_have_copy_streams_of_their_own(schedule):
    case = Case((0, 1), 3, ON, "never", "none", "direct", schedule, "step")
    copies = {record.queue for record in hops_of(watched(case)[1])}
    # Partitions 1 and 2 of a V share a device, and nothing is copied between them.
    assert len(copies) == 4 * 3


@pytest.mark.parametrize(("schedule", "through"), PLAIN_WAYS)
def test_the_callers_current_stream_is_the_compute_stream(schedule, through):
    pipe = working_pipe(2, 2, schedule=schedule)
    stream = torch.Stream(pipe.devices[1])
    current = torch.accelerator.current_stream(pipe.devices[1])
    stream.wait_stream(current)
    with stream:
        trace = working_step(pipe, through)
    work = {(record.device, record.stream) for record in trace.records if record.duration is not None}
    assert work == {(0, 0), (1, stream.stream_id)}
    assert find_races(trace.records) == []


@pytest.mark.parametrize(("schedule", "through"), WAYS)
def test_an_observer_is_told_the_truth(schedule, through):
    case = Case((0, 1, 2), 3, ON, "except_last", "nested", "direct", schedule, through)
    seen, trace = watched(case)
    copies = [(task.device.index, task.stream.stream_id) for task, _ in seen if task.lane == "copy"]
    assert sorted(copies) == sorted(record.queue for record in hops_of(trace))
    computing = [task for task, _ in seen if task.lane == "compute"]
    places = [device.index for device in case.pipe().devices]
    assert {(task.partition, task.device.index, task.stream.stream_id) for task in computing} == {
        (j, place, 0) for j, place in enumerate(places)
    }
    threads = defaultdict(set)
    for task, thread in seen:
        if task.kind in ("backward", "backward_inputs", "recompute"):
            threads[task.device.index].add(thread)
    assert [len(found) for found in threads.values()] == [1, 1, 1]


@pytest.mark.parametrize("portals", [True, False])
@pytest.mark.parametrize(("schedule", "through"), PLAIN_WAYS)
def test_skips_take_the_way_that_the_components_say(schedule, through, portals):
    # [3, 3, 2] blocks; both skips start in the first partition and end in the last.
    case = Case((0, 1, 2), 2, Components(portals=portals), "always", "nested", "direct", schedule, through)
    _, trace = watched(case)
    hops = defaultdict(int)
    for record in hops_of(trace):
        hops[record.device, record.peer] += 1
    assert hops == (
        {(0, 1): 2, (1, 2): 2, (0, 2): 4, (2, 1): 2, (1, 0): 2, (2, 0): 4}
        if portals
        else {(0, 1): 6, (1, 2): 6, (2, 1): 6, (1, 0): 6}
    )


def test_gradients_of_parameters_stay_on_their_device():
    pipe = Case((0, 1, 2, 3), 3, ON, "always", "mixed", "direct").pipe()
    x = batch(6, pipe.devices[0]).requires_grad_()
    output = pipe(x)
    score(output).backward()
    assert output.device == pipe.devices[-1]
    assert x.grad.device == pipe.devices[0]
    for partition, device in zip(pipe.partitions, pipe.devices, strict=True):
        assert {parameter.grad.device for parameter in partition.parameters()} == {device}


def test_current_device_and_streams_of_the_caller_stay():
    pipe = Case((0, 1, 2), 3, ON, "always", "mixed", "host").pipe()
    torch.accelerator.set_device_index(5)
    score(pipe(batch(6, pipe.devices[0]))).backward()
    assert torch.accelerator.current_device_index() == 5
    assert [torch.accelerator.current_stream(j).stream_id for j in range(3)] == [0, 0, 0]


def test_plain_model_is_moved_layer_by_layer():
    module = model("none")
    pipe = Case((4, 5), 2, ON, "always", "none", "direct").pipe(module)
    assert [next(layer.parameters()).device.index for layer in pipe] == [4] * 4 + [5] * 4


@pytest.mark.parametrize(("schedule", "through"), PLAIN_WAYS)
def test_pipelines_made_one_after_another_use_the_same_streams(schedule, through):
    case = Case((0, 0, 1), 3, ON, "always", "none", "host", schedule, through)
    used = [{(task.kind, task.partition, task.stream.stream_id) for task, _ in watched(case)[0]} for _ in range(20)]
    assert used == used[:1] * 20
