"""On accelerators: every schedule gives what the plain module gives, by layers that finish late."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gpipe_bench import GPipe
from gpipe_bench.schedules import SCHEDULES
from tests.engine.steps import ALL, DOUBLE, mean_loss, step, targets
from tests.engine.support import MODES, Outcome, Watch
from tests.gpu.support import LATE_BALANCE, assert_same_elsewhere, late_batch, late_model, occupy

pytestmark = pytest.mark.gpu

every_schedule = pytest.mark.parametrize("schedule", ALL)


@pytest.fixture(scope="module")
def expected() -> Outcome:
    """What the plain module gives on the CPU."""
    cpu = torch.device("cpu")
    return step(late_model(), late_batch(cpu), targets(7))


def late_targets(device: torch.device) -> Tensor:
    """Targets that their stream writes late, just before they are used."""
    values = targets(7).to(device)
    occupy(device)
    return values * 1


def pipeline(devices: Sequence[torch.device], schedule: str | None, **options: str) -> GPipe:
    """Four partitions, one for each device of the schedule, or two; the devices are used in turn."""
    places = [devices[k % len(devices)] for k in range(2 if schedule in DOUBLE else 4)]
    return GPipe(late_model(), LATE_BALANCE, devices=places, chunks=4, schedule=schedule, **options)


def assert_trains_as(expected: Outcome, pipe: GPipe) -> None:
    """Three steps without a synchronisation between them."""
    first, last = pipe.devices[0], pipe.devices[-1]
    found = [step(pipe, late_batch(first), late_targets(last), mean_loss) for _ in range(3)]
    for outcome in found:
        assert_same_elsewhere(outcome, expected)


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("checkpoint", MODES)
@every_schedule
def test_on_one_device(device, expected, schedule, checkpoint, workers, transfer):
    assert_trains_as(expected, pipeline([device], schedule, checkpoint=checkpoint, workers=workers, transfer=transfer))


@pytest.mark.parametrize("checkpoint", MODES)
@every_schedule
def test_on_accelerator_and_cpu(device, expected, schedule, checkpoint):
    assert_trains_as(expected, pipeline([device, torch.device("cpu")], schedule, checkpoint=checkpoint))


@pytest.mark.multigpu
@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("checkpoint", MODES)
@every_schedule
def test_on_two_devices(pair, expected, schedule, checkpoint, workers, transfer):
    assert_trains_as(expected, pipeline(pair, schedule, checkpoint=checkpoint, workers=workers, transfer=transfer))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_copies_through_the_host_every_device_of_the_schedule_computes_on_one_stream(device, schedule):
    pipe = pipeline([device], schedule, transfer="host")
    with pipe.observe(watch := Watch()):
        pipe.step(late_batch(device), late_targets(device), mean_loss)
    streams = [
        {seen.task.stream.stream_id for seen in watch.seen if seen.task.lane == "compute" and seen.task.partition == j}
        for j in range(4)
    ]
    assert [len(ids) for ids in streams] == [1] * 4
    assert len(set.union(*streams)) == (2 if schedule in DOUBLE else 4)
