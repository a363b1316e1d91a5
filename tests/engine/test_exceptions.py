"""Whatever a layer raises surfaces in the caller, nothing hangs, and the same pipeline works afterwards."""

from __future__ import annotations

import threading
import traceback
import weakref

import pytest
import torch
from torch import nn

from gpipe_bench import Components, is_recomputing
from gpipe_bench.schedules import merged_order, named_schedule
from gpipe_bench.schedules.cycles import clock_cycles, microbatch_major
from tests.engine.support import FACTORIAL, MODES, Watch, label, numbered, on_cpu

M, N = 4, 3


class BoomError(Exception):
    """Raised by layers here."""


class Interrupt(BaseException):
    """Like KeyboardInterrupt: no Exception."""


class Armed(nn.Module):
    """Notes the micro-batches that it sees, and raises at (phase, i) while armed.

    Args:
        j: its partition.
        phase: ``forward``, ``recompute`` or ``backward``.
    """

    def __init__(self, j: int) -> None:
        super().__init__()
        self.j = j
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
        self.check("recompute" if is_recomputing() else "forward", i)
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda grad: self.check("backward", i))
        return y


def armed_pipe(**options):
    return on_cpu(nn.Sequential(*(Armed(j) for j in range(N))), [1] * N, chunks=M, **options)


def step(pipe) -> None:
    pipe.zero_grad()
    pipe(numbered(M)).sum().backward()


def assert_works(pipe) -> None:
    for layer in pipe:
        layer.armed.clear()
        layer.before = lambda _i: None
    step(pipe)
    assert [float(layer.weight.grad) for layer in pipe] == [0 + 1 + 2 + 3] * N


@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("components", FACTORIAL, ids=label)
@pytest.mark.parametrize(("i", "j"), [(0, 0), (1, 1), (3, 2), (3, 0)])
def test_in_the_forward_pass(components, i, j, workers):
    pipe = armed_pipe(workers=workers, components=components)
    pipe[j].armed["forward", i] = error = BoomError(f"{i},{j}")
    with pytest.raises(BoomError) as caught:
        step(pipe)
    assert caught.value is error
    assert_works(pipe)


@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("components", FACTORIAL, ids=label)
@pytest.mark.parametrize("phase", ["recompute", "backward"])
def test_in_the_backward_pass(components, phase, workers):
    pipe = armed_pipe(workers=workers, components=components, checkpoint="always")
    pipe[1].armed[phase, 2] = BoomError("2,1")
    with pytest.raises(BoomError, match="2,1"):
        step(pipe)
    assert_works(pipe)


@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_is_no_exception_surfaces_too(phase, checkpoint, workers):
    pipe = armed_pipe(workers=workers, checkpoint=checkpoint)
    pipe[1].armed[phase, 3] = Interrupt()
    # autograd turns what is no Exception into one only on its own threads
    with pytest.raises(Interrupt):
        step(pipe)
    assert_works(pipe)


@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("error", [StopIteration("x"), GeneratorExit("x"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("clock_cycle", [True, False])
def test_exceptions_with_a_meaning_of_their_own_arrive_as_they_are(error, clock_cycle, workers):
    pipe = armed_pipe(workers=workers, components=Components(clock_cycle=clock_cycle))
    pipe[1].armed["forward", 1] = error
    with pytest.raises(type(error)) as caught:
        step(pipe)
    assert caught.value is error
    assert_works(pipe)


def test_the_traceback_leads_to_the_layer():
    pipe = armed_pipe()
    pipe[1].armed["forward", 1] = BoomError()
    with pytest.raises(BoomError) as caught:
        step(pipe)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "check" in names
    assert "step" in names


@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
def test_of_two_in_one_cycle_that_of_the_first_partition_surfaces(backward):
    """Both have been raised before either is looked at."""
    pipe = armed_pipe(backward=backward)
    both = threading.Barrier(2)
    for j, i in ((0, 2), (1, 1)):
        pipe[j].armed["forward", i] = BoomError(f"partition {j}")
        pipe[j].before = lambda seen, wanted=i: both.wait(timeout=30) if seen == wanted else None
    with pytest.raises(BoomError, match="partition 0"):
        step(pipe)
    assert_works(pipe)


def tasks_before(failing: tuple[int, int], *, clock_cycle: bool) -> set[tuple[int, int]]:
    """All tasks up to and including the cycle of the failing one."""
    tasks: set[tuple[int, int]] = set()
    for cycle in (clock_cycles if clock_cycle else microbatch_major)(M, N):
        tasks.update(cycle)
        if failing in cycle:
            return tasks
    raise AssertionError(failing)


def test_of_two_cycles_that_of_the_first_surfaces_though_the_second_has_begun():
    """With a schedule, (2, 0) may run beside (0, 1), and raise before it."""
    pipe = armed_pipe(backward="scheduled", workers="always")
    raised = threading.Event()
    pipe[0].armed["forward", 2] = BoomError("later")
    pipe[1].armed["forward", 0] = BoomError("first")
    pipe[0].before = lambda i: raised.set() if i == 2 else None
    pipe[1].before = lambda _i: None if raised.wait(timeout=30) else pytest.fail("(2, 0) waits for (0, 1)")
    with pytest.raises(BoomError, match="first"):
        step(pipe)
    assert_works(pipe)


def seen_by(pipe) -> set[tuple[int, int]]:
    return {(i, layer.j) for layer in pipe for i in layer.seen}


@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("clock_cycle", [True, False])
@pytest.mark.parametrize("failing", [(0, 0), (1, 1), (0, 2), (3, 2)])
def test_its_cycle_ends_and_later_ones_do_not_run(failing, clock_cycle, workers):
    pipe = armed_pipe(workers=workers, components=Components(clock_cycle=clock_cycle))
    i, j = failing
    pipe[j].armed["forward", i] = BoomError()
    with pytest.raises(BoomError):
        pipe(numbered(M))
    assert seen_by(pipe) == tasks_before(failing, clock_cycle=clock_cycle)


@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("failing", [(0, 0), (1, 1), (0, 2), (3, 2)])
def test_with_a_schedule_what_comes_before_it_runs_and_what_needs_it_does_not(failing, workers):
    """One thread stops there; others may have gone on."""
    pipe = armed_pipe(workers=workers, schedule="gpipe")
    i, j = failing
    pipe[j].armed["forward", i] = BoomError()
    with pytest.raises(BoomError):
        pipe(numbered(M))
    order = [(action.i, action.j) for action in merged_order(named_schedule("gpipe", M, N, N)) if action.kind == "F"]
    before = set(order[: order.index(failing) + 1])
    assert before <= seen_by(pipe)
    assert seen_by(pipe).isdisjoint((i, later) for later in range(j + 1, N))
    if workers == "never":
        assert seen_by(pipe) == before
    assert_works(pipe)


@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
def test_the_caller_gets_the_exception_only_when_the_cycle_has_ended(backward):
    """No task may still run on tensors that the caller may now change."""
    pipe = armed_pipe(backward=backward)
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
        step(pipe)
    assert ended == [0]
    assert_works(pipe)


def test_an_observer_sees_the_end_of_a_failing_task():
    pipe = armed_pipe()
    pipe[1].armed["forward", 1] = BoomError()
    with pipe.observe(watch := Watch()), pytest.raises(BoomError):
        step(pipe)
    assert all(seen.finished for seen in watch.seen)


@pytest.mark.parametrize("clock_cycle", [True, False])
def test_a_wrong_last_layer_is_named(clock_cycle):
    class Text(nn.Module):
        def forward(self, x):
            return "text"

    pipe = on_cpu(nn.Sequential(Text()), [1], chunks=2, components=Components(clock_cycle=clock_cycle))
    with pytest.raises(TypeError, match="output of the last layer must be a tensor or a tuple of tensors, got str"):
        pipe(numbered(2))


FAILING = {
    "forward": [("forward", 1, 1)],
    "recompute": [("recompute", 1, 1)],
    "backward": [("backward", 1, 1)],
    # one surfaces, and nobody takes the others
    "a whole cycle": [("forward", 2 - j, j) for j in range(N)],
}


@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("failing", FAILING)
@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
def test_what_failed_is_free_without_the_collector(backward, failing, checkpoint, workers, no_gc):
    """Memory that ran out must be there again for whoever catches it and tries with less."""
    if failing == "recompute" and checkpoint == "never":
        pytest.skip("nothing is recomputed")
    pipe = armed_pipe(checkpoint=checkpoint, workers=workers, backward=backward)
    held = []
    for layer in pipe:
        layer.register_forward_pre_hook(lambda _layer, given: held.append(weakref.ref(given[0])))
        layer.register_forward_hook(lambda _layer, _given, output: held.append(weakref.ref(output)))
    for phase, i, j in FAILING[failing]:
        pipe[j].armed[phase, i] = BoomError()
    with pytest.raises(BoomError):
        step(pipe)
    for layer in pipe:
        layer.armed.clear()
    assert held
    held.append(weakref.ref(pipe))
    del pipe, layer
    # What autograd had yet to run stays in its queue until the next backward pass.
    torch.ones(1, requires_grad=True).sum().backward()
    assert [each for each in held if each() is not None] == []


@pytest.fixture
def no_worker_left():
    """Every thread that the test starts ends with its batch, without the collector."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        # that of the batch gives its result right before it ends
        thread.join(timeout=30)
        assert thread.name == "gpipe-batch"
        assert not thread.is_alive()


@pytest.mark.parametrize("components", FACTORIAL, ids=label)
@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
def test_many_failures_leave_no_thread_behind(backward, components, no_gc, no_worker_left):
    pipe = armed_pipe(components=components, backward=backward, workers="always")
    for _ in range(5):
        pipe[1].armed["forward", 1] = BoomError()
        with pytest.raises(BoomError):
            step(pipe)
    pipe[1].armed.clear()


@pytest.mark.parametrize("components", FACTORIAL, ids=label)
@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
def test_many_steps_leave_no_thread_behind(backward, components, no_gc, no_worker_left):
    pipe = armed_pipe(components=components, backward=backward, workers="always")
    for _ in range(5):
        step(pipe)
