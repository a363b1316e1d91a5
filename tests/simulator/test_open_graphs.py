"""Backward passes of tasks without checkpoint, run at once, do to the allocator what their requests do one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.simulator.memory.allocator import MIB, Allocator, drop_all
from gpipe_bench.simulator.memory.passes import Passes
from gpipe_bench.simulator.virtual_time.places import Places
from gpipe_bench.simulator.workloads.workload import NOTHING, MemoryOp, TaskWork, Workload, gradient_name, input_name

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=150)
SIZES = st.sampled_from([1, 512, 700_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 11 * MIB, 30 * MIB])
STREAM = 7
LENT = (input_name(0), gradient_name(0))


class Stream:
    """Has run, or will run when it is told to."""

    def __init__(self):
        self.has_run, self.events = True, []

    def record(self, _number, event):
        event.missing += 1
        self.events.append(event)
        if self.has_run:
            self.run()

    def idle(self, _number):
        return self.has_run

    def run(self):
        self.has_run = True
        for event in self.events:
            event.passed.append(event)
        self.events.clear()


class OneByOne(Passes):
    def _backward_at_once(self, *_):
        return None


@st.composite
def tasks(draw):
    sizes = draw(st.lists(SIZES, min_size=1, max_size=8))
    leaving = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3))
    graph = [MemoryOp("alloc", name, nbytes) for name, nbytes in enumerate(sizes)]
    backward, alive, name = [], list(range(len(sizes))), len(sizes)
    for what, nbytes, place in draw(
        st.lists(st.tuples(st.sampled_from("aafffs"), SIZES, st.integers(0, 20)), max_size=12)
    ):
        if what == "a":
            backward.append(MemoryOp("alloc", name, nbytes))
            alive.append(name)
            name += 1
        elif what == "s":
            backward.append(MemoryOp("scratch", 1000, nbytes))
        elif alive:
            backward.append(MemoryOp("free", alive.pop(place % len(alive))))
    for name in draw(st.lists(st.sampled_from(LENT), unique=True)):
        backward.insert(draw(st.integers(0, len(backward))), MemoryOp("free", name))
    made = [block for block in alive if block >= len(sizes)]
    returning = tuple(made[: draw(st.integers(0, 2))])
    rows = {"graph_memory": tuple(graph), "backward_memory": tuple(backward)}
    return TaskWork(NOTHING, NOTHING, NOTHING, **rows, leaving=tuple(leaving), returning=returning)


class Device:
    def __init__(self, kind, work, capacity):
        self.stream = Stream()
        self.memory = Allocator(self.stream, capacity)
        places = Places([0], copy_streams=False, transfer="direct")
        self.passes = kind(Workload(({1: work},), (1,)), places, [self.memory], published=False)
        self.work, self.graphs = work, []

    def forward(self, used, held):
        graph, left = self.passes.open_graph(0, self.work)
        for block, is_used in zip(left.values(), used, strict=False):
            if is_used:
                self.memory.record_stream(block, STREAM)
        if not held:
            drop_all(left.values())
        lent = {name: self.memory.alloc(3 * MIB, STREAM) for name in LENT}
        self.graphs.append((graph, list(left.values()) if held else [], lent))

    def backward(self, has_run):
        if has_run:
            self.stream.run()
        self.stream.has_run = has_run
        graph, held, lent = self.graphs.pop()
        returned = self.passes.backward(0, self.work, graph, lent, is_open=True).values()
        places = [(block.address, block.size, block.requested) for block in returned]
        drop_all(returned)
        drop_all(held)
        drop_all(lent.values())
        return places

    def facts(self):
        memory = self.memory
        return memory.live, memory.allocated, memory.reserved, memory.peak_live, memory.peak_allocated, memory.flushes


@EXAMPLES
@given(
    work=tasks(),
    used=st.lists(st.booleans(), min_size=3, max_size=3),
    holds=st.lists(st.sampled_from([False, False, True]), min_size=3, max_size=3),
    runs=st.lists(st.booleans(), min_size=3, max_size=3),
    capacity=st.sampled_from([0, 0, 300 * MIB]),
)
def test_at_once_or_one_by_one(work, used, holds, runs, capacity):
    devices = [Device(kind, work, capacity) for kind in (Passes, OneByOne)]
    for _ in range(2):
        for held in holds:
            for device in devices:
                device.forward(used, held)
        for has_run in runs:
            places = [device.backward(has_run) for device in devices]
            assert places[0] == places[1]
            assert devices[0].facts() == devices[1].facts()
        for device in devices:
            device.stream.run()
    # What is free in the end is the same too.
    spots = [[device.memory.alloc(nbytes, 0).address for nbytes in (1, MIB + 1, 9 * MIB)] for device in devices]
    assert spots[0] == spots[1]
