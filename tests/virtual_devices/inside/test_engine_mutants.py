"""Every wait and every record_stream of the engine is needed: without it the race checker reports something."""

from __future__ import annotations

import gc

import pytest
import torch

from gpipe_bench import Components
from tests.virtual_devices.bed.mutants import mutants
from tests.virtual_devices.bed.races import find_races
from tests.virtual_devices.bed.trace import recording
from tests.virtual_devices.inside.pipelines import BoomError, Case, batch, score

# What a mutant may break: transfers between devices and within one, skips both ways, with and without copy streams.
CASES = [
    Case(devices, 3, components, checkpoint, "nested", transfer, backward)
    for backward in ("autograd", "scheduled")
    for devices in ((0, 1, 2), (0, 0, 0))
    for components in (Components(), Components(portals=False), Components(copy_streams=False))
    for checkpoint in ("always", "never")
    for transfer in ("direct", "host")
]
# A skip leaves a device on which two neighbours hand on their tensors without a copy.
CASES.append(Case((0, 1, 1, 1, 1, 0, 2, 7), 2, Components(), "never", "mixed", "direct"))
MUTANTS = mutants()


def fail(*_):
    raise BoomError


def races(case):
    """Races of two training steps as users write them, of two batches in evaluation, and of one that fails."""
    pipe = case.pipe()
    x = batch(case.rows, pipe.devices[0])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with recording() as trace:
        for _ in range(2):
            # The batch is made on the caller's stream and belongs to nobody else.
            loss = score(pipe((x * 1).requires_grad_()))
            for parameter in pipe.parameters():
                if parameter.grad is not None:
                    parameter.grad.norm()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for _ in range(2):
                pipe(x * 1)
        pipe[-1].register_forward_pre_hook(fail)
        with pytest.raises(BoomError):
            pipe(x * 1)
        gc.collect()  # the exception's frames hold the batch
        x * 1
    return find_races(trace.records)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_engine_itself_has_no_race(case):
    assert races(case) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_reported(mutant):
    # First those in which the statement is most likely to run.
    cases = sorted(CASES, key=lambda case: (case.backward == "scheduled") != ("scheduled" in mutant.module))
    with mutant.applied():
        assert any(races(case) for case in cases)


def test_a_mutant_ends_with_its_block():
    with MUTANTS[0].applied():
        pass
    assert races(CASES[0]) == []


def test_mutants_are_all_waits_and_records_of_the_engine():
    functions = {f"{mutant.module.rpartition('.')[2]}.{mutant.function}" for mutant in MUTANTS}
    assert functions >= {
        "streams.wait_stream",
        "streams.record_stream",
        "transfer.Wait.forward",
        "transfer._move_one",
        "transfer._move",
        "transfer._through_host",
        "pipeline.Pipeline._hand_over",
        "checkpoint.Guard.backward",
        "transfer.Copy.backward",
        "scheduled.BackwardPass._run_tasks",
        "scheduled.BackwardPass.take",
        "scheduled_lanes.ScheduledLanes.await_compute",
        "scheduled_lanes.ScheduledLanes.await_copy",
        "scheduled_lanes.ScheduledLanes.await_grads",
        "scheduled_lanes.ScheduledLanes.send_grads",
    }
