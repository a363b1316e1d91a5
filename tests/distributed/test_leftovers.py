"""After a failure no process, thread or port of a pipeline is left; and processes over gloo end together."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
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


def step(pipe):
    pipe.step(torch.ones(8, 3), torch.ones(8, 3), functional.mse_loss)


def refused_step(pipe, rank, store):
    """What a step that must fail says; the others are told that it has ended."""
    try:
        step(pipe)
    except PeerError as error:
        return str(error)
    finally:
        store.set(str(rank), "ended")


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
        step(pipe)
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


def unequal(rank, silent):
    """Rank 1 makes one step, the others two."""
    pipe = pipeline(timeout_s=2 if silent else 600)
    store = dist.distributed_c10d._get_default_store()
    step(pipe)
    if rank == 1:
        if silent:
            store.wait(["0", "2"])
        return None
    return refused_step(pipe, rank, store)


@pytest.mark.parametrize("silent", [False, True])
def test_a_rank_that_makes_fewer_steps(silent, tmp_path):
    """It is noticed at once if the process ends, else after the timeout."""
    for result in run_processes(SIZE, tmp_path, unequal, silent)[::2]:
        assert f"rank 1 is {'silent, or waits for one that is' if silent else 'gone or silent'}, said rank" in result


def silent_at_the_end(rank):
    """Rank 0 waits for rank 1, which waits for rank 2."""
    store = dist.distributed_c10d._get_default_store()
    layers = [nn.Linear(3, 3) for _ in range(SIZE)]
    if rank == 2:
        layers[2].register_forward_hook(lambda *_: store.wait(["0", "1"]))
    return refused_step(Pipe(nn.Sequential(*layers), [1] * SIZE, chunks=2, timeout_s=2), rank, store)


def test_the_silent_rank_is_named(tmp_path):
    for result in run_processes(SIZE, tmp_path, silent_at_the_end)[:2]:
        assert "rank 2 is silent, or waits for one that is, said rank 1" in result


def absent(rank):
    """Rank 1 ends before it makes a pipeline; the others begin together."""
    dist.barrier()
    if rank == 1:
        raise BoomError
    pipeline(timeout_s=2)


def test_a_rank_that_never_makes_the_pipeline(tmp_path):
    for kind, message in run_processes(SIZE, tmp_path, absent)[::2]:
        assert kind == "PeerError"
        assert "all processes must make the pipeline, got none from rank 1 within 2 s" in message
