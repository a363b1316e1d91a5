"""The flags of a task are those of the thread that runs it."""

from __future__ import annotations

import threading

import torch

from gpipe_bench.engine.context import ExecutionContext, is_checkpointing, is_recomputing


def flags():
    return is_checkpointing(), is_recomputing()


def applied(**options):
    return ExecutionContext.capture([torch.device("cpu")]).applied(**options)


def test_blocks_nest():
    seen = [flags()]
    with applied(checkpointing=True):
        seen.append(flags())
        with applied(recomputing=True):
            seen.append(flags())
        seen.append(flags())
    assert [*seen, flags()] == [(False, False), (True, False), (False, True), (True, False), (False, False)]


def test_grad_mode_comes_and_goes_with_them():
    seen = [torch.is_grad_enabled()]
    with applied(checkpointing=True):
        seen.append(torch.is_grad_enabled())
        with applied(recomputing=True):
            seen.append(torch.is_grad_enabled())
        seen.append(torch.is_grad_enabled())
    assert [*seen, torch.is_grad_enabled()] == [True, False, True, False, True]


def test_another_thread_has_flags_of_its_own():
    seen = []

    def other():
        seen.append(flags())
        with applied(checkpointing=True):
            entered.set()
            left.wait(timeout=30)
        seen.append(flags())

    entered, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    with applied(recomputing=True):
        thread.start()
        assert entered.wait(timeout=30)
        assert flags() == (False, True)
    left.set()
    thread.join()
    assert seen == [(False, False), (False, False)]
    assert flags() == (False, False)
