"""Memory per device: what each component costs, what a step leaves behind, and what happens when it runs out."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe
from gpipe_bench.components import PUBLISHED
from gpipe_bench.emulator.handovers import seen
from gpipe_bench.emulator.library import capacity, devices
from gpipe_bench.emulator.recording import recording
from gpipe_bench.machine.replay import replay
from gpipe_bench.machine.trace import KINDS, Trace
from gpipe_bench.models.unet import unet
from gpipe_bench.schedules import SCHEDULES, in_flight, named_schedule
from tests.emulator.bed.rows import Bed
from tests.emulator.inside.pipelines import DOUBLE, WAYS, Case, batch, model, score, step

# The published ablation's layers and cuts (torchgpipe, benchmarks/unet-timeline), with fewer channels and pixels.
BALANCE, DEPTH, BLOCKS, CHANNELS, SIZE, CHUNKS = [34, 76, 70, 61], 5, 5, 2, 64, 8


def reserved(trace: Trace) -> list[int]:
    """What devices reserve whose host runs far ahead, in bytes: as if tensors were 16,384 times as large.

    The allocator's rounding and its least segments would hide what such small tensors take.
    """
    for row in trace.rows:
        row.bytes *= 16_384
        if KINDS[row.kind] == "kernel":
            row.duration_ns = 1_000_000
    return [device.peak_reserved for device in replay(trace, Bed(copy_ms=1.0)).memory]


@pytest.fixture(scope="module")
def ablation():
    """Label -> (bytes reserved per device, peak of bytes in use per device above what the parameters take)."""
    found = {}
    for label in PUBLISHED:
        torch.manual_seed(0)
        with seen():
            network = unet(DEPTH, BLOCKS, CHANNELS)
            places = devices(len(BALANCE))
            pipe = GPipe(network, BALANCE, devices=places, chunks=CHUNKS, components=Components.from_label(label))
            x = torch.rand(2 * CHUNKS, 3, SIZE, SIZE, device=places[0])
            held = [torch.accelerator.memory_allocated(device) for device in places]
            for device in places:
                torch.accelerator.reset_peak_memory_stats(device)
            with recording() as trace:
                output = pipe(x)
                nn.functional.binary_cross_entropy_with_logits(output, torch.ones_like(output)).backward()
        peaks = [
            torch.accelerator.max_memory_allocated(device) - before for device, before in zip(places, held, strict=True)
        ]
        found[label] = reserved(trace), peaks
    return found


def test_reserved_memory_comes_in_the_published_order(ablation):
    # 52.2 GiB without components; 19.1 with Fork and Join; 30.0 with copy streams, which have pools of their own; 23.5
    # with portals.
    total = {label: sum(devices) for label, (devices, _) in ablation.items()}
    assert total["baseline"] > total["dep-str-x"] > total["dep-str-ptl"] > total["dep-x-x"], total


def test_each_device_reserves_what_the_components_on_it_cost(ablation):
    by_label = {label: devices for label, (devices, _) in ablation.items()}
    baseline, ordered, streams, portals = (
        [by_label[label][device] for device in range(len(BALANCE))]
        for label in ("baseline", "dep-x-x", "dep-str-x", "dep-str-ptl")
    )
    last = len(BALANCE) - 1
    for device in range(len(BALANCE)):
        # Where no order is, threads race: what a device holds differs by a gradient or two from run to run.
        assert baseline[device] > (3 if device == last else 0.9) * ordered[device]
        assert streams[device] > 1.1 * ordered[device]  # pools of the copy streams
        between = 0 < device < last  # where skips pass through
        assert portals[device] < streams[device] if between else portals[device] == streams[device]


def test_the_last_device_pays_for_a_backward_pass_without_order(ablation):
    # Up to as many recomputed micro-batches as there are, instead of the last one and the one that comes next.
    peaks = {label: peaks for label, (_, peaks) in ablation.items()}
    assert peaks["baseline"][-1] > 3 * peaks["dep-x-x"][-1]


def test_portals_spare_the_devices_between(ablation):
    peaks = {label: peaks for label, (_, peaks) in ablation.items()}
    assert peaks["dep-str-ptl"][1] < peaks["dep-str-x"][1]
    assert peaks["dep-str-ptl"][2] < peaks["dep-str-x"][2] / 2


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize(("schedule", "through"), WAYS)
def test_a_step_leaves_nothing_behind(schedule, through, checkpoint):
    pipe = Case((0, 1, 2, 3), 4, Components(), checkpoint, "mixed", "direct", schedule).pipe()
    x = batch(8, pipe.devices[0])
    held = []
    for _ in range(3):
        step(pipe, x, through)
        pipe.zero_grad()
        gc.collect()
        held.append([torch.accelerator.memory_allocated(device) for device in pipe.devices])
    assert held[0] == held[1] == held[2]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize(("schedule", "through"), [(None, "backward"), ("gpipe", "backward"), ("1f1b", "step")])
def test_a_device_that_runs_out_of_memory_says_so_and_the_next_step_works(schedule, through, transfer, place):
    case = Case((0, 1, 2, 3), 4, Components(), "except_last", "nested", transfer, schedule, through)
    pipe = case.pipe()
    x = batch(8, pipe.devices[0])
    fits = step(pipe, x, through)
    pipe.zero_grad()
    gc.collect()
    device = pipe.devices[place]
    with (
        capacity(device, torch.accelerator.memory_allocated(device) + 200),
        pytest.raises(torch.OutOfMemoryError, match=f"device {place} out of memory"),
    ):
        step(pipe, x, through)
    again = step(pipe, x, through)
    torch.testing.assert_close(again.gradients, fits.gradients)
    assert again.races == []


@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_running_out_of_memory_in_the_backward_pass(schedule):
    pipe = Case((0, 1, 2), 4, Components(), "always", "nested", "direct", schedule).pipe()
    x = batch(8, pipe.devices[0])
    fits = step(pipe, x)
    pipe.zero_grad()
    loss = score(pipe(x))
    device = pipe.devices[1]
    with capacity(device, torch.accelerator.memory_allocated(device)), pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    torch.testing.assert_close(step(pipe, x).gradients, fits.gradients)


class Scaled(nn.Module):
    """Keeps its input and another tensor for the backward pass."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x.square() * self.weight


def peaks_of(schedule, m, nbytes=4000):
    """What a step takes on each device, in activations of one micro-batch, and how many the schedule has in flight."""
    places = devices(3)
    n = len(places) * (2 if schedule in DOUBLE else 1)
    # A copy stream may be late for as long as a step takes, and what it reads is kept until it has come.
    options = {"components": Components(copy_streams=False), "checkpoint": "never", "workers": "never"}
    layers = nn.Sequential(*(Scaled() for _ in range(n)))
    pipe = GPipe(layers, [1] * n, devices=places, chunks=m, schedule=schedule, **options)
    x = torch.ones(m, nbytes // 4, device=places[0])
    for _ in range(2):
        held = [torch.accelerator.memory_allocated(place) for place in places]
        for place in places:
            torch.accelerator.reset_peak_memory_stats(place)
        pipe.step(x, None, lambda output, _: output.mean())
    peaks = [
        (torch.accelerator.max_memory_allocated(place) - before) / nbytes
        for place, before in zip(places, held, strict=True)
    ]
    return peaks, in_flight(named_schedule(schedule, m, n, len(places)))


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in {"gpipe", "looped_bfs"}])
def test_memory_does_not_grow_with_the_number_of_microbatches(schedule):
    # Multiples of the number of devices, which interleaved schedules ask for.
    (some, in_flight_some), (many, in_flight_many) = peaks_of(schedule, 9), peaks_of(schedule, 18)
    assert in_flight_some == in_flight_many
    assert many == pytest.approx(some, abs=0.1)


def test_with_gpipe_it_does():
    (some, in_flight_some), (many, in_flight_many) = peaks_of("gpipe", 8), peaks_of("gpipe", 16)
    assert (in_flight_some, in_flight_many) == ((8, 8, 8), (16, 16, 16))
    # The input of the first partition is the batch.
    assert [round(more - less) for less, more in zip(some, many, strict=True)] == [8, 16, 16]


def test_the_plain_model_holds_more_than_a_checkpointed_pipeline():
    # Otherwise the checks above could pass without a single checkpoint.
    device = devices(1)[0]
    peaks = {}
    for checkpoint in ("always", "never"):
        pipe = Case((0,), 8, Components(), checkpoint, "none", "direct").pipe(model("none"))
        held = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        step(pipe, batch(800, device))
        peaks[checkpoint] = torch.accelerator.max_memory_allocated(device) - held
        del pipe
        gc.collect()
    assert peaks["always"] < peaks["never"] / 2
