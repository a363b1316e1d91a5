"""What a worker hands over belongs to the thread that takes it."""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue

from torch import nn

from gpipe_bench.engine import worker


def test_a_worker_does_not_hold_a_result_that_it_has_handed_over(monkeypatch):
    """Else it would depend on the host which thread frees the memory, and so when."""
    freed, found = threading.Event(), []

    class Queue(SimpleQueue):
        """Lets the thread that puts a result wait until the one that takes it has dropped it."""

        def put(self, item):
            items, is_result = [item], isinstance(item, tuple)
            del item
            super().put(items.pop())
            if is_result:
                found.append(freed.wait(20))

    def job():
        made = nn.Identity()
        weakref.finalize(made, freed.set)
        return made

    monkeypatch.setattr(worker, "SimpleQueue", Queue)
    workers = worker.Workers([0])
    workers.submit(0, job)
    workers.collect(0)
    workers.end()
    assert found == [True]
