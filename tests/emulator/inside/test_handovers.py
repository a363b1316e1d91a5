"""Hand-overs between host threads are in a trace: what passes a queue, threads' starts and ends, backward passes."""

from __future__ import annotations

import queue
import threading
import weakref
from concurrent.futures import Future

import pytest
import torch
from torch import nn
from torch.autograd import Variable

from gpipe_bench import GPipe
from gpipe_bench.emulator.handovers import seen
from gpipe_bench.emulator.library import devices, thread_index
from gpipe_bench.emulator.recording import mark, recording
from gpipe_bench.engine import worker

FIRST, SECOND = devices(2)
HAND_OVERS = ("signal", "await", "backward", "backward_end", "mark")


def kinds(trace):
    return [(record.kind, record.version) for record in trace.records if record.kind in HAND_OVERS]


@pytest.mark.parametrize(("module", "name"), [(worker, "SimpleQueue"), (queue, "SimpleQueue"), (queue, "Queue")])
def test_what_passes_a_queue(module, name):
    with seen(), recording() as trace:
        box = getattr(module, name)()
        box.put("x")
        box.put("y")
        assert [box.get(), box.get()] == ["x", "y"]
    (one, first), (two, second), *rest = kinds(trace)
    assert one == two == "signal"
    assert first < second
    assert rest == [("await", first), ("await", second)]


def test_what_was_put_before_has_no_signal():
    box = queue.Queue()
    box.put("x")
    with seen(), recording() as trace:
        box.put("y")
        assert [box.get(), box.get()] == ["x", "y"]
    assert [kind for kind, _ in kinds(trace)] == ["signal", "await"]


def test_futures_take_their_results_by_name_too():
    done, failed = Future(), Future()
    with seen(), recording() as trace:
        done.set_result(result="x")
        failed.set_exception(exception=KeyError("y"))
        assert done.result(timeout=0) == "x"
        with pytest.raises(KeyError):
            failed.result(timeout=0)
    assert [kind for kind, _ in kinds(trace)][:3] == ["signal", "signal", "await"]


def test_threads_start_and_end():
    with seen(), recording() as trace:
        thread = threading.Thread(target=lambda: torch.ones(1, device=FIRST))
        thread.start()
        thread.join()
    here = thread_index()
    found = [(record.kind, record.thread == here) for record in trace.records if record.kind in HAND_OVERS]
    assert found == [("signal", True), ("await", False), ("signal", False), ("await", True)]
    versions = [version for _, version in kinds(trace)]
    assert versions[0] == versions[1]
    assert versions[2] == versions[3]


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            leaf = torch.ones_like(grad).requires_grad_()
            (leaf * 2).sum().backward()
        return grad


def test_rows_of_a_backward_pass_say_to_which_one_they_belong():
    x = torch.ones(2, device=SECOND, requires_grad=True)
    loss = Nested.apply(x * 3).sum()
    with seen(), recording() as trace:
        loss.backward()
        after = x + 1
    assert [kind for kind, _ in kinds(trace)] == ["backward", "backward", "backward_end", "backward_end"]
    outer, inner, *_ = (version for _, version in kinds(trace))
    # The calling thread makes the gradient of the loss before the pass begins.
    found = [(record.backward, record.thread == thread_index()) for record in trace.of("kernel")]
    assert set(found) == {(outer, False), (inner, False), (0, True)}
    del after


def test_passes_of_two_threads_are_told_apart():
    def work(device):
        (torch.ones(2, device=device, requires_grad=True) * 2).sum().backward()

    with seen(), recording() as trace:
        threads = [threading.Thread(target=work, args=(device,)) for device in (FIRST, SECOND)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    passes = {record.device: record.backward for record in trace.of("kernel") if record.backward}
    assert len(set(passes.values())) == 2


def test_a_mark():
    with recording() as trace:
        mark()
    assert [record.kind for record in trace.records] == ["mark"]


def test_a_step_of_the_engine_is_ordered():
    """Each await has its signal before it, and no other thread's work is without a hand-over."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=[FIRST, SECOND], chunks=2)
    with seen(), recording() as trace:
        pipe(torch.ones(4, 3, device=FIRST)).sum().backward()
    signalled = set()
    for record in trace.records:
        if record.kind == "signal":
            signalled.add(record.version)
        assert record.kind != "await" or record.version in signalled
    assert {record.thread for record in trace.of("kernel") if not record.backward} <= {
        record.thread for record in trace.of("await")
    } | {thread_index()}


class Taken:
    """Stands in for a plain queue: another thread takes each item and drops it before the one that puts it goes on."""

    def __init__(self):
        self.freed = False

    def put(self, entry):
        (_, item), entry = entry, None
        found = weakref.ref(item)
        del item
        self.freed = found() is None


def test_a_queue_does_not_hold_what_was_put_into_it():
    with seen():
        box, plain = worker.SimpleQueue(), Taken()
        box._items = plain
        box.put(nn.Identity())
    assert plain.freed


def test_everything_is_restored():
    before = queue.SimpleQueue, worker.SimpleQueue, threading.Thread.start, Variable._execution_engine
    with seen():
        pass
    assert before == (queue.SimpleQueue, worker.SimpleQueue, threading.Thread.start, Variable._execution_engine)
