"""PyTorch's own pipeline schedules on several ranks take what the simulator says of the same lists of actions."""

from __future__ import annotations

import csv
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

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
    """For a schedule of PyTorch on some ranks, its run, the simulated step of its list, and the list, made once."""
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
    rows = [] if name in single else list(csv.reader(Path(actions).read_text().splitlines()))
    return run, step, rows


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
    run, step, _ = both(*case)
    assert run.races == []
    assert len(run.step_times_ms) == 2
    assert run.step_times_ms[-1] == pytest.approx(step.step_time_ms, rel=0.002)


@pytest.mark.parametrize(("name", "flights"), [("1F1B", (4, 3, 2, 1)), ("GPipe", (7, 7, 7, 7))])
def test_the_memory_of_each_rank_is_explained_to_the_byte(both, name, flights):
    run, step, _ = both(name)
    layer, number = 4 * WIDTH**2, 512
    for rank, in_flight in enumerate(flights):
        last, inner = rank == 3, 0 < rank < 3
        held = held_on(run, rank)
        # Weights; the batch, which the script makes on every rank; a buffer of each micro-batch, from each neighbour.
        expected = {"uniform_": 8 * layer, "normal_": 8 * layer, "recv": (16 if inner else 8) * layer}
        # The stage keeps its own outputs, too: of what is in flight and one more, the last of all micro-batches.
        results = 7 * in_flight + 8 if last else 8 * in_flight + 1
        # Gradients of weights, and of two or three results.
        gradients = 8 + (2 if rank == 0 else 3)
        expected[UNWRITTEN] = 2 * 32 * 2**20
        if last:
            expected |= {"mse_loss_backward in a backward pass": layer, "mse_loss": 8 * number, "fill_": number}
        # Of rank 0 of GPipe the first backward pass holds as much as the second one.
        assert held.pop("mm") + held.pop("mm in a backward pass") == (results + gradients) * layer
        assert held == expected
        # Weights, gradients, what layers keep, and three results; the batch on the first; workspaces.
        simulated = 8 + 8 + (8 - (rank == 0)) * in_flight + 3 + (8 if rank == 0 else 0) + 1
        # Losses of GPipe keep the outputs of the last stage.
        simulated += 7 if last and name == "GPipe" else 0
        assert step.memory[rank].peak_allocated == simulated * layer + (number if last else 0)


# Messages that the list receives ahead at the peak of each rank, and that come later in the simulated step.
@pytest.mark.parametrize(("name", "late"), [("Interleaved1F1B", (0, 0, 0, 0)), ("ZBVZeroBubble", (1, 0, 1, 0))])
def test_the_memory_of_ranks_with_two_stages_follows_from_their_lists_to_the_byte(both, name, late):
    run, step, rows = both(name)
    layer, number = 4 * WIDTH**2, 512
    places = {word[0]: rank for rank, row in enumerate(rows) for word in row if word[1:2] == "F"}
    for rank, row in enumerate(rows):
        moments = [moment_of(row[:place], word) for place, word in enumerate(row) if word[1:2] in set("BIW")]
        peak = max((moment for moment in moments if moment.kind != "I"), key=lambda one: one.results + one.gradients)
        # A buffer of each micro-batch for what comes from each stage on another rank.
        sides = [str(int(stage) + by) for stage, place in places.items() if place == rank for by in (-1, 1)]
        sources = sum(places.get(side, rank) != rank for side in sides)
        expected = {"uniform_": 8 * layer, "normal_": 8 * layer, "recv": 8 * sources * layer}
        expected |= {"mm": peak.results * layer, "mm in a backward pass": peak.gradients * layer}
        expected[UNWRITTEN] = 2 * 32 * 2**20
        if places["7"] == rank:
            expected |= {"mse_loss_backward in a backward pass": layer, "mse_loss": peak.losses * number}
            expected |= {"fill_": number} if peak.kind == "B" else {}
        assert held_on(run, rank) == expected
        # Weights and their gradients; the batch on the first rank; workspaces.
        simulated = 8 + 8 + (8 if rank == 0 else 0) + 1 + max(moment.simulated for moment in moments) - late[rank]
        assert step.memory[rank].peak_allocated == simulated * layer


class Moment(NamedTuple):
    """What a rank holds in a backward action of stages of four layers, in results of a layer."""

    kind: str
    losses: int
    results: int
    gradients: int
    simulated: int


def moment_of(before, now):
    """When ``now`` runs after ``before``."""
    ran = [word for word in before if word[1] in "FBIW" and word[2:].isdigit()]
    done = Counter(word[1] for word in ran)
    in_flight = done["F"] - done["B"] - done["W"]
    for_weights = done["I"] - done["W"]
    # The gradient of a weight, or those of two results.
    own = 1 if now[1] == "W" else 2
    # Three results in flight, and all outputs, since sends end with the step. Gradients of weights, those that the
    # step has sent, and three that wait for W.
    results = 3 * in_flight + done["F"]
    gradients = 8 + sum(word[1] in "BI" and word[0] != "0" for word in ran) + 3 * for_weights + own
    # What came to the stage is the fourth result in flight, but for the first stage, which has it in the batch.
    of_batch = sum((word[1] == "F") - (word[1] in "BW") for word in ran if word[0] == "0")
    used = [f"{word[0]}RECV_{'F' if word[1] == 'F' else 'B'}{word[2:]}" for word in [*ran, now] if word[1] != "W"]
    ahead = sum("RECV" in word and word not in used for word in before)
    simulated = 4 * in_flight - of_batch + 4 * for_weights + (1 if now[1] == "W" else 3) + ahead
    return Moment(now[1], sum(word[:2] == "7F" for word in ran), results, gradients, simulated)


def held_on(run, rank):
    """Bytes at the peak of a rank by what wrote them, which are all of the peak."""
    held = {one.source: one.nbytes for one in held_at_peak(run.records, run.replayed, rank)}
    assert sum(held.values()) == run.replayed.memory[rank].peak_allocated
    return held
