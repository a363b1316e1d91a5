"""Interrupts at any moment of a step, as from the keyboard: nothing of the batch stays, and the next step is right."""

from __future__ import annotations

import dis
import gc
import random
import signal
import sys
import threading

import pytest
import torch
from torch import Tensor, nn

from tests.engine.steps import mean_loss, samples, scheduled, targets
from tests.engine.support import Mix

INTERRUPTS = 10
LONGEST_S = 8e-3
"""A step takes about half of this."""


def live_tensors() -> int:
    gc.collect()
    # not isinstance: it asks objects for __class__, and some lazy modules warn of that
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def running() -> set[threading.Thread]:
    # One whose start() was interrupted may never begin, and has no identifier then.
    return {thread for thread in threading.enumerate() if thread.ident is not None}


@pytest.fixture
def alarm():
    """Interrupts this thread after some time, once; tells whether that time has come."""
    came = threading.Event()

    def handle(*_):
        came.set()
        raise KeyboardInterrupt

    def after(seconds: float) -> threading.Event:
        came.clear()
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return came

    before = signal.signal(signal.SIGALRM, handle)
    yield after
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def called(pipe) -> None:
    mean_loss(pipe(samples(8, 3)), targets(8)).backward()


def stepped(pipe) -> None:
    pipe.step(samples(8, 3), targets(8), mean_loss)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a callback of Python's
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize(
    ("schedule", "train"),
    [(None, called), ("gpipe", called), ("1f1b", stepped), ("zb_v", stepped)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_nothing_stays_of_a_batch_that_is_interrupted(schedule, train, checkpoint, alarm):
    gc.freeze()  # what exists already is out of sight
    torch.manual_seed(3)
    layers = nn.Sequential(*(Mix() for _ in range(4))).double()
    pipe = scheduled(layers, [1] * 4, schedule, chunks=4, checkpoint=checkpoint)
    rng = random.Random(0)
    before = running()
    train(pipe)
    expected = [parameter.grad.clone() for parameter in pipe.parameters()]
    pipe.zero_grad()
    tensors = live_tensors()
    for _ in range(INTERRUPTS):
        try:
            came = alarm(rng.uniform(1e-4, LONGEST_S))
            while not came.is_set():
                train(pipe)
        except KeyboardInterrupt:
            pass
        # the thread of the batch hands its result over right before it ends
        assert {thread.name for thread in running() - before} <= {"gpipe-batch"}
    pipe.zero_grad()
    train(pipe)
    torch.testing.assert_close([parameter.grad for parameter in pipe.parameters()], expected)
    pipe.zero_grad()
    for thread in running() - before:
        thread.join(timeout=30)
    assert running() <= before
    # The batch before may still have held some when they were counted: its thread ends after the call.
    assert live_tensors() <= tensors


def interrupted_at_block(number: int, job) -> bool:
    """Run ``job``, but interrupt this thread at the end of the given ``__enter__``; whether there are so many."""
    entered = 0

    def instruction(frame, event, _argument):
        nonlocal entered
        frame.f_trace_opcodes = True
        if event == "opcode" and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN"):
            entered += 1
            if entered == number:
                raise KeyboardInterrupt
        return instruction

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: instruction(frame, *_) if frame.f_code.co_name == "__enter__" else None)
    try:
        job()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize(
    ("schedule", "train"),
    [(None, called), (None, stepped), ("gpipe", called), ("1f1b", stepped)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_interrupt_between_a_block_and_its_beginning_leaves_grad_mode_on(schedule, train):
    layers = nn.Sequential(nn.BatchNorm1d(3), Mix(), nn.Dropout(), nn.BatchNorm1d(3)).double()
    pipe = scheduled(layers, [2, 2], schedule, chunks=2, checkpoint="always", deferred_batch_norm=True)
    train(pipe)
    left = []
    while interrupted_at_block(len(left) + 1, lambda: train(pipe)):
        left.append(torch.is_grad_enabled())
        torch.set_grad_enabled(True)
    assert len(left) > 2
    assert all(left)
    pipe.zero_grad()
    train(pipe)
    assert all(parameter.grad is not None for parameter in pipe.parameters())
