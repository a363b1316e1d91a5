"""Races of unchanged `torchrun` scripts, whose accesses other ranks may order."""

from __future__ import annotations

import re

import pytest

from gpipe_bench.emulator.build import obstacle
from tests.emulator.test_torchrun import ROOT, line_of, written
from tests.processes import command

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

# Rank 0 overwrites what it sends without waiting for its send: an answer must say that the data has arrived.
ANSWERS = """
def big():
    return torch.zeros(2**20, device="cuda")

def relay(receive):
    if rank == 1:
        receive(big())
        dist.send(big(), 2)
    else:
        dist.recv(big(), 1)
        dist.send(big(), 0)

def tell(synchronize):
    if rank == 1:
        dist.recv(big(), 0)
        synchronize()
    dist.broadcast_object_list(["arrived"], src=1)

kept = []
if rank == 0:
    a, b, c, d = (big() for _ in range(4))
    dist.isend(a, 1)
    dist.recv(big(), 2)
    a.add_(1)
    dist.isend(b, 1)
    dist.recv(big(), 2)
    b.add_(1)  # race
    dist.isend(c, 1)
    dist.broadcast_object_list([None], src=1)
    c.add_(1)
    dist.isend(d, 1)
    dist.broadcast_object_list([None], src=1)
    d.add_(1)  # race
else:
    relay(lambda tensor: dist.recv(tensor, 0))
    # The answer goes on before the data has arrived.
    relay(lambda tensor: kept.append((tensor, dist.irecv(tensor, 0))))
    tell(torch.cuda.synchronize)
    tell(lambda: None)
"""

# Rank 0 lets rank 1 go on when its data has come, which rank 1 sends after that.
CIRCLE = """
x, y = torch.zeros(2**20, device="cuda"), torch.zeros(2**20, device="cuda")
if rank == 0:
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)
    x.sum()  # race
    dist.recv(y, 1)  # receives
    torch.cuda.synchronize()
    dist.broadcast_object_list(["go"], src=0)
else:
    dist.broadcast_object_list([None], src=0)  # waits
    dist.send(y, 0)
"""


def test_an_answer_through_other_ranks_orders_and_only_if_they_have_waited(tmp_path):
    script = written(tmp_path, ANSWERS)
    shown = command(["emulate", "--nproc", 3, "--races", script], ROOT)
    assert shown.returncode == 0, shown.stderr
    lines = script.read_text().splitlines()
    marked = [number for number, line in enumerate(lines, 1) if line.endswith("# race")]
    found = re.findall(
        r"write: add_ on rank 0 stream 0 at .*train.py:(\d+)\n +does not wait for send on rank 0 stream", shown.stdout
    )
    assert [int(number) for number in found] == marked
    assert "\n2 races\n" in shown.stdout


def test_hosts_and_devices_that_wait_for_each_other_hang_with_the_races_until_there(tmp_path):
    script = written(tmp_path, CIRCLE)
    shown = command(["emulate", "--nproc", 2, "--races", script], ROOT)
    assert shown.returncode == 3
    why = "messages of CPU and device wait for each other"
    assert shown.stderr.splitlines()[1:] == [
        f"  rank 0 waits after {line_of(script, 'receives')} for its device: {why}",
        f"  rank 1 waits at {line_of(script, 'waits')} for a message of CPU tensors: {why}",
    ]
    assert re.findall(r"read: sum on rank 0 stream 0 at (\S+)\n", shown.stdout) == [line_of(script, "race")]
