"""After a failure no process, thread or port of a pipeline is left."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench.distributed import PeerError, Pipe
from tests.distributed.ranks import die, run_processes
from tests.distributed.test_failures import BoomError, Layer

SIZE = 3
pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc/net/tcp")


def listening(inodes=None):
    """Ports on which this machine listens, or only those of some sockets."""
    tables = [table for name in ("tcp", "tcp6") for table in [Path(f"/proc/net/{name}")] if table.exists()]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and (inodes is None or row[9] in inodes)}


def own_ports():
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    return listening(inodes)


def threads():
    return {entry.name for entry in Path("/proc/self/task").iterdir()}


def pipeline(burn=None, number=3, **options):
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3) for _ in range(SIZE)]
    if burn is not None:
        layers[1] = Layer(burn, number)
    return Pipe(nn.Sequential(*layers), [1] * SIZE, chunks=4, **options)


def fail():
    raise BoomError


def failing(rank, burn):
    """What is left after a failed step, and the ports that were open before."""
    # The first backward pass of a process starts threads of autograd.
    torch.ones(1, requires_grad=True).sum().backward()
    before = own_ports(), threads()
    pipe = pipeline(burn)
    ports = own_ports()
    with suppress(PeerError, BoomError):
        pipe.step(torch.ones(8, 3), torch.ones(8, 3), functional.mse_loss)
    pipe.close()
    return ports - before[0], own_ports() - before[0], sorted(threads() - before[1])


@pytest.mark.parametrize("burn", [fail, die])
def test_nothing_is_left_of_a_pipeline_that_failed(burn, tmp_path):
    results = run_processes(SIZE, tmp_path, failing, burn)
    assert (results.pop(1) is None) == (burn is die)
    for opened, ports, left in results:
        assert opened
        assert ports == set()
        assert left == []
    assert multiprocessing.active_children() == []
    assert not listening() & {port for opened, _, _ in results for port in opened}
