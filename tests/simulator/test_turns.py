"""Which of the things of one nanosecond comes first: what is worked out beforehand is what happens on the clock.

Few times, all multiples of one, so that most of what happens happens together with something else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpipe_bench.schedule import checkpoint_stop
from gpipe_bench.simulator.known_order.host_threads import KnownOrder
from gpipe_bench.simulator.known_order.turns import passed
from gpipe_bench.simulator.memory.memory import Memory
from gpipe_bench.simulator.memory_states.device_times import DeviceTimes
from gpipe_bench.simulator.runs import events
from gpipe_bench.simulator.runs.events import run_whole
from gpipe_bench.simulator.runs.known_steps import is_known, steps_of
from gpipe_bench.simulator.virtual_time.clock import Clock
from gpipe_bench.simulator.virtual_time.streams import Event
from gpipe_bench.simulator.workloads.workload import NOTHING, Kernels, TaskWork, Workload
from tests.simulator.support import SETTINGS, Plain

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=100)


class WatchedClock(Clock):
    """Counts what has ended, by what it is."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.meaning, self.ended = {}, Counter()

    def next_is(self, meaning):
        self.meaning[self._operations] = meaning

    def _finish(self, operation, now):
        super()._finish(operation, now)
        self.ended[self.meaning.get(operation.number)] += 1


@dataclass(frozen=True)
class Turn:
    """A turn of a host thread: what it does, in which step, what had ended, and tasks whose backward pass could run."""

    kind: str
    i: int
    j: int
    step: int
    ended: Counter
    through: tuple[int, ...]


class WatchedMemory(Memory):
    """Notes every request, in the order of the host's calls."""

    def __init__(self, work, places, clock, **options):
        super().__init__(work, places, clock, **options)
        self.turns, self.step, self.clock = [], 0, clock
        self.places, self.through = places, [[] for _ in range(work.n)]

    def note(self, kind, i, j):
        self.turns.append(Turn(kind, i, j, self.step, Counter(self.clock.ended), tuple(map(len, self.through))))
        if kind not in {"loss", "update"}:
            self.clock.next_is((kind, i, j))

    def forward(self, node, *, again):
        self.note("recompute" if again else "forward", node.i, node.j)
        super().forward(node, again=again)

    def backward(self, node):
        self.note("backward", node.i, node.j)
        self.clock.record(self.places.computing[node.j], Event(self.through[node.j]))
        super().backward(node)

    def transfer(self, node, *, back):
        self.note("copy_grad" if back else "copy", node.i, node.j)
        super().transfer(node, back=back)

    def loss(self):
        self.note("loss", 0, self._work.n - 1)
        super().loss()

    def update(self):
        self.note("update", 0, 0)
        super().update()

    def next_step(self):
        self.step += 1
        super().next_step()


def on_the_clock(work, machine, chosen):
    """All turns, in their order."""
    made = []

    def memory(*arguments, **options):
        watched = WatchedMemory(*arguments, **options)
        made.append(watched.turns)
        return watched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "Clock", WatchedClock)
        patch.setattr(events, "Memory", memory)
        run_whole(work, machine, chosen)
    return made[0]


def beforehand(work, machine, chosen):
    """The times of the steps; cases without any are of no use."""
    assume(is_known(work, machine, chosen))
    known = KnownOrder(work, machine, replace(chosen, memory=False), in_order=False)
    return steps_of(known, work.m, work.n)


def times_of(steps, work, chosen, j):
    again = np.arange(work.m)[::-1] < checkpoint_stop(chosen.checkpoint, work.m)
    return DeviceTimes(steps, j, work.m, work.n, again)


MOST = 9
TIMES = st.integers(1, 6).map(lambda tens: 10 * tens)


@st.composite
def workloads(draw, most):
    kernels = st.builds(Kernels, st.integers(1, most).map(lambda tens: 10 * tens), st.integers(1, 3))
    n = draw(st.integers(2, 5))
    sizes = (2,) * (draw(st.integers(2, MOST)) - 1) + (draw(st.sampled_from([1, 2])),)
    borders = [(1,) * draw(st.integers(1, 2)) for _ in range(n + 1)]
    equal = draw(st.booleans())
    works = []
    for j in range(n):
        inputs, outputs = (borders[0],) * 2 if equal else borders[j : j + 2]
        if not equal or not works:
            work = TaskWork(*(draw(kernels) for _ in range(3)), input_bytes=inputs, output_bytes=outputs)
            works.append({1: work, 2: work})
        else:
            works.append(works[0])
    update = tuple(draw(kernels) for _ in range(n)) if draw(st.booleans()) else ()
    return Workload(tuple(works), sizes, loss=draw(st.just(NOTHING) | kernels), optimizer=update)


MACHINES = st.builds(
    Plain,
    copy=st.sampled_from([10, 20, 50]),
    launch_ns=st.just(10),
    queue_depth=st.sampled_from([0, 4, 12, 100]),
)
DENSE = {"work": workloads(3), "machine": MACHINES, "chosen": SETTINGS}


def ended(turn, kind, j, first=0):
    """How many copies of partition j had ended, of the micro-batches from the first on."""
    return sum(turn.ended[kind, i, j] for i in range(first, MOST))


@EXAMPLES
@given(**DENSE)
def test_what_has_come_back_before_each_pass(work, machine, chosen):
    steps = beforehand(work, machine, chosen)
    turns, stop = on_the_clock(work, machine, chosen), checkpoint_stop(chosen.checkpoint, work.m)
    for j in range(work.n):
        own = [turn for turn in turns if turn.kind == "update" or (turn.j == j and not turn.kind.startswith("copy"))]
        sent, returned, open_graphs, begun = [], [], [], 0
        for turn in own:
            begun += turn.kind == "backward" and turn.i >= stop
            sent.append(ended(turn, "copy", j + 1))
            returned.append(ended(turn, "copy_grad", j))
            # Nothing comes back before its own backward pass.
            open_graphs.append(min(ended(turn, "copy_grad", j + 1, stop), begun))
        found = times_of(steps, work, chosen, j).back()
        assert not any(back.odd for back in found)
        assert [np.cumsum(back.new).tolist() for back in found] == [sent, returned, open_graphs]


@EXAMPLES
@given(**DENSE)
def test_what_has_come_back_before_each_copy(work, machine, chosen):
    steps = beforehand(work, machine, chosen)
    turns = on_the_clock(work, machine, chosen)
    for j in range(work.n):
        times = times_of(steps, work, chosen, j)
        back = set(zip(*(column.tolist() for column in times._used()), strict=True))
        found = times.copies_back()
        for way, (kind, here) in enumerate(
            (("copy", times._copies()), ("copy_grad", times._turns("copy_grad", j + 1)))
        ):
            into = [turn for turn in turns if turn.kind == kind and turn.j == j + way]
            if into:
                place = zip(*(column.reshape(-1).tolist() for column in here), strict=True)
                for counted, turn, tie in zip(found[:, way].reshape(-1).tolist(), into, place, strict=True):
                    # Of two turns that tie, the order is not asked for: a stream's own blocks are 32 tasks apart.
                    assert counted <= turn.through[j] <= counted + (tie in back)


@EXAMPLES
@given(**DENSE)
def test_where_gradients_come_in_among_what_a_thread_does_itself(work, machine, chosen):
    steps = beforehand(work, machine, chosen)
    turns = on_the_clock(work, machine, chosen)
    for j in range(work.n - 1):
        times = times_of(steps, work, chosen, j)
        for number in range(chosen.steps):
            places = times.order(number)
            there = np.array([[i < checkpoint_stop(chosen.checkpoint, work.m), True, j > 0] for i in range(work.m)])
            before = np.concatenate([[0], np.cumsum(there[::-1].reshape(-1))])
            assert before[places].tolist() == own_turns_before(turns, j, number)


def own_turns_before(turns, j, number):
    """How many turns in the backward pass a device's thread had had before each gradient came from the next one."""
    found, count = [], 0
    for turn in turns:
        if turn.step != number:
            continue
        if turn.kind == "copy_grad" and turn.j == j + 1:
            found.append(count)
        elif turn.j == j and turn.kind in {"recompute", "backward", "copy_grad"}:
            count += 1
    return found


@EXAMPLES
@given(
    lengths=st.lists(TIMES, min_size=1, max_size=6),
    pauses=st.lists(st.integers(1, 3).map(lambda tens: 10 * tens), min_size=12, max_size=12),
    waits=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_an_operation_ends_before_the_turns_entered_after_its_start(lengths, pauses, waits):
    clock, operations, seen = Clock(1, 1), [], []

    def issues():
        for length, pause in zip(lengths, pauses, strict=False):
            operations.append(clock.issue((0,), length, engines=(0,), launches=1, host_ns=0))
            yield clock.now + pause

    def looks():
        entry = 0
        for pause, wait in zip(pauses[6:], waits, strict=True):
            waiting = [operation for operation in operations if operation.start < 0]
            if wait and waiting:
                clock.after_start(waiting[-1], clock.current)
                yield None
                entry = 2 * clock.now + 1
            else:
                entry = 2 * clock.now
            yield clock.now + pause
            seen.append((clock.now, entry, sum(operation.end >= 0 for operation in operations)))

    for thread in (issues(), looks()):
        clock.resume(thread)
    clock.run()
    ends, starts = (np.array([getattr(one, edge) for one in operations]) for edge in ("end", "start"))
    times, entries = (np.array(column) for column in list(zip(*seen, strict=True))[:2])
    assert passed(ends, 2 * starts, times, entries).tolist() == [count for _, _, count in seen]
