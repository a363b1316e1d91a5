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
from gpipe_bench.schedules.program import Plan
from tests.cover import cover
from tests.engine.steps import step
from tests.engine.support import MODES, SOME, Do, Mix, crossing_model, label, numbered, on_cpu, probe_pipe, score

M, N = 4, 3
both = pytest.mark.parametrize("schedule", [None, "gpipe"])


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("gpipe-") and thread.is_alive()}


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


def test_every_partition_on_the_cpu_has_a_worker():
    forward, backward = names_of_a_step()
    assert forward == {f"F{i},{j}": f"gpipe-worker-{j}" for i in range(M) for j in range(N)}
    assert set(backward.values()) == {threading.current_thread().name}  # autograd's own thread for the CPU


@both
@pytest.mark.parametrize("options", [{"workers": "never"}, {"components": Components(clock_cycle=False)}], ids=str)
def test_the_calling_thread_does_it_all(options, schedule):
    here = threading.current_thread().name
    assert {name for each in names_of_a_step(schedule=schedule, **options) for name in each.values()} == {here}


@both
def test_one_partition_has_nothing_to_run_beside(schedule):
    where: dict[str, str] = {}
    probe_pipe(1, [], where, chunks=M, schedule=schedule)(numbered(M)).sum().backward()
    assert set(where.values()) == {threading.current_thread().name}


@both
def test_workers_use_as_many_threads_within_an_operator_as_the_caller(schedule):
    seen = set()

    def asked(x):
        seen.add(torch.get_num_threads())
        return x

    pipe = on_cpu(nn.Sequential(Do(asked), Do(asked)), [1, 1], chunks=2, schedule=schedule)
    for count in (2, 1):
        seen.clear()
        torch.set_num_threads(count)
        pipe(torch.ones(2, 3))
        assert seen == {count}


# --- they end with the batch -----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_kept_loss_keeps_no_thread(checkpoint, schedule):
    pipe = on_cpu(crossing_model(), [2, 2, 3], chunks=M, checkpoint=checkpoint, schedule=schedule)
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


@pytest.mark.parametrize(("phase", "schedule"), [("forward", None), ("forward", "gpipe"), ("backward", "gpipe")])
def test_an_interrupt_comes_out_when_no_task_runs_any_more(phase, schedule, interrupt):
    """Tasks must not go on with tensors that the caller may change now, nor bring gradients later."""
    layer = Interrupted(phase, interrupt)
    pipe = on_cpu(
        nn.Sequential(nn.Identity(), layer, nn.Tanh()), [1, 1, 1], chunks=M, checkpoint="never", schedule=schedule
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
def test_an_interrupt_while_the_first_thread_starts_comes_out_when_no_task_runs(schedule, monkeypatch):
    """Starting a thread means waiting for it, and it may be in the middle of the batch by then."""
    begun, ended, working = [], [], threading.Event()
    start = threading.Thread.start

    def worked(x):
        begun.append(1)
        working.set()
        time.sleep(0.05)  # enough for a caller that does not wait for this task
        ended.append(1)
        return x

    def interrupted(self):
        start(self)
        if self.name == "gpipe-batch":
            working.wait()
            raise KeyboardInterrupt

    pipe = on_cpu(nn.Sequential(Do(worked), Do(worked)), [1, 1], chunks=M, schedule=schedule)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipe(torch.ones(M, 3))
    assert begun == ended
    assert_none_left()
    pipe(torch.ones(M, 3))
    assert len(ended) >= 2 * M


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
    ("components", "checkpoint", "dropout", "schedule"),
    cover(product(SOME, MODES, [0.0, 0.4], [None, "gpipe"])),
    ids=label,
)
def test_results_are_the_same_to_the_bit(components, checkpoint, dropout, schedule):
    options = {"checkpoint": checkpoint, "components": components, "schedule": schedule, "dropout": dropout}
    found, expected = outcome("never", **options), outcome("always", **options)
    # Without checkpoints autograd orders the nodes of layers by their numbers, and so the terms of a sum of gradients.
    same = torch.allclose if (checkpoint, schedule) == ("never", None) else torch.equal
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
def test_the_calling_thread_is_left_as_it_was(context, checkpoint, fails, schedule):
    last = Do(failed) if fails else nn.Linear(1, 1)
    pipe = on_cpu(nn.Sequential(nn.Linear(1, 1), nn.Dropout(), last), [1, 1, 1], chunks=M, checkpoint=checkpoint,
                  schedule=schedule, workers="never")  # fmt: skip
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
    lists = pipe._pipeline.executor.lists(Plan(4, 2, checkpoint="never"))
    assert lists.positions[Action("F", 0, 0)] == 0
    assert not hasattr(lists, "__dict__")
    sources = Path(worker.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "cached_property" in path.read_text()] == []
