"""Recorded calls of a process group are the lists that ran."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gpipe_bench.distributed import recorded
from gpipe_bench.schedules import read_messages, stuck
from tests.distributed.ranks import run_processes


def exchange(rank, folder):
    with recorded(folder):
        other = 1 - rank
        works = [dist.isend(torch.ones(2), other, tag=4), dist.irecv(torch.empty(2), other, tag=4)]
        works[1].wait()
        works[0].wait()
        (dist.send if rank else dist.recv)(torch.ones(3), other)
        received = torch.empty(1)
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((1,), float(rank)), other),
                dist.P2POp(dist.irecv, received, other),
            ]
        ):
            work.wait()
    return received.item()


def test_calls_of_a_process_group_are_recorded(tmp_path):
    record = tmp_path / "record"
    assert run_processes(2, tmp_path, exchange, str(record)) == [1.0, 0.0]
    batch = "isend {0},irecv {0},wait 3,wait 4"
    start = "isend {0} tag 4,irecv {0} tag 4,wait 1,wait 0"
    lines = [(record / f"rank{rank}.csv").read_text() for rank in range(2)]
    assert lines == [f"{start},recv 1,{batch}".format(1), f"{start},send 0,{batch}".format(0)]
    lists = read_messages("\n".join(lines))
    assert stuck(lists, "edge") == ()
    assert len(stuck(lists, "pair")) == 2
    assert stuck(lists, "pair", batched=True) == ()


def receive_from_any(rank, folder):
    with recorded(folder):
        dist.recv(torch.empty(1))


def test_a_receive_from_any_rank_is_refused(tmp_path):
    results = run_processes(1, tmp_path, receive_from_any, str(tmp_path))
    assert results == [("ValueError", "a recorded recv must name its rank, got src=None; give the rank")]
