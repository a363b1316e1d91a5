"""PyTorch's own pipeline schedules on several ranks take what the simulator says of the same lists of actions."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest

from gpipe_bench.emulator.build import obstacle
from gpipe_bench.emulator.peaks import UNWRITTEN, held_at_peak
from gpipe_bench.emulator.torchrun import run_ranks
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.schedules import named_schedule, with_messages
from gpipe_bench.simulator import simulate

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = ROOT / "examples" / "emulated" / "torchrun_pipeline.py"
pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

# What the example takes unless told.
WIDTH, LAYERS, CHUNKS = 4096, 32, 8


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """For a schedule of PyTorch on some ranks, its run and the simulated step of its list, made once."""
    return cache(partial(_both, tmp_path_factory.mktemp("lists")))


def _both(folder, name, ranks=4):
    import torch
    from torch import nn

    # PyTorch lists the messages of schedules with several stages on a rank. Its GPipe has them beside its actions; its
    # 1F1B sends and receives at once, and waits for both.
    single = {"GPipe": with_messages(named_schedule("gpipe", CHUNKS, ranks, ranks)), "1F1B": "1f1b"}
    actions = str(folder / f"{name}.csv")
    options = [] if name in single else ["--list", actions]
    profile = load_profile("h100")
    run = run_ranks(PIPELINE, ["--schedule", name, *options], ranks=ranks, profile=profile, races=True, host_time=True)
    stages = ranks if name in single else 2 * ranks
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        sample = torch.empty(CHUNKS * WIDTH, WIDTH)
    step = simulate(
        model,
        balance=[LAYERS // stages] * stages,
        batch_size=CHUNKS * WIDTH,
        chunks=CHUNKS,
        checkpoint="never",
        schedule=single.get(name, actions),
        profile=profile,
        sample=sample,
        loss=nn.functional.mse_loss,
        target=sample,
    )
    return run, step


@pytest.mark.parametrize(
    "case",
    [
        ("GPipe",),
        ("1F1B",),
        ("Interleaved1F1B",),
        ("ZBVZeroBubble",),
        *map(slow, [("InterleavedZeroBubble",), ("LoopedBFS",), ("DualPipeV",), ("1F1B", 2)]),
    ],
)
def test_pytorchs_schedules_take_what_the_simulator_says_of_their_lists_and_have_no_race(both, case):
    run, step = both(*case)
    assert run.races == []
    assert len(run.step_times_ms) == 2
    assert run.step_times_ms[-1] == pytest.approx(step.step_time_ms, rel=0.002)


def test_the_memory_of_each_rank_is_explained_to_the_byte(both):
    run, step = both("1F1B")
    layer, number = 4 * WIDTH**2, 512
    for rank in range(4):
        last, inner = rank == 3, 0 < rank < 3
        in_flight = 4 - rank
        held = {one.source: one.nbytes for one in held_at_peak(run.records, run.replayed, rank)}
        # Weights; the batch, which the script makes on every rank; a buffer of each micro-batch, from each neighbour.
        expected = {"uniform_": 8 * layer, "normal_": 8 * layer, "recv": (16 if inner else 8) * layer}
        # The stage keeps its own outputs, too: of what is in flight and one more, the last of all micro-batches.
        expected["mm"] = (7 + 8 if last else 8 * in_flight + 1) * layer
        # Gradients of weights, and of two or three results.
        expected["mm in a backward pass"] = (8 + (2 if rank == 0 else 3)) * layer
        expected[UNWRITTEN] = 2 * 32 * 2**20
        if last:
            expected |= {"mse_loss_backward in a backward pass": layer, "mse_loss": 8 * number, "fill_": number}
        assert held == expected
        assert sum(held.values()) == run.replayed.memory[rank].peak_allocated
        # Weights, gradients, what layers keep, and three results; the batch on the first; workspaces.
        simulated = 8 + 8 + (8 - (rank == 0)) * in_flight + 3 + (8 if rank == 0 else 0) + 1
        assert step.memory[rank].peak_allocated == simulated * layer + (number if last else 0)
