"""Makespans in virtual time: a forward pass or recomputation takes 10 ms, a backward pass 20, a copy 0.1.


Early recomputation overlaps with the gradient's way through the later devices. The bound, with everything checkpointed:

    n - 1 forward passes until the last device begins, m there; then it recomputes and runs backward m times;
    n - 1 backward passes after that, their recomputations having overlapped; and 2(n - 1) copies.

Other schedules take the time that the simulator says, see test_schedules_agree.py.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe
from gpipe_bench.emulator.handovers import seen
from gpipe_bench.emulator.library import devices
from gpipe_bench.emulator.recording import recording
from gpipe_bench.engine.transfer import Endpoint, Route, move
from gpipe_bench.machine.replay import replay
from gpipe_bench.measure.timeline import Recorder
from gpipe_bench.results.timeline import KINDS
from tests.emulator.bed.behaviour import duration, jitter
from tests.emulator.bed.mutants import mutants
from tests.emulator.bed.rows import NS_PER_MS, Bed, timed
from tests.emulator.bed.ticking import ticking
from tests.emulator.inside.pipelines import (
    BACKWARD_MS,
    COPY_MS,
    DOUBLE,
    FORWARD_MS,
    WIDTH,
    run_ends,
    working_pipe,
    working_step,
)

N = 4
RUNS = 2
MACHINE = Bed(COPY_MS)
ALONG = (N - 1) * (FORWARD_MS + BACKWARD_MS + 2 * COPY_MS)


def makespans(m, checkpoint, components, **options):
    """The makespans of some runs with random delays of the host."""
    found = []
    with seen():
        pipe = working_pipe(N, m, checkpoint=checkpoint, components=components, **options)
        for seed in range(RUNS):
            with jitter(seed, 200 if seed else 0):
                trace = working_step(pipe)
            found.append(replay(trace, MACHINE).makespan_ns / NS_PER_MS)
    return found


@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("m", [1, 4, 8])
def test_early_recomputation_reaches_the_bound(m, schedule):
    bound = m * (2 * FORWARD_MS + BACKWARD_MS) + ALONG
    assert bound == pytest.approx({1: 130.6, 4: 250.6, 8: 410.6}[m])
    assert makespans(m, "always", Components(), schedule=schedule) == pytest.approx([bound] * RUNS)


@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("m", [1, 4, 8])
def test_without_it_every_device_recomputes_when_its_gradient_has_arrived(m, schedule):
    late = m * (2 * FORWARD_MS + BACKWARD_MS) + ALONG + (N - 1) * FORWARD_MS
    assert makespans(m, "always", Components(early_recompute=False), schedule=schedule) == pytest.approx([late] * RUNS)


@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("m", [1, 4, 8])
def test_without_checkpoints(m, schedule):
    bound = m * (FORWARD_MS + BACKWARD_MS) + ALONG
    assert makespans(m, "never", Components(), schedule=schedule) == pytest.approx([bound] * RUNS)


@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("m", [1, 4, 8])
def test_the_last_microbatch_saves_a_recomputation(m, schedule):
    bound = m * (2 * FORWARD_MS + BACKWARD_MS) - FORWARD_MS + ALONG
    assert bound == pytest.approx({1: 120.6, 4: 240.6, 8: 400.6}[m])
    assert makespans(m, "except_last", Components(), schedule=schedule) == pytest.approx([bound] * RUNS)


def test_copies_on_compute_streams_stall_them():
    # A copy there waits for whatever its receiver has been given to do, and holds back what its sender does next.
    bound = 8 * (2 * FORWARD_MS + BACKWARD_MS) + ALONG
    assert min(makespans(8, "always", Components(copy_streams=False))) > bound + (N - 1) * FORWARD_MS


@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("m", [1, 4, 8])
def test_copies_through_the_host_overlap_as_well(m, schedule):
    bound = m * (2 * FORWARD_MS + BACKWARD_MS) + ALONG
    found = makespans(m, "always", Components(), schedule=schedule, transfer="host")
    assert found == pytest.approx([bound] * RUNS)


@cache
def step_traces(name, m, devices, checkpoint, transfer):
    """Traces of ``pipe.step`` with layers whose gradients of inputs and of weights take 10 ms each."""
    n = devices * (2 if name in DOUBLE else 1)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n)))
    options = {"schedule": name, "checkpoint": checkpoint, "transfer": transfer}
    traces = []
    with seen():
        pipe = GPipe(layers, [1] * n, devices=[f"virtual:{d}" for d in range(devices)], chunks=m, **options)
        x = torch.ones(m, WIDTH, device=pipe.devices[0], requires_grad=True)
        target = torch.ones(m, WIDTH, device=pipe.devices[-1])
        for seed in range(RUNS):
            with jitter(seed, 200 if seed else 0), recording() as trace:
                pipe.step(x, target, lambda output, expected: (output * expected).mean())
            timed(trace, {"mm": FORWARD_MS})
            traces.append(trace)
    return traces


def ends(name, m, devices, checkpoint, transfer="direct", machine=MACHINE):
    """Makespans of these steps."""
    traces = step_traces(name, m, devices, checkpoint, transfer)
    return [replay(trace, machine).makespan_ns / NS_PER_MS for trace in traces]


def test_split_backward_passes_shorten_a_step():
    # With m = 8 on four devices: 1F1B takes (m + n - 1)(F + B), and ZB-H1 saves two thirds of its bubble.
    found = {name: ends(name, 8, 4, "never")[0] for name in ("1f1b", "zb_h1", "zb_h2")}
    assert found["1f1b"] == pytest.approx(11 * 30, abs=20 * COPY_MS)
    assert found["zb_h1"] == pytest.approx(8 * 30 + 30, abs=20 * COPY_MS)
    assert found["zb_h2"] <= found["zb_h1"]


def between_compute_streams(transfer):
    """A copy on compute streams from a free device to a busy one; ends of: busy work, copies, later work on both."""
    sender, receiver = (
        Endpoint(device, torch.accelerator.current_stream(device), torch.accelerator.current_stream(device))
        for device in devices(2)
    )
    x, y = torch.ones(2, device=sender.device), torch.ones(2, device=receiver.device)
    with recording() as trace:
        with duration(FORWARD_MS):
            y + 1
        move(Route("copy", sender, receiver, 0, 1, transfer, None), (x,))
        with duration(1):
            x + 1
            y + 1
    return run_ends(trace, Bed(2))


def test_on_compute_streams_a_copy_waits_for_its_receiver_whatever_the_transfer():
    assert between_compute_streams("direct") == [10, 12, 13, 13]
    assert between_compute_streams("host") == [10, 11, 12, 12, 13]


def test_without_the_barrier_a_copy_through_the_host_would_not():
    (mutant,) = (mutant for mutant in mutants() if str(mutant).startswith("transfer._move#0"))
    with mutant.applied():
        assert between_compute_streams("host") == [10, 1, 11, 2, 12]


def test_a_measured_timeline_shows_virtual_time():
    with seen(), ticking(MACHINE):
        pipe = working_pipe(N, 4, checkpoint="always")
        x = torch.ones(4, WIDTH, device=pipe.devices[0])
        recorder = Recorder()
        with pipe.observe(recorder):
            pipe(x).sum().backward()
        events = recorder.events()
    lengths = {kind: [event.end_us - event.start_us for event in events if event.kind == kind] for kind in KINDS}
    assert lengths["forward"] == pytest.approx([1e3 * FORWARD_MS] * N * 4)
    assert lengths["recompute"] == pytest.approx([1e3 * FORWARD_MS] * N * 4)
    assert lengths["backward"] == pytest.approx([1e3 * BACKWARD_MS] * N * 4)
    # With the time in which the sender waits for the receiver's copy stream.
    assert min(lengths["copy"] + lengths["copy_grad"]) == pytest.approx(1e3 * COPY_MS)
    first = [event for event in events if event.device == "virtual:0" and event.stream == "compute"]
    assert max(event.end_us for event in first) - min(event.start_us for event in first) == pytest.approx(250.6e3)
