"""The emulated engine against the simulated one: U-Net as in the published benchmarks, on the same profile.

Times differ by a launch or two. Memory differs a little more: in the simulation a task makes all its requests when it
is issued, while here gradients of other tasks arrive amid them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench.components import Components
from gpipe_bench.emulator import emulate
from gpipe_bench.emulator.shapes import price_by
from gpipe_bench.machine.profile import Profile, load_profile
from gpipe_bench.models.table import parse_arguments
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from gpipe_bench.simulator.api import simulate
from gpipe_bench.simulator.published.settings import PublishedSetting, published_settings
from gpipe_bench.step.request import Model
from tests.cover import EVERY_CASE

SPEED = {row.experiment: row for row in published_settings() if row.table == "unet-speed" and row.chunks > 1}


def both(row: PublishedSetting):
    """Emulated and simulated."""
    options = {
        "balance": list(row.layers),
        "batch_size": row.batch_size,
        "chunks": row.chunks,
        "checkpoint": row.checkpoint,
        "optimizer": row.optimizer,
        "profile": "p40",
    }
    model = Model(row.model, parse_arguments(row.model, row.model_args))
    return emulate(model, **options), simulate(model, **options)


@pytest.mark.parametrize("experiment", SPEED)
def test_times_and_memory_of_the_published_pipelines(experiment):
    emulated, simulated = both(SPEED[experiment])
    assert emulated.step_time_ms == pytest.approx(simulated.step_time_ms, rel=0.01)
    assert emulated.peak_reserved_gib == pytest.approx(simulated.peak_reserved_gib, rel=0.03)
    for one, other in zip(emulated.devices, simulated.devices, strict=True):
        assert one.peak_reserved_gib == pytest.approx(other.peak_reserved_gib, rel=0.1)


def test_memory_of_cells_in_which_gradients_are_summed_up():
    """Each cell of AmoebaNet-D has dozens of sums, which autograd makes in place."""
    model = Model("amoebanet-d", {"L": 18, "D": 256})
    options = {"balance": [3, 4, 5, 12], "batch_size": 160, "checkpoint": "always", "profile": "p40"}
    emulated, simulated = emulate(model, **options), simulate(model, **options)
    assert emulated.peak_allocated_gib == pytest.approx(simulated.peak_allocated_gib, rel=0.001)
    assert emulated.peak_reserved_gib == pytest.approx(simulated.peak_reserved_gib, rel=0.03)


@pytest.mark.parametrize("schedule", [None, "1f1b"])
@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.usefixtures("p40_again")
def test_memory_of_a_loss_that_reads_its_output_in_slices(slices, schedule):
    """The gradient of each slice is as large as the output, and all but the first are added in place."""

    def loss(output, target):
        return sum(nn.functional.cross_entropy(output[:, k], target[:, k]) for k in range(slices))

    samples, target = torch.zeros(64, 4, 8), torch.zeros(64, 4, dtype=torch.long)
    options = {"balance": [1, 1], "batch_size": 64, "chunks": 4, "profile": "h100", "checkpoint": "never"}
    options |= {"sample": samples[:1], "loss": loss, "target": target, "schedule": schedule}
    peaks = []
    for run in (emulate, simulate):
        layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 65_536))
        peaks.append(run(layers, **options).devices[-1].peak_allocated_gib)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.005)


@pytest.mark.parametrize("name", SCHEDULES)
def test_times_and_memory_of_schedules(name):
    """A cell keeps of its graph and its gradients what the simulation says, recomputed or not."""
    balance = [17, 17, 38, 38, 35, 35, 30, 31] if name in TWO_PER_DEVICE else [34, 76, 70, 61]
    options = {"balance": balance, "batch_size": 128, "chunks": 8, "schedule": name, "profile": "p40"}
    model = Model("unet", {"B": 5, "C": 64})
    emulated, simulated = emulate(model, **options), simulate(model, **options)
    assert emulated.status == simulated.status
    if simulated.status == "ok":
        assert emulated.step_time_ms == pytest.approx(simulated.step_time_ms, rel=0.01)
        assert emulated.peak_allocated_gib == pytest.approx(simulated.peak_allocated_gib, rel=0.01)
        assert emulated.peak_reserved_gib == pytest.approx(simulated.peak_reserved_gib, rel=0.03)


@pytest.mark.parametrize("devices", [[0, 0, 0, 0], [0, 0, 1, 1]])
@pytest.mark.parametrize("label", ["baseline", "dep-x-x", "dep-str-ptl"])
def test_partitions_that_share_a_device_run_backward_in_one_order(label, devices):
    """The worker of a device numbers what the last micro-batch's tasks have inside, so these come first."""
    options = {"balance": [34, 76, 70, 61], "batch_size": 32, "chunks": 8, "profile": "p40", "devices": devices}
    options |= {"components": Components.from_label(label), "transfer": "host"}
    model = Model("unet", {"B": 5, "C": 64})
    emulated, simulated = emulate(model, **options), simulate(model, **options)
    first, second = (backward_order(step.events) for step in (emulated, simulated))
    assert first[:4] == second[:4]
    assert emulated.peak_allocated_gib == pytest.approx(simulated.peak_allocated_gib, rel=0.015)


def backward_order(events):
    """Micro-batch and partition of backward passes by their starts."""
    passes = sorted((event for event in events if event.kind == "backward"), key=lambda event: event.start_us)
    return [(event.microbatch, event.partition) for event in passes]


@pytest.fixture
def p40_again():
    """The other tests of this process take kernels to run on a P40."""
    yield
    price_by(load_profile("p40"))


@pytest.mark.usefixtures("p40_again")
@pytest.mark.parametrize("optimizer", [None, "sgd", "adam"])
@pytest.mark.parametrize(("schedule", "chunks"), [(None, 1), (None, 4), ("gpipe", 1), ("1f1b", 4)])
def test_a_host_that_bounds_both_takes_its_time_for_parameters(schedule, chunks, optimizer):
    """The loss of the emulated step and its gradient are some launches more, for each micro-batch of a schedule."""
    with torch.device("meta"):
        layers, sample = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40))), torch.empty(1, 64)
    options = {"balance": [40], "batch_size": 8, "chunks": chunks, "sample": sample, "optimizer": optimizer}
    options |= {"checkpoint": "never", "schedule": schedule, "profile": "h100"}
    emulated, simulated = emulate(layers, **options), simulate(layers, **options)
    launch_ms = load_profile("h100").host_us / 1000
    more = emulated.step_time_ms - simulated.step_time_ms
    assert more == pytest.approx(launch_ms * (2 if schedule is None else 6 + 4 * (chunks - 1)), abs=0.01)
    assert emulated.host_fraction == pytest.approx(1, abs=0.001)
    assert simulated.host_fraction == pytest.approx(1, abs=0.001)


@pytest.mark.usefixtures("p40_again")
def test_both_take_the_constants_of_kinds_of_kernels():
    """The simulator traces layers apart, with dense gradients of what leaves; autograd hands over parts of tensors."""
    options = {"balance": [14, 15], "batch_size": 64, "chunks": 2, "schedule": "gpipe", "profile": "h100"}
    model = Model("unet", {"B": 1, "C": 64, "depth": 2, "size": 192})
    emulated, simulated = emulate(model, **options), simulate(model, **options)
    assert emulated.step_time_ms == pytest.approx(simulated.step_time_ms, rel=0.03)


@pytest.mark.usefixtures("p40_again")
@pytest.mark.parametrize("name", [None, *(SCHEDULES if EVERY_CASE else ("1f1b", "zb_h2", "v_half"))])
def test_steps_that_overlap_and_steps_that_end_on_all_devices(name):
    """A step that ends on all devices takes longer with ``zb_h2``: its devices do not end together."""
    model = Model("vit", {"L": 9, "D": 1280, "heads": 16})
    balance = [2, 3] * 4 if name in TWO_PER_DEVICE else [5] * 4
    options = {"balance": balance, "batch_size": 64, "chunks": 8, "checkpoint": "never", "schedule": name}
    times_ms = []
    for overlap in (True, False):
        given = {**options, "profile": "h100", "steps_overlap": overlap}
        emulated, simulated = emulate(model, **given, steps=3), simulate(model, **given)
        times_ms += [step.step_time_ms for step in emulated.each]
        assert times_ms[-2:] == pytest.approx([simulated.step_time_ms] * 2, rel=0.01)
        assert emulated.row().steps_overlap is simulated.row().steps_overlap is overlap
    if name == "zb_h2":
        assert max(times_ms[:2]) < 0.95 * min(times_ms[2:])


def linear(*, trained=True):
    return nn.Linear(16, 16).requires_grad_(trained)


def convolution(*, trained=True):
    return nn.Conv2d(8, 8, 3, padding=1).requires_grad_(trained)


def frozen():
    return linear(trained=False)


SIZES = 8.125, 32
WORKSPACES = [
    ([linear, linear], {}, [2, 2]),
    ([convolution, convolution], {}, [0, 0]),
    ([convolution, linear, convolution, convolution], {"balance": [2, 2]}, [2, 0]),
    ([frozen, convolution], {}, [1, 0]),
    ([frozen, linear], {"devices": [3, 3]}, [2]),
    ([linear] * 4, {"balance": [1] * 4, "schedule": "interleaved"}, [2, 2]),
    ([convolution, linear], {"schedule": "1f1b", "checkpoint": "always"}, [0, 2]),
]
SIZED = [(*one, mib) for number, one in enumerate(WORKSPACES) for mib in (SIZES if EVERY_CASE else [SIZES[number % 2]])]


@pytest.mark.usefixtures("p40_again")
@pytest.mark.parametrize(("layers", "options", "counts", "mib"), SIZED)
def test_a_device_holds_a_workspace_for_each_direction_that_multiplies_matrices(layers, options, counts, mib):
    with torch.device("meta"):
        made, sample = nn.Sequential(*(layer() for layer in layers)), torch.empty(1, 8, 16, 16)
    given = {"balance": [1, 1], "batch_size": 4, "chunks": 2, "checkpoint": "never", "sample": sample, **options}
    none, some = (Profile(**{**load_profile("h100").settings, "cublas_workspace_mib": size}) for size in (0, mib))
    reserved = []
    for run in (emulate, simulate):
        less, more = (run(made, **given, profile=one).devices for one in (none, some))
        held_mib = [1024 * (b.peak_allocated_gib - a.peak_allocated_gib) for a, b in zip(less, more, strict=True)]
        assert held_mib == pytest.approx([mib * count for count in counts], abs=0.02)
        reserved.append([use.peak_reserved_gib for use in more])
    assert reserved[0] == reserved[1]
