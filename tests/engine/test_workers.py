"""The threads of a batch: which there are, that they end with it, and that nothing shows who ran a task."""

from __future__ import annotations

import copy
import signal
import threading
import time
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe, is_checkpointing, is_recomputing
from gpipe_bench.engine import worker
from gpipe_bench.schedules import Action
from tests.cover import cover
from tests.engine.steps import step
from tests.engine.support import MODES, SOME, Do, Mix, crossing_model, label, numbered, on_cpu, probe_pipe, score

M, N = 4, 3
both = pytest.mark.parametrize("backward", ["autograd", "scheduled"])


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("gpipe-")}


def assert_none_left() -> None:
    """The thread of a batch hands its result over before it ends; all others have ended before that."""
    assert {thread.name for thread in threads()} <= {"gpipe-batch"}
    for thread in threads():
        thread.join(timeout=30)
        assert not thread.is_alive()


# --- which there are -------------------------------------------------------------------------------------------------


def names_of_a_step(**options) -> tuple[dict[str, str], dict[str, str]]:
    """The thread of each task, forward and backward."""
    where: dict[str, str] = {}
    pipe = probe_pipe(N, [], where, chunks=M, checkpoint="never", **options)
    pipe(numbered(M)).sum().backward()
    return tuple({name: thread for name, thread in where.items() if name[0] == letter} for letter in "FB")


@pytest.mark.parametrize("workers", ["always", "auto"])
def test_every_partition_on_the_cpu_has_a_worker(workers):
    forward, backward = names_of_a_step(workers=workers)
    assert forward == {f"F{i},{j}": f"gpipe-worker-{j}" for i in range(M) for j in range(N)}
    assert set(backward.values()) == {threading.current_thread().name}  # autograd's own thread for the CPU


@both
@pytest.mark.parametrize("options", [{"workers": "never"}, {"components": Components(clock_cycle=False)}], ids=str)
def test_the_calling_thread_does_it_all(options, backward):
    here = threading.current_thread().name
    assert {name for each in names_of_a_step(backward=backward, **options) for name in each.values()} == {here}


@both
def test_one_partition_has_nothing_to_run_beside(backward):
    where: dict[str, str] = {}
    probe_pipe(1, [], where, chunks=M, backward=backward)(numbered(M)).sum().backward()
    assert set(where.values()) == {threading.current_thread().name}


@both
def test_workers_use_as_many_threads_within_an_operator_as_the_caller(backward):
    seen = set()

    def asked(x):
        seen.add(torch.get_num_threads())
        return x

    pipe = on_cpu(nn.Sequential(Do(asked), Do(asked)), [1, 1], chunks=2, backward=backward)
    for count in (2, 1):
        seen.clear()
        torch.set_num_threads(count)
        pipe(torch.ones(2, 3))
        assert seen == {count}


# --- they end with the batch -----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_kept_loss_keeps_no_thread(checkpoint, backward):
    pipe = on_cpu(crossing_model(), [2, 2, 3], chunks=M, checkpoint=checkpoint, backward=backward)
    loss = score(pipe(torch.ones(8, 3, dtype=torch.float64)))
    assert_none_left()
    loss.backward()
    assert_none_left()


@pytest.fixture
def interrupt():
    """What interrupts the main thread, from another, as the terminal does; returns when it has been noticed."""
    noticed = threading.Event()

    def handle(*_):
        if not noticed.is_set():
            noticed.set()
            raise KeyboardInterrupt

    def send():
        # a signal that comes right before a thread begins to wait is seen only when it has waited
        while not noticed.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            noticed.wait(timeout=0.1)

    before = signal.signal(signal.SIGUSR1, handle)
    yield send
    signal.signal(signal.SIGUSR1, before)


class Interrupted(nn.Module):
    """Interrupts the caller from micro-batch 1, and then works on for a while."""

    def __init__(self, phase: str, interrupt) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.phase, self.interrupt = phase, interrupt
        self.begun, self.ended = [], []

    def work(self, phase: str, i: int) -> None:
        self.begun.append(i)
        if (phase, i) == (self.phase, 1):
            self.interrupt()
            time.sleep(0.05)  # enough for a caller that does not wait for this task
        self.ended.append(i)

    def forward(self, x):
        i = int(x.detach().flatten()[0])
        self.work("forward", i)
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda _: self.work("backward", i))
        return y


@pytest.mark.parametrize(
    ("phase", "backward"), [("forward", "autograd"), ("forward", "scheduled"), ("backward", "scheduled")]
)
def test_an_interrupt_comes_out_when_no_task_runs_any_more(phase, backward, interrupt):
    """Tasks must not go on with tensors that the caller may change now, nor bring gradients later."""
    layer = Interrupted(phase, interrupt)
    pipe = on_cpu(
        nn.Sequential(nn.Identity(), layer, nn.Tanh()), [1, 1, 1], chunks=M, checkpoint="never", backward=backward
    )
    with pytest.raises(KeyboardInterrupt):
        pipe(numbered(M)).sum().backward()
    assert 1 in layer.begun
    assert layer.begun == layer.ended
    assert_none_left()
    layer.phase = ""
    pipe.zero_grad()
    pipe(numbered(M)).sum().backward()
    assert layer.weight.grad is not None


@both
def test_an_interrupt_while_the_first_thread_starts_comes_out_when_no_task_runs(backward, monkeypatch):
    """Starting a thread means waiting for it, and it may be in the middle of the batch by then."""
    begun, ended = [], []
    start = worker.start_new_thread

    def worked(x):
        begun.append(1)
        time.sleep(0.05)  # enough for a caller that does not wait for this task
        ended.append(1)
        return x

    def interrupted(*given):
        start(*given)
        time.sleep(0.01)
        raise KeyboardInterrupt

    pipe = on_cpu(nn.Sequential(Do(worked), Do(worked)), [1, 1], chunks=M, backward=backward)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "start_new_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipe(torch.ones(M, 3))
    assert begun == ended
    assert_none_left()
    pipe(torch.ones(M, 3))
    assert len(ended) >= 2 * M


@both
@pytest.mark.parametrize("starting", [False, True])
def test_after_an_interrupt_no_thread_starts_any_more(backward, starting, monkeypatch):
    """The interrupt comes before the thread that starts the first one runs, or while it does so."""
    late, started, begun = [], [], threading.Event()
    start, start_new_thread = threading.Thread.start, worker.start_new_thread

    def slow(self):
        begun.set()
        time.sleep(0.05)
        started.append(self)
        start(self)

    def interrupted(job, given):
        late.append(job)
        if starting:
            start_new_thread(job, given)
            begun.wait()
        raise KeyboardInterrupt

    pipe = on_cpu(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=M, backward=backward)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "start_new_thread", interrupted)
        patch.setattr(threading.Thread, "start", slow)
        with pytest.raises(KeyboardInterrupt):
            pipe(torch.ones(M, 3))
        assert_none_left()
        count = len(started)
        late[0]()
        time.sleep(0.1)
        assert len(started) == count == starting


@both
def test_no_thread_is_started_where_an_interrupt_may_come(backward, monkeypatch):
    """An interrupt within ``Thread.start()`` can leave an object of Python's threads, or a thread that waits."""
    starters = []
    start = threading.Thread.start

    def noted(self):
        starters.append(threading.current_thread())
        start(self)

    monkeypatch.setattr(threading.Thread, "start", noted)
    probe_pipe(N, [], chunks=M, backward=backward)(numbered(M)).sum().backward()
    assert starters
    assert threading.main_thread() not in starters


def test_a_thread_that_cannot_be_started_is_an_error(monkeypatch):
    def refuse(_self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        probe_pipe(N, [], chunks=M)(numbered(M))


# --- nothing shows who ran a task ------------------------------------------------------------------------------------


def outcome(workers: str, steps: int = 2, *, dropout: float, **options):
    """Losses, gradients, running statistics and the generator's state after some steps."""
    torch.manual_seed(5)
    layers = [*crossing_model(), nn.Dropout(dropout), nn.BatchNorm1d(3), Mix()]
    pipe = on_cpu(nn.Sequential(*layers).double(), [2, 2, 3, 3], chunks=M, deferred_batch_norm=True, workers=workers,
                  **options)  # fmt: skip
    losses = []
    for _ in range(steps):
        loss = score(pipe(torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)))
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in pipe.parameters()), *pipe.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize(
    ("components", "checkpoint", "dropout", "backward"),
    cover(product(SOME, MODES, [0.0, 0.4], ["autograd", "scheduled"]), together=3),
    ids=label,
)
def test_results_are_the_same_to_the_bit(components, checkpoint, dropout, backward):
    options = {"checkpoint": checkpoint, "components": components, "backward": backward, "dropout": dropout}
    found, expected = outcome("never", **options), outcome("always", **options)
    # Without checkpoints autograd orders the nodes of layers by their numbers, and so the terms of a sum of gradients.
    same = torch.allclose if (checkpoint, backward) == ("never", "autograd") else torch.equal
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


class BoomError(Exception):
    pass


def failed(x):
    raise BoomError


def modes() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_num_threads(),
        is_checkpointing(),
        is_recomputing(),
    )


@both
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize(
    "context",
    [nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["plain", "no_grad", "inference", "autocast"],
)
def test_the_calling_thread_is_left_as_it_was(context, checkpoint, fails, backward):
    last = Do(failed) if fails else nn.Linear(1, 1)
    pipe = on_cpu(nn.Sequential(nn.Linear(1, 1), nn.Dropout(), last), [1, 1, 1], chunks=M, checkpoint=checkpoint,
                  backward=backward, workers="never")  # fmt: skip
    with context():
        before = modes()
        with pytest.raises(BoomError) if fails else nullcontext():
            output = pipe(torch.ones(M, 1))
            if output.requires_grad:
                output.sum().backward()
        assert modes() == before


@pytest.fixture
def grad_mode():
    """Whatever a test leaves behind."""
    yield
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("grad_mode")
@pytest.mark.parametrize("schedule", [None, "gpipe", "zb_h1"])
@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_layer_that_leaves_grad_mode_off_does_so_for_its_own_task_only(checkpoint, workers, schedule):
    """Also the first one, whose output is a copy of the batch."""

    def off(x):
        torch.set_grad_enabled(False)
        return x

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Identity(), Mix(), Mix())
    layers = nn.Sequential(Do(off), nn.Sequential(copy.deepcopy(plain[1]), Do(off)), copy.deepcopy(plain[2]))
    pipe = on_cpu(layers, [1, 1, 1], chunks=M, checkpoint=checkpoint, schedule=schedule, workers=workers)
    x, target = torch.ones(M, 3).requires_grad_(), torch.ones(M)
    expected = step(plain, x, target)
    for called in [False] if schedule == "zb_h1" else [True, False]:
        found = step(pipe, x, target, called=called)
        assert torch.is_grad_enabled()
        torch.testing.assert_close([*found.gradients.values()], [*expected.gradients.values()])
        torch.testing.assert_close(found.input_gradients, expected.input_gradients)


def test_no_object_that_threads_share_gets_its_dict_late():
    """Python 3.11 makes the ``__dict__`` of an instance when it is first asked for, as by ``cached_property``.

    If a garbage collection begins meanwhile and lets another thread ask, each gets one, and they share their values,
    which are free when the first one goes.
    """
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu"] * 2, schedule="1f1b")
    lists = pipe._pipeline.choice.lists(4, 0, early_recompute=True)
    assert lists.places[Action("F", 0, 0)] == 0
    assert not hasattr(lists, "__dict__")
    sources = Path(worker.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "cached_property" in path.read_text()] == []
