"""Every wait and every record_stream of the engine is needed: without it the race checker reports something."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import product

import pytest
import torch

from gpipe_bench import Components
from gpipe_bench.emulator.races import find_races
from gpipe_bench.emulator.recording import recording
from tests.cover import cover
from tests.emulator.bed.mutants import mutants
from tests.emulator.inside.pipelines import WAYS, WIDTH, BoomError, Case, batch, mean_score, score, targets

ON, NO_COPY_STREAMS = Components(), Components(copy_streams=False)
LARGE = 2 + 2**16 // (8 * WIDTH)
WAYS_TO_TRAVEL = (((0, 1, 2), "direct"), ((0, 1, 2), "host"), ((0, 0, 0), "host"))
# What a mutant may break: transfers between devices and within one, skips both ways, with and without copy streams.
CASES = [
    Case(devices, 3, components, checkpoint, "nested", transfer)
    for devices in ((0, 1, 2), (0, 0, 0))
    for components in (ON, Components(portals=False), NO_COPY_STREAMS)
    for checkpoint in ("always", "never")
    for transfer in ("direct", "host")
]
CHOICES = ((ON, "always"), (Components(portals=False), "never"), (NO_COPY_STREAMS, "except_last"))
CASES += [
    Case(devices, 3, components, checkpoint, "nested", transfer, schedule, through)
    for (schedule, through), (devices, transfer), (components, checkpoint) in cover(
        product(WAYS[1:], WAYS_TO_TRAVEL, CHOICES)
    )
]
# A gradient is copied to the other end of a skip, while the neighbour on the same device goes on with it. With a
# schedule the runtime hands it over to the neighbour, small or large.
NEIGHBOURS = Case((0, 1, 1), 2, ON, "never", "nested", "direct")
CASES += [NEIGHBOURS, *(replace(NEIGHBOURS, schedule="gpipe", size=size) for size in (2, LARGE))]
MUTANTS = mutants()


def fail(*_):
    raise BoomError


def loss_of(pipe, case, x):
    """The loss of a batch that nobody else holds; ``step`` computes the gradients, too."""
    leaf = (x * 1).requires_grad_()
    return pipe.step(leaf, targets(pipe, len(x)) * 1, mean_score) if case.through == "step" else score(pipe(leaf))


def races(case):
    """Races of two training steps as users write them, of two batches in evaluation, and of one that fails."""
    pipe = case.pipe()
    x = batch(case.rows, pipe.devices[0])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with recording() as trace:
        for _ in range(2):
            loss = loss_of(pipe, case, x)
            for parameter in pipe.parameters():
                if parameter.grad is not None:
                    parameter.grad.norm()
            if case.through == "backward":
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            if case.through == "step":
                optimizer.zero_grad()
            loss * 1
        with torch.no_grad():
            for _ in range(2):
                pipe(x * 1)
        pipe[-1].register_forward_pre_hook(fail)
        with pytest.raises(BoomError):
            loss_of(pipe, case, x)
        gc.collect()  # the exception's frames hold the batch
        x * 1
    return find_races(trace.records)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_engine_itself_has_no_race(case):
    assert races(case) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_reported(mutant):
    # First the cases that show what few others show.
    def common(case):
        return case.devices != NEIGHBOURS.devices, (case.devices, case.transfer) != ((0, 0, 0), "host")

    with mutant.applied():
        assert any(races(case) for case in sorted(CASES, key=common))


def test_a_mutant_ends_with_its_block():
    with MUTANTS[0].applied():
        pass
    assert races(CASES[0]) == []


def test_mutants_are_all_waits_and_records_of_the_engine():
    functions = {f"{mutant.module.rpartition('.')[2]}.{mutant.function}" for mutant in MUTANTS}
    assert functions >= {
        "transfer.wait_stream",
        "transfer.record_stream",
        "copy.Wait.forward",
        "checkpoint.Guard.backward",
        "transfer._move_one",
        "transfer._move",
        "transfer._through_host",
        "transfer.move_back",
        "executor.PaperExecutor.forward",
        "executor.RuntimeExecutor.forward",
        "executor.RuntimeExecutor.step",
        "pipeline.Batch.context",
        "pipeline.Batch.order_streams",
        "executor.BackwardPass.take",
        "executor.BackwardPass.run",
        "executor.after",
        "runtime.Runtime._forward",
        "runtime.Runtime._backward",
    }
