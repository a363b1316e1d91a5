"""PyTorch's own pipeline schedules on several ranks take what the simulator says of the same lists of actions."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_bench.emulator.build import obstacle
from gpipe_bench.emulator.peaks import UNWRITTEN, held_at_peak
from gpipe_bench.emulator.torchrun import run_ranks
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.simulator import simulate

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = ROOT / "examples" / "emulated" / "torchrun_pipeline.py"
pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

# What the example takes unless told.
WIDTH, LAYERS, CHUNKS = 4096, 32, 8
ONE_STAGE = {"GPipe": "gpipe", "1F1B": "1f1b"}
H100 = load_profile("h100")
FREE = H100.model_copy(
    update={
        "links": {
            name: link.model_copy(update={"gb_per_s": 1e5, "latency_us": 0.0}) for name, link in H100.links.items()
        }
    }
)
"""Its links take no time."""


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def both(name, ranks, profile, folder):
    """The run of a schedule of PyTorch, and the simulated step of its list."""
    import torch
    from torch import nn

    actions = str(folder / "list.csv")
    options = [] if name in ONE_STAGE else ["--list", actions]
    run = run_ranks(PIPELINE, ["--schedule", name, *options], ranks=ranks, profile=profile, races=True, host_time=True)
    stages = ranks if name in ONE_STAGE else 2 * ranks
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        sample = torch.empty(CHUNKS * WIDTH, WIDTH)
    step = simulate(
        model,
        balance=[LAYERS // stages] * stages,
        batch_size=CHUNKS * WIDTH,
        chunks=CHUNKS,
        checkpoint="never",
        schedule=ONE_STAGE.get(name, actions),
        profile=profile,
        sample=sample,
        loss=nn.functional.mse_loss,
        target=sample,
    )
    return run, step


@pytest.fixture(scope="module")
def one_f_one_b(tmp_path_factory):
    return both("1F1B", 4, H100, tmp_path_factory.mktemp("1F1B"))


def test_pytorchs_1f1b_on_four_ranks_agrees_with_the_simulator(one_f_one_b):
    run, step = one_f_one_b
    assert len(run.step_times_ms) == 2
    assert run.step_times_ms[-1] == pytest.approx(step.step_time_ms, rel=0.002)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("Interleaved1F1B", 4),
        slow("1F1B", 2),
        slow("ZBVZeroBubble", 4),
        slow("InterleavedZeroBubble", 4),
    ],
)
def test_pytorchs_schedules_agree_with_the_simulator(tmp_path, name, ranks):
    run, step = both(name, ranks, H100, tmp_path)
    assert run.races == []
    assert run.step_times_ms[-1] == pytest.approx(step.step_time_ms, rel=0.002)


def test_pytorchs_1f1b_has_no_race_over_ranks(one_f_one_b):
    run, _ = one_f_one_b
    assert run.races == []


def test_the_memory_of_each_rank_is_explained_to_the_byte(one_f_one_b):
    run, step = one_f_one_b
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


# Their receives begin after the work before them, so each message shows; the simulated engine's overlap with work.
@pytest.mark.parametrize("name", [slow("GPipe"), slow("LoopedBFS")])
def test_schedules_whose_messages_show_agree_where_links_take_no_time(tmp_path, name):
    run, step = both(name, 4, FREE, tmp_path)
    assert run.races == []
    assert run.step_times_ms[-1] == pytest.approx(step.step_time_ms, rel=0.002)
