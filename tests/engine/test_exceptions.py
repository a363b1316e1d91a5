"""Whatever a layer or a loss raises surfaces in the caller, nothing hangs or stays, and the same pipeline works on."""

from __future__ import annotations

import threading
import traceback
import weakref
from itertools import product

import pytest
import torch
from torch import nn

from gpipe_bench import Components, is_recomputing
from gpipe_bench.schedules import SCHEDULES, merged_order, named_schedule
from gpipe_bench.schedules.cycles import clock_cycles, microbatch_major
from tests.cover import cover
from tests.engine.steps import WAYS, mean_loss, scheduled
from tests.engine.support import MODES, SOME, Mix, Watch, ended, label, numbered, on_cpu

M, N = 4, 4
both_workers = pytest.mark.parametrize("workers", ["always", "never"])


class BoomError(Exception):
    """Raised by layers here."""


class Interrupt(BaseException):
    """Like KeyboardInterrupt: no Exception."""


class Armed(nn.Module):
    """Notes the micro-batches that it sees, and raises while armed, at (``F``, ``R`` or ``B``, i)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.armed: dict[tuple[str, int], BaseException] = {}
        self.seen: list[int] = []
        self.before = lambda _i: None

    def check(self, phase: str, i: int) -> None:
        if (phase, i) in self.armed:
            raise self.armed[phase, i]

    def forward(self, x):
        i = int(x.flatten()[0].detach())
        self.seen.append(i)
        self.before(i)
        self.check("R" if is_recomputing() else "F", i)
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda grad: self.check("B", i))
        return y


class Loss(Armed):
    """Adds up the output."""

    def forward(self, output, _=None):
        self.check("L", int(output.flatten()[0].detach()))
        return output.sum()


def armed_pipe(schedule=None, **options):
    return scheduled(nn.Sequential(*(Armed() for _ in range(N))), [1] * N, schedule, chunks=M, **options)


def run(pipe, called=True, loss=None) -> None:
    """A step."""
    loss = loss or Loss()
    if called:
        loss(pipe(numbered(M))).backward()
    else:
        pipe.step(numbered(M), None, loss, reduction="sum")


def assert_works(pipe, called=True) -> None:
    for layer in pipe:
        layer.armed.clear()
        layer.before = lambda _i: None
    pipe.zero_grad()
    run(pipe, called)
    assert [float(layer.weight.grad) for layer in pipe] == [0 + 1 + 2 + 3] * N


def failing(phase: str, checkpoint: str) -> bool:
    return phase != "R" or checkpoint != "never"


CASES = [case for case in product(WAYS, "FRBL", MODES, ["always", "never"]) if failing(*case[1:3])]
SWITCHED = [((None, True), *case) for case in product("FRB", ["always"], ["always", "never"], SOME)]


@pytest.mark.parametrize(
    ("way", "phase", "checkpoint", "workers", "components"),
    [*((*case, Components()) for case in cover(CASES)), *SWITCHED],
    ids=label,
)
def test_an_exception_surfaces_and_the_next_step_is_right(way, phase, checkpoint, workers, components):
    schedule, called = way
    pipe = armed_pipe(schedule, checkpoint=checkpoint, workers=workers, components=components)
    loss, error = Loss(), BoomError(phase)
    for layer in [loss] if phase == "L" else pipe:
        # the paper's executor computes one loss
        layer.armed[phase, 0 if (phase == "L" and schedule is None) or called else 1] = error
        with pytest.raises(BoomError) as caught:
            run(pipe, called, loss)
        assert caught.value is error
        layer.armed.clear()
    assert_works(pipe, called)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpipe-worker")]


@both_workers
@pytest.mark.parametrize("schedule", [None, "gpipe", "zb_h1"])
@pytest.mark.parametrize("phase", ["F", "B"])
def test_what_is_no_exception_surfaces_too(phase, schedule, workers):
    pipe = armed_pipe(schedule, workers=workers)
    pipe[1].armed[phase, 3] = Interrupt()
    # autograd turns what is no Exception into one only on its own threads
    with pytest.raises(Interrupt):
        run(pipe, schedule != "zb_h1")
    assert_works(pipe, schedule != "zb_h1")


@both_workers
@pytest.mark.parametrize("error", [StopIteration("x"), GeneratorExit("x"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_exceptions_with_a_meaning_of_their_own_arrive_as_they_are(error, schedule, workers):
    pipe = armed_pipe(schedule, workers=workers)
    pipe[1].armed["F", 1] = error
    with pytest.raises(type(error)) as caught:
        run(pipe, schedule is None)
    assert caught.value is error
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert {"check", "forward", "run"} <= set(names)
    assert_works(pipe, schedule is None)


@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_of_two_in_one_cycle_that_of_the_first_partition_surfaces(schedule):
    """Both have been raised before either is looked at."""
    pipe = armed_pipe(schedule)
    both = threading.Barrier(2)
    for j, i in ((0, 2), (1, 1)):
        pipe[j].armed["F", i] = BoomError(f"partition {j}")
        pipe[j].before = lambda seen, wanted=i: both.wait(timeout=30) if seen == wanted else None
    with pytest.raises(BoomError, match="partition 0"):
        run(pipe)
    assert_works(pipe)


def test_of_two_cycles_that_of_the_first_surfaces_though_the_second_has_begun():
    """With a schedule, (2, 0) may run beside (0, 1), and raise before it."""
    pipe = armed_pipe("gpipe", workers="always")
    raised = threading.Event()
    pipe[0].armed["F", 2] = BoomError("later")
    pipe[1].armed["F", 0] = BoomError("first")
    pipe[0].before = lambda i: raised.set() if i == 2 else None
    pipe[1].before = lambda _i: None if raised.wait(timeout=30) else pytest.fail("(2, 0) waits for (0, 1)")
    with pytest.raises(BoomError, match="first"):
        run(pipe)
    assert_works(pipe)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "looped_bfs"])
@both_workers
def test_of_several_exceptions_the_first_of_the_order_surfaces(schedule, workers):
    """Partition 3 fails in micro-batch 0, which comes first in the order, whenever partition 0 may have failed."""
    pipe = armed_pipe(schedule, workers=workers)
    pipe.chunks = 6
    pipe[0].armed["F", 5], pipe[3].armed["F", 0] = BoomError("later"), BoomError("first")
    for _ in range(5):
        with pytest.raises(BoomError, match="first"):
            pipe.step(numbered(6), torch.ones(6), mean_loss)


def seen_by(pipe) -> set[tuple[int, int]]:
    return {(i, j) for j, layer in enumerate(pipe) for i in layer.seen}


@both_workers
@pytest.mark.parametrize("clock_cycle", [True, False])
@pytest.mark.parametrize("at", [(0, 0), (1, 1), (0, 2), (3, 2)])
def test_its_cycle_ends_and_later_ones_do_not_run(at, clock_cycle, workers):
    pipe = armed_pipe(workers=workers, components=Components(clock_cycle=clock_cycle))
    pipe[at[1]].armed["F", at[0]] = BoomError()
    with pytest.raises(BoomError):
        run(pipe)
    cycles = list((clock_cycles if clock_cycle else microbatch_major)(M, N))
    last = next(number for number, cycle in enumerate(cycles) if at in cycle)
    assert seen_by(pipe) == {task for cycle in cycles[: last + 1] for task in cycle}


@both_workers
@pytest.mark.parametrize("at", [(0, 0), (1, 1), (0, 2), (3, 2)])
def test_with_a_schedule_what_comes_before_it_runs_and_what_needs_it_does_not(at, workers):
    """One thread stops there; others may have gone on."""
    pipe = armed_pipe("gpipe", workers=workers)
    pipe[at[1]].armed["F", at[0]] = BoomError()
    with pytest.raises(BoomError):
        run(pipe)
    order = [(action.i, action.j) for action in merged_order(named_schedule("gpipe", M, N, N)) if action.kind == "F"]
    before = set(order[: order.index(at) + 1])
    assert before <= seen_by(pipe)
    assert seen_by(pipe).isdisjoint((at[0], later) for later in range(at[1] + 1, N))
    assert workers == "always" or seen_by(pipe) == before


@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_the_caller_gets_the_exception_only_when_the_cycle_has_ended(schedule):
    """No task may still run on tensors that the caller may now change."""
    pipe = armed_pipe(schedule)
    raised = threading.Event()
    ended = []

    def slow(i):
        if i == 0:
            assert raised.wait(timeout=30)
            # long enough for the calling thread to go on if it did not wait
            work = torch.ones(200, 200)
            for _ in range(100):
                work = work @ work
            ended.append(i)

    def fail(i):
        if i == 1:
            raised.set()
            raise BoomError

    pipe[0].before, pipe[1].before = fail, slow
    with pytest.raises(BoomError):
        run(pipe)
    assert ended == [0]
    assert_works(pipe)


def test_an_observer_sees_the_end_of_a_failing_task():
    pipe = armed_pipe()
    pipe[1].armed["F", 1] = BoomError()
    with pipe.observe(watch := Watch()), pytest.raises(BoomError):
        run(pipe)
    assert all(seen.finished for seen in watch.seen)


@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_a_wrong_last_layer_is_named(schedule):
    class Text(Mix):
        def forward(self, x):
            return "text"

    pipe = on_cpu(nn.Sequential(Text()), [1], chunks=2, schedule=schedule)
    with pytest.raises(TypeError, match="output of the last layer must be a tensor or a tuple of tensors, got str"):
        pipe(numbered(2))


# --- nothing stays ----------------------------------------------------------------------------------------------------


FREED = [*CASES, *(case for case in product(WAYS, ["a cycle"], MODES, ["always", "never"]))]


@pytest.mark.parametrize(("way", "phase", "checkpoint", "workers"), cover(FREED))
def test_what_failed_is_free_without_the_collector(way, phase, checkpoint, workers, no_gc):
    """Memory that ran out must be there again for whoever catches it and tries with less."""
    schedule, called = way
    pipe, loss, held = armed_pipe(schedule, checkpoint=checkpoint, workers=workers), Loss(), []
    for layer in pipe:
        layer.register_forward_pre_hook(lambda _layer, given: held.append(weakref.ref(given[0])))
        layer.register_forward_hook(lambda _layer, _given, output: held.append(weakref.ref(output)))
    for j, layer in enumerate([loss] if phase == "L" else pipe):
        if phase == "a cycle":  # one surfaces, and nobody takes the others
            layer.armed["F", M - 1 - j] = BoomError()
        elif phase == "L" or j == 1:
            layer.armed[phase, 0 if (phase == "L" and schedule is None) or called else 1] = BoomError()
    with pytest.raises(BoomError):
        run(pipe, called, loss)
    for layer in (*pipe, loss):
        layer.armed.clear()
    assert held
    held.append(weakref.ref(pipe))
    del pipe, layer
    ended()
    # what autograd had yet to run stays in its queue until the next backward pass
    torch.ones(1, requires_grad=True).sum().backward()
    assert [each for each in held if each() is not None] == []


@pytest.mark.parametrize("components", SOME, ids=label)
@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_steps_that_fail_or_not_leave_no_thread_behind(schedule, components, no_gc):
    before = set(threading.enumerate())
    pipe = armed_pipe(schedule, components=components, workers="always")
    for number in range(6):
        if number % 2:
            pipe[1].armed["F", 1] = BoomError()
            with pytest.raises(BoomError):
                run(pipe)
        else:
            assert_works(pipe)
    assert {thread.name for thread in set(threading.enumerate()) - before} <= {"gpipe-batch"}
    ended()
    assert set(threading.enumerate()) <= before
