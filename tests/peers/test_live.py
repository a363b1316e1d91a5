"""Live bytes are counted in all threads, for whoever starts them. In a process of its own: counting never ends."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading, torch
from gpipe_bench.bench.peers.live import peak_counter

before = torch.zeros(1000)
counter = peak_counter(["cpu"])
assert counter.peak_bytes() == 0
counter.hold([before])
print(counter.peak_bytes())

def work(numbers, then):
    kept = torch.zeros(numbers)
    then()
    del kept

own = torch.zeros(2000)
inside, done = threading.Event(), threading.Event()
thread = threading.Thread(target=work, args=(4000, lambda: (inside.set(), done.wait())))
thread.start()
inside.wait()
print(counter.peak_bytes())
done.set()
thread.join()
# What the thread held is free: as much again makes no new peak, one more does.
again = torch.zeros(4000)
print(counter.peak_bytes())
more = torch.zeros(1)
print(counter.peak_bytes())
x = torch.zeros(100, requires_grad=True)
view = more.view(1)
(x * 2).sum().backward()
print(counter.peak_bytes() > 4 * 7000 + 4, view is not more)
"""


def test_peaks_of_all_threads_are_exact():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["4000", "28000", "28000", "28004", "True", "True"]
