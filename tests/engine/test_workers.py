"""Workers that outlive a step: who has them, when they begin anew, and that nothing comes from them too late."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from gpipe_bench.engine.worker import WorkerPool
from tests.engine.support import on_cpu


def made():
    """Two partitions of two layers, with workers, and a batch of four micro-batches."""
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).double()
    pipe = on_cpu(layers, [2, 2], chunks=4, backward="scheduled", workers="always")
    return pipe, torch.rand(8, 3, dtype=torch.float64)


def _workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpipe-worker")]


def test_no_gradient_comes_after_an_interrupt(monkeypatch):
    before = set(_workers())
    pipe, batch = made()
    loss = pipe(batch).sum()
    begun = threading.Event()

    def linger(grad):
        begun.set()
        time.sleep(0.05)
        return grad

    for parameter in pipe.parameters():
        parameter.register_hook(linger)

    def interrupted(self, index):
        begun.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr("gpipe_bench.engine.worker.Workers.collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert begun.is_set()
    assert set(_workers()) <= before, "a worker still runs a task, whose gradients would come later"


@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
def test_no_task_runs_on_after_an_interrupt_of_the_forward_pass(backward, monkeypatch):
    """The thread that waits is interrupted: tasks must not go on with tensors that the caller may change now."""
    before = set(_workers())
    begun, ended = [], []

    class Slow(nn.Module):
        def forward(self, x):
            begun.append(x)
            time.sleep(0.05)
            ended.append(x)
            return x + 1

    def interrupted(self, index):
        while not begun:
            time.sleep(0.001)
        raise KeyboardInterrupt

    pipe = on_cpu(nn.Sequential(Slow(), Slow()), [1, 1], chunks=4, backward=backward, workers="always")
    monkeypatch.setattr("gpipe_bench.engine.worker.Workers.collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipe(torch.rand(4, 3, requires_grad=True))
    assert begun
    assert len(begun) == len(ended)
    assert set(_workers()) <= before


def test_a_kept_loss_keeps_no_workers():
    before = set(_workers())
    pipe, batch = made()
    loss = pipe(batch).sum()
    loss.backward()
    assert set(_workers()) - before
    gone = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert gone() is None
    for thread in set(_workers()) - before:
        thread.join(10)
    assert set(_workers()) <= before
    assert loss.grad_fn is not None


class TestWorkerPool:
    def test_another_number_of_threads_inside_operations_means_other_workers(self):
        before = torch.get_num_threads()
        pool = WorkerPool()
        try:
            torch.set_num_threads(2)
            with pool.lend([0]) as workers:
                workers.submit(0, torch.get_num_threads)
                assert workers.collect(0) == (2, None)
            torch.set_num_threads(1)
            with pool.lend([0]) as workers:
                workers.submit(0, torch.get_num_threads)
                assert workers.collect(0) == (1, None)
        finally:
            torch.set_num_threads(before)

    def test_borrowers_at_the_same_time_get_different_workers(self):
        pool = WorkerPool()
        with pool.lend([0]) as one, pool.lend([0]) as other:
            assert one is not other

    def test_workers_come_back(self):
        pool = WorkerPool()
        with pool.lend([0, 1]) as one:
            pass
        with pool.lend([0, 1]) as other:
            assert one is other

    def test_after_an_exception_they_do_not(self):
        pool = WorkerPool()
        with pytest.raises(ZeroDivisionError), pool.lend([0]) as one:
            raise ZeroDivisionError
        with pool.lend([0]) as other:
            assert one is not other

    def test_in_a_forked_process_there_are_new_ones(self, monkeypatch):
        pool = WorkerPool()
        with pool.lend([0]) as one:
            pass
        monkeypatch.setattr("os.getpid", lambda: -1)
        with pool.lend([0]) as other:
            assert one is not other
        # Here, unlike in a forked process, the thread of the first is still there.
        one.dismiss()
