"""The memory in C does what the memory in Python does, to the byte, after every call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_bench.components import Components
from gpipe_bench.errors import OutOfMemory
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.cycles import checkpoint_stop
from gpipe_bench.simulator.clock.list_rows import check_devices, chosen_schedule
from gpipe_bench.simulator.clock.settings import Settings
from gpipe_bench.simulator.workloads.workload import MemoryOp
from tests.simulator.native_memory import BothMemories, ScriptedClock, library
from tests.simulator.oracle import run as oracle_run
from tests.simulator.oracle.places import Places
from tests.simulator.oracle.run import run_whole
from tests.simulator.random_workloads import MACHINES, named_skips, split, workloads
from tests.simulator.support import SANITIZED, Plain, examples, task, workload

EXAMPLES = examples(30 if SANITIZED else 100)
BOOLEANS = st.booleans()
MIB = 2**20
# Everything that a run may be set to, the usual more often.
ANY = st.builds(
    Settings,
    components=st.builds(Components, *[BOOLEANS] * 5),
    checkpoint=st.sampled_from(["always", "except_last", "never"]),
    flavour=st.sampled_from(["current", "published"]),
    transfer=st.sampled_from(["direct", "direct", "host"]),
    streams=st.sampled_from([True, True, False]),
    workers=BOOLEANS,
    steps=st.integers(1, 3),
    schedule=st.sampled_from([*[None] * 7, *SCHEDULES]),
)
SHARED = st.sampled_from([lambda n: (), lambda n: (), lambda n: (0,) * n, lambda n: tuple(j // 2 for j in range(n))])


@pytest.fixture(scope="module", autouse=True)
def both(tmp_path_factory) -> Iterator[None]:
    BothMemories.library = library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle_run, "Memory", BothMemories)
        yield


def simulate(work, machine, chosen):
    """A run whose memories are compared after every call; None if memory runs out."""
    try:
        return run_whole(work.chosen(checkpoint_stop(chosen.checkpoint, work.m)), machine, chosen)
    except OutOfMemory:
        return None


def fitting(work, chosen):
    """The same run, without a schedule that is not for these partitions and devices."""
    if chosen.schedule is None:
        return chosen
    try:
        schedule = chosen_schedule(chosen.schedule, work.m, work.n, chosen.devices)
        check_devices(schedule.placement, chosen.devices or schedule.placement)
    except ValueError:
        return replace(chosen, schedule=None)
    return chosen


def smaller(machine, run, share):
    """A machine whose devices have a share of the segments that a run without limit reserves."""
    return replace(machine, capacity_bytes=int(share * max(*run.peak_reserved_bytes, 2 * MIB)))


@EXAMPLES
@given(
    work=split(workloads(8) | named_skips(8)),
    machine=MACHINES,
    chosen=ANY,
    share=st.sampled_from([0, 0, 1, 0.95, 0.9, 0.8, 0.7, 0.5]),
    shared=SHARED,
)
def test_runs_are_alike(work, machine, chosen, share, shared):
    chosen = fitting(work, replace(chosen, devices=shared(work.n)))
    run = simulate(work, machine, chosen)
    if share:
        simulate(work, smaller(machine, run, share), chosen)


def test_kernels_do_without_scratch_memory_for_which_there_is_no_room():
    rows = (MemoryOp("alloc", 1, 12 * MIB), MemoryOp("scratch", 7, 30 * MIB), MemoryOp("free", 1))
    one = task(forward_memory=rows, graph_memory=rows, backward_memory=rows)
    run = simulate(workload(3, [one] * 2), Plain(capacity_bytes=40 * MIB), Settings())
    assert run is not None
    assert run.flushes != (0, 0)


def test_tensors_of_many_tebibytes():
    rows = (MemoryOp("alloc", 1, 5 << 40), MemoryOp("alloc", 2, 3 << 40), MemoryOp("free", 1), MemoryOp("alloc", 3, 7))
    run = simulate(workload(2, [task(forward_memory=rows, graph_memory=rows)] * 2), Plain(), Settings())
    assert run is not None
    assert run.peak_reserved_bytes[0] > 8 << 40


# --- any order of calls ----------------------------------------------------------------------------------------------


def node(kind, i, j, **fields):
    return SimpleNamespace(kind=kind, i=i, j=j, skip=None, single=kind == "checkpoint", **fields)


def copies(work, places, i, j):
    """Copies of a micro-batch and of skips to partition j."""
    skips = [skip for skip in work.skips if skip.target == j != skip.source]
    for source, skip in [(j - 1, None), *((skip.source, skip) for skip in skips)]:
        nbytes = work.task(i, j).input_bytes if skip is None else (skip.bytes[work.microbatch_sizes[i]],)
        copy = node("copy", i, j, source=source, stream=places.copying(i, j), peer=places.copying(i, source))
        copy.nbytes = copy.returned = nbytes
        copy.skip = None if skip is None else skip.key
        yield copy


def forward_calls(work, places, i, kind):
    for j in range(work.n):
        for copy in copies(work, places, i, j) if j else ():
            yield "copy", copy
        yield "forward", node(kind, i, j)
        yield "collected", node(kind, i, j)


def backward_calls(work, places, i, kind):
    for j in reversed(range(work.n)):
        if kind == "checkpoint":
            yield "again", node(kind, i, j)
        yield "backward", node(kind, i, j)
        for copy in copies(work, places, i, j) if j else ():
            yield "copy back", copy


def interleaved(draw, lists):
    """Calls of several lists, each in its own order."""
    left = [*map(iter, lists)]
    while left:
        iterator = draw.choice(left)
        found = next(iterator, None)
        if found is None:
            left.remove(iterator)
        else:
            yield found


def call(memory, clock, what, one):
    if what.startswith("copy"):
        back = what == "copy back"
        memory.transfer(one, back=back)
        clock.issue(one.stream)
        clock.issue(one.peer)
        memory.transferred()
    elif what == "collected":
        memory.collected(one)
    elif what == "backward":
        memory.backward(one)
    else:
        memory.forward(one, again=what == "again")


def ordered(work, seed, kind, places, **options):
    """Run two steps in an order drawn at random, while streams come to their ends at any time; the largest peak."""
    draw, clock = Random(seed), ScriptedClock()
    memory = BothMemories(work, places, clock, riding=False, **options)
    for _ in range(2):
        for calls in (forward_calls, backward_calls):
            for what, one in interleaved(draw, [calls(work, places, i, kind) for i in range(work.m)]):
                call(memory, clock, what, one)
                for _ in range(draw.choice([0, 0, 1, 2])):
                    clock.end(draw.randrange(100))
                clock.issue(places.computing[one.j])
            if calls is forward_calls:
                memory.loss()
        memory.update()
        memory.next_step()
    return max(device.peak_reserved for device in memory.devices)


@EXAMPLES
@given(
    work=workloads(6) | named_skips(6),
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["task", "checkpoint"]),
    published=BOOLEANS,
    scheduled=BOOLEANS,
    copy_streams=BOOLEANS,
    share=st.sampled_from([0, 1, 0.9, 0.7]),
)
def test_any_order_of_calls_is_alike(work, seed, kind, published, scheduled, copy_streams, share):
    work = work.chosen(work.m if kind == "checkpoint" else 0)
    places = Places(range(work.n), copy_streams=copy_streams, transfer="direct")
    for i in range(work.m):
        for j in range(work.n):
            places.copying(i, j)
    options = {"published": published, "scheduled": scheduled}
    peak = ordered(work, seed, kind, places, capacity=0, **options)
    if share:
        with suppress(OutOfMemory):
            ordered(work, seed, kind, places, capacity=int(share * peak), **options)
