"""What a worker hands over belongs to the thread that takes it."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref

import pytest

from gpipe_bench.engine import worker

# In a process of its own: once something was compiled, PyTorch's way to evaluate frames holds their arguments longer.
PROGRAM = """
import threading, weakref
from queue import SimpleQueue
from gpipe_bench.engine import worker

freed, found = threading.Event(), []

class Queue(SimpleQueue):
    def put(self, item):  # lets the thread that puts a result wait until the one that takes it has dropped it
        items, is_result = [item], isinstance(item, tuple)
        del item
        super().put(items.pop())
        if is_result:
            found.append(freed.wait(20))

class Made:
    pass

def job():
    made = Made()
    weakref.finalize(made, freed.set)
    return made

worker.SimpleQueue = Queue
workers = worker.Workers([0])
workers.submit(0, job)
workers.collect(0)
workers.end()
assert found == [True], found
"""


def test_a_worker_does_not_hold_a_result_that_it_has_handed_over():
    """Else it would depend on the host which thread frees the memory, and so when."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_thread_whose_start_is_interrupted_keeps_nothing_of_its_job(monkeypatch, no_gc):
    """Python does not forget the object of such a thread, and it may begin yet."""
    interrupted, called = [], []

    def interrupt(thread):
        interrupted.append(thread)
        raise KeyboardInterrupt

    class Job:
        def __call__(self):
            called.append(self)

    job = Job()
    kept = weakref.ref(job)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            worker.in_fresh_thread(job, lambda: None)
    del job
    assert kept() is None
    interrupted[0].start()
    interrupted[0].join()
    assert called == []
