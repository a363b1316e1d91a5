"""Who runs the tasks: workers, or the calling thread where tasks are small.

Layers that have to be slow in one place sleep there, for much longer than anything else lasts.
"""

from __future__ import annotations

import copy
import pickle
import threading
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_bench import Pipe
from gpipe_bench.engine import granularity
from gpipe_bench.engine.granularity import LONGEST_CYCLE_S, LONGEST_TASK_S, Contest, Contests
from tests.engine.support import (
    MODES,
    Identity,
    Mix,
    Probe,
    Watch,
    numbered,
    on_cpu,
    probe_pipe,
)

M, N = 4, 3
MAIN = threading.main_thread().name
BACKWARDS = ("autograd", "scheduled")


class Sleeper(nn.Module):
    """Notes the thread of each pass; sleeps in workers, in the calling thread, or in both, forward and backward."""

    def __init__(self, threads: list[str], *, worker_s: float = 0, caller_s: float = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.threads, self.worker_s, self.caller_s = threads, worker_s, caller_s

    def note(self) -> None:
        name = threading.current_thread().name
        self.threads.append(name)
        time.sleep(self.caller_s if name == MAIN else self.worker_s)

    def forward(self, x):
        self.note()
        return Identity.apply(x * self.weight, self.note)


def places(steps: int, backward: str, **sleeps: float) -> tuple[list[bool], list[bool]]:
    """For each step, whether its forward and its backward pass ran in the calling thread."""
    threads: list[str] = []
    pipe = on_cpu(nn.Sequential(*(Sleeper(threads, **sleeps) for _ in range(2))), [1, 1], chunks=2,
                  checkpoint="never", backward=backward)  # fmt: skip
    seen = []
    for _ in range(steps):
        output = pipe(torch.ones(2, 1))
        forward = threads.copy()
        threads.clear()
        output.sum().backward()
        assert len({name == MAIN for name in forward}) == 1
        seen.append((forward[0] == MAIN, threads[0] == MAIN))
        threads.clear()
    forwards, backwards = zip(*seen, strict=True)
    return list(forwards), list(backwards)


@pytest.fixture
def always_tried(monkeypatch):
    """However slow this machine is now."""
    monkeypatch.setattr(granularity, "LONGEST_CYCLE_S", float("inf"))
    monkeypatch.setattr(granularity, "LONGEST_TASK_S", float("inf"))


@pytest.mark.parametrize("backward", BACKWARDS)
def test_long_tasks_are_tried_there_once(backward, monkeypatch):
    monkeypatch.setattr(granularity, "LONGEST_CYCLE_S", float("inf"))
    forwards, backwards = places(6, backward, caller_s=3 * LONGEST_TASK_S)
    assert forwards == [False, False, True, False, False, False]
    assert backward == "autograd" or backwards == forwards


@pytest.mark.usefixtures("always_tried")
@pytest.mark.parametrize("backward", BACKWARDS)
def test_tasks_that_are_faster_in_the_calling_thread_stay_there(backward):
    forwards, backwards = places(6, backward, worker_s=0.02)
    assert forwards == [False, False, True, True, True, True]
    assert backward == "autograd" or backwards == forwards


@pytest.mark.usefixtures("always_tried")
@pytest.mark.parametrize("backward", BACKWARDS)
def test_tasks_that_are_slower_there_are_tried_twice(backward):
    forwards, backwards = places(9, backward, caller_s=0.02)
    assert forwards == [False, False, True, False, True, False, False, False, False]
    assert backward == "autograd" or backwards == forwards


@pytest.mark.parametrize("backward", BACKWARDS)
def test_long_tasks_are_not_tried_there(backward):
    sleep = 3 * LONGEST_CYCLE_S
    forwards, backwards = places(5, backward, worker_s=sleep, caller_s=sleep)
    assert not any(forwards)
    assert backward == "autograd" or not any(backwards)


@pytest.fixture
def caller_preferred(monkeypatch):
    """Every contest is for the calling thread, from the first batch on."""
    monkeypatch.setattr(Contest, "inline", lambda _: True)
    monkeypatch.setattr(Contest, "note", lambda *_, **__: None)


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def autocast_of_cuda():
    """Without asking whether there is a GPU."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def threads_of_step(context=None, *, m=M, **options) -> set[str]:
    """The threads in which layers compute, forward and, if scheduled, backward."""
    threads: dict[str, str] = {}
    pipe = probe_pipe(N, [], threads, chunks=m, **options)
    with context(pipe) if context else nullcontext():
        pipe(numbered(m)).sum().backward()
    return {thread for name, thread in threads.items() if name[0] == "F" or options.get("backward") == "scheduled"}


WORKERS = {f"gpipe-worker-{j}" for j in range(N)}


@pytest.mark.usefixtures("caller_preferred")
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("checkpoint", MODES)
def test_nothing_else_keeps_the_calling_thread_from_it(checkpoint, backward):
    assert threads_of_step(checkpoint=checkpoint, backward=backward) == {MAIN}


@pytest.mark.usefixtures("caller_preferred")
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize(
    "context",
    [
        lambda pipe: pipe.observe(Watch()),
        lambda _: Nothing(),
        lambda _: torch.device("cpu"),
        lambda _: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        lambda _: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
        lambda _: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda _: autocast_of_cuda(),
    ],
    ids=[
        "observed",
        "dispatch mode",
        "default device",
        "hooks for saved tensors",
        "no such hooks",
        "autocast",
        "autocast elsewhere",
    ],
)
def test_what_workers_do_not_see_keeps_tasks_with_them(context, backward):
    assert threads_of_step(context, backward=backward) == WORKERS


@pytest.mark.usefixtures("caller_preferred")
@pytest.mark.parametrize(
    "context",
    [Nothing, lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["dispatch mode", "autocast"],
)
def test_a_mode_around_the_backward_pass_alone_keeps_that_with_workers(context):
    threads: dict[str, str] = {}
    output = probe_pipe(N, [], threads, chunks=M, checkpoint="always", backward="scheduled")(numbered(M))
    with context():
        output.sum().backward()
    assert {thread for name, thread in threads.items() if name[0] == "F"} == {MAIN}
    assert {thread for name, thread in threads.items() if name[0] in "RB"} == WORKERS


@pytest.mark.usefixtures("caller_preferred")
def test_a_pipeline_in_a_layer_of_another_keeps_its_workers():
    threads: dict[str, str] = {}
    inner = probe_pipe(N, [], threads, chunks=1)
    outer = on_cpu(nn.Sequential(inner, Probe(0, [])), [1, 1], chunks=2)
    outer(numbered(2)).sum().backward()
    assert MAIN in {thread for name, thread in threads.items() if name[0] == "F"}  # one micro-batch: nothing shared
    threads.clear()
    inner.chunks = 2
    outer(numbered(2, 2)).sum().backward()
    assert {thread for name, thread in threads.items() if name[0] == "F"} == WORKERS


@pytest.mark.usefixtures("caller_preferred")
@pytest.mark.parametrize(("backward", "expected"), [("autograd", WORKERS), ("scheduled", {MAIN})])
def test_workers_stay_where_nodes_cannot_be_numbered(monkeypatch, backward, expected):
    monkeypatch.setattr("gpipe_bench.engine.pipeline.can_renumber", lambda: False)
    assert threads_of_step(backward=backward) == expected


@pytest.mark.parametrize("backward", BACKWARDS)
def test_always_and_never_are_what_they_say(backward):
    for _ in range(5):
        assert threads_of_step(workers="always", backward=backward) == WORKERS
        assert threads_of_step(workers="never", backward=backward) == {MAIN}


def test_never_holds_for_pipe_too():
    threads: dict[str, str] = {}
    pipe = Pipe(nn.Sequential(Probe(0, [], threads), Probe(1, [], threads)), M, balance=[1, 1], workers="never")
    pipe(numbered(M))
    assert set(threads.values()) == {MAIN}


def test_a_wrong_choice_is_named():
    with pytest.raises(ValueError, match="workers must be one of auto, always, never, got 'sometimes'"):
        probe_pipe(2, [], workers="sometimes")


@pytest.mark.parametrize("make", [lambda: probe_pipe(2, []), lambda: Pipe(nn.Sequential(Mix(), Mix()), balance=[1, 1])])
def test_a_wrong_choice_is_named_when_it_is_made_later_too(make):
    pipe = make()
    pipe.workers = "nevr"
    with pytest.raises(ValueError, match="workers must be one of auto, always, never, got 'nevr'"):
        pipe(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("sleeps", "expected"),
    [({"worker_s": 0.02}, "never"), ({"caller_s": 0.02}, "always"), ({"worker_s": 0.02, "caller_s": 0.02}, "always")],
)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_pipeline_says_who_has_turned_out_to_run_its_tasks(backward, sleeps, expected, monkeypatch):
    if len(sleeps) == 1:
        monkeypatch.setattr(granularity, "LONGEST_CYCLE_S", float("inf"))
    if "caller_s" not in sleeps:
        # A busy machine makes a single batch look long, but not every one of three.
        monkeypatch.setattr(granularity, "LONGEST_TASK_S", float("inf"))
    pipe = on_cpu(nn.Sequential(*(Sleeper([], **sleeps) for _ in range(2))), [1, 1], chunks=2, backward=backward)
    assert pipe.settled_workers() == "auto"
    for _ in range(6):
        pipe(torch.ones(2, 1)).sum().backward()
    assert pipe.settled_workers() == expected
    pipe.workers = "always"
    assert pipe.settled_workers() == "always"


def test_contests_that_differ_leave_the_choice_open():
    contests = Contests()
    forward, backward = contests.of("a", 1, 1)
    forward._inline, backward._inline = True, False
    forward._noted = backward._noted = True
    assert contests.settled() == "auto"


def test_a_failed_batch_does_not_count(monkeypatch):
    noted = []
    monkeypatch.setattr(Contest, "note", lambda _, seconds, *, inline: noted.append(inline))
    pipe = on_cpu(nn.Sequential(Mix(), Mix()), [1, 1], chunks=2, backward="scheduled")
    with pytest.raises(RuntimeError):
        pipe(torch.ones(2, 5))
    assert noted == []
    pipe(torch.ones(2, 3)).sum().backward()
    assert noted == [False, False]


class FailsBackward(nn.Module):
    def forward(self, x):
        return Identity.apply(x, self.fail)

    def fail(self):
        raise ArithmeticError


@pytest.mark.parametrize("workers", ["auto", "never"])
def test_a_failed_backward_pass_does_not_count(monkeypatch, workers):
    noted = []
    monkeypatch.setattr(Contest, "note", lambda _, seconds, *, inline: noted.append(inline))
    monkeypatch.setattr(Contest, "inline", lambda _: workers == "never")
    pipe = on_cpu(nn.Sequential(Mix(), FailsBackward()), [1, 1], chunks=2, backward="scheduled")
    output = pipe(torch.ones(2, 3))
    with pytest.raises(ArithmeticError):
        output.sum().backward()
    assert len(noted) == 1


def test_new_layers_are_tried_anew():
    pipe = on_cpu(nn.Sequential(Mix(), Mix()), [1, 1], chunks=2)
    pipe(torch.ones(2, 3))
    before = pipe._contests
    pipe(torch.ones(2, 3))
    assert pipe._contests is before
    pipe[1] = Mix()
    pipe(torch.ones(2, 3))
    assert pipe._contests is not before


def test_copies_know_the_choice_and_nothing_of_the_times():
    pipe = on_cpu(nn.Sequential(Mix(), Mix()), [1, 1], chunks=2, workers="never")
    pipe(torch.ones(2, 3))
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert other.workers == "never"
        assert not other._contests._kinds
