"""What only an accelerator can show: its events, its allocator, its driver."""

import itertools

import pytest
import torch

from gpipe_bench import GPipe
from gpipe_bench.engine.observer import Task
from gpipe_bench.measure.clock import timed
from gpipe_bench.measure.environment import environment_facts
from gpipe_bench.measure.memory import peak_memory, reset_peak_memory
from gpipe_bench.measure.queued import device_seconds
from gpipe_bench.measure.timeline import Recorder
from gpipe_bench.measure.utilization import NvmlUtilization
from gpipe_bench.suite.running.device_profile import measure_profile
from tests.measure.simulated import now_us

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator, got none"),
]
MIB = 2**20


@pytest.fixture
def device():
    return torch.device("cuda", 0)


def pipeline(device):
    layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
    return GPipe(layers, [2, 2], devices=[device] * 2, chunks=4, transfer="host")


def test_events_on_a_stream_are_in_its_order_and_within_the_record(device):
    data = torch.randn(2048, 2048, device=device)
    stream = torch.accelerator.current_stream(device)
    torch.accelerator.synchronize(device)
    recorder = Recorder()
    for i in range(3):
        token = recorder.start(Task("forward", i, 0, device, stream, "compute"))
        data @ data
        recorder.finish(token, 0)
    torch.accelerator.synchronize(device)
    end = now_us(recorder)
    found = recorder.events()
    error = recorder.clock_error_us["cuda:0"]
    assert [event.microbatch for event in found] == [0, 1, 2]
    assert all(event.issue_us - error <= event.start_us < event.end_us <= end + error for event in found)
    assert all(one.end_us <= two.start_us + 1 for one, two in itertools.pairwise(found))


def test_a_pipeline_on_one_gpu_is_recorded_whole(device):
    pipe = pipeline(device)
    recorder = Recorder()
    with pipe.observe(recorder):
        pipe(torch.randn(16, 512, device=device)).sum().backward()
    found = recorder.events()
    tasks = {(event.kind, event.microbatch, event.partition) for event in found}
    assert {(kind, i, j) for kind in ("forward", "backward") for i in range(4) for j in range(2)} <= tasks
    assert {("copy", i, 1) for i in range(4)} | {("copy_grad", i, 1) for i in range(4)} <= tasks
    assert {("recompute", i, j) for i in range(3) for j in range(2)} <= tasks
    when = {(event.kind, event.microbatch, event.partition): event for event in found}
    for i in range(4):
        assert when["forward", i, 0].end_us <= when["forward", i, 1].start_us + 1
        assert when["backward", i, 1].start_us <= when["backward", i, 0].end_us


def test_peaks_are_those_of_the_allocator_since_the_reset(device):
    reset_peak_memory([device])
    before = peak_memory([device])[0]
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    del block
    after = peak_memory([device, device])
    assert len(after) == 1
    assert after[0].allocated_bytes - before.allocated_bytes == 64 * MIB
    assert after[0].reserved_bytes >= after[0].allocated_bytes
    reset_peak_memory([device])
    assert peak_memory([device])[0].allocated_bytes == before.allocated_bytes


def test_a_step_is_timed_until_the_device_has_run_it(device):
    data = torch.randn(4096, 4096, device=device)
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    stream = torch.accelerator.current_stream(device)

    def step():
        begin.record(stream)
        for _ in range(10):
            data @ data
        end.record(stream)

    (seconds,) = timed(step, [device], steps=1, warmup=1)
    assert seconds * 1e3 >= begin.elapsed_time(end)


def test_facts_name_the_gpu(device):
    facts = environment_facts([device])
    assert facts["device"] == f"cuda {torch.cuda.get_device_name(device)}"
    assert facts["cuda"] == torch.version.cuda
    assert facts["profile"].startswith(f"{torch.cuda.device_count()}x-")


def test_the_driver_s_utilisation_is_a_share(device):
    data = torch.randn(2048, 2048, device=device)
    with NvmlUtilization([device]) as sampler:
        timed(lambda: data @ data, [device], steps=50, warmup=0)
    share = sampler.utilization_fraction
    assert share is None or 0.0 <= share <= 1.0


def test_a_profile_is_measured(device):
    found = measure_profile(str(device), "mine")
    assert found.failures == {}
    origins = {name: constant.origin for name, constant in found.profile.kernels.items()}
    # Where memory is slow, a rate of elements may stay hidden behind it.
    told = {"launch_us", "lock", "start_us", "memory", "product_float32", "convolution_half", "avg_pool_backward"}
    assert {name for name in told if origins[name] != "measured"} == set()
    assert found.profile.links["host"].gb_per_s > 1


def test_work_is_timed_without_the_host_that_queues_it(device):
    pauses = []

    def run():
        pauses.append(sum(range(10_000)))
        data.add_(1.0)

    data = torch.zeros(1, device=device)
    slow, fast = (min(device_seconds(work, device, 3)) for work in (run, lambda: data.add_(1.0)))
    assert slow < fast + 50e-6


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")
def test_two_devices_share_one_zero():
    devices = [torch.device("cuda", index) for index in range(2)]
    recorder = Recorder()
    for j, device in enumerate(devices):
        data = torch.randn(1024, 1024, device=device)
        torch.accelerator.synchronize(device)
        token = recorder.start(Task("forward", 0, j, device, torch.accelerator.current_stream(device), "compute"))
        data @ data
        recorder.finish(token, 0)
        # The second task is issued once the first has run.
        torch.accelerator.synchronize(device)
    first, second = recorder.events()
    assert (first.partition, second.partition) == (0, 1)
    assert first.end_us <= second.start_us + sum(recorder.clock_error_us.values())
