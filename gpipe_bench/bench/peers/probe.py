"""What the race needs to know about a case besides its contenders: a balance, partition times, times of transfers.

Nothing here belongs to any contender. Each function takes a case and seconds to spend, and gives plain data.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_bench.bench.peers.cases import PeerCase
from gpipe_bench.bench.peers.partition_times import FEWEST_ROUNDS, even_balance, partition_times
from gpipe_bench.bench.peers.ranks import start_group
from gpipe_bench.bench.peers.skips import make_stages
from gpipe_bench.bench.peers.workloads import make_work
from gpipe_bench.measure.environment import environment_facts
from gpipe_bench.util.processes import spread


def facts(case: PeerCase, seconds: float) -> dict[str, Any]:  # noqa: ARG001 - all take the same arguments
    """``facts``: machine and software, as columns of rows."""
    return {"facts": environment_facts(case.placement())}


def balance(case: PeerCase, seconds: float) -> dict[str, Any]:
    """``balance``: layers per partition, such that the measured partitions make the quickest pipeline."""
    torch.set_num_threads(1)
    return {"balance": even_balance(case, seconds)}


def partitions(case: PeerCase, seconds: float) -> dict[str, Any]:
    """``alone``: seconds of each partition for one micro-batch, [forward, backward with recomputation]."""
    torch.set_num_threads(1)
    return {"alone": [*partition_times(case, seconds)]}


def transfers(case: PeerCase, seconds: float) -> dict[str, Any]:
    """``one_way_s``: seconds to send the tensors of each boundary from one process to another, by gloo.

    The seconds of a message of one number are taken off. None on accelerators and for one partition.
    """
    if case.device != "cpu" or case.partitions == 1:
        return {"one_way_s": None}
    torch.set_num_threads(1)
    work = make_work(case)
    tensors: tuple[Tensor, ...] = (work.batch.chunk(case.chunks)[0],)
    payloads = [[torch.zeros(1)]]
    with torch.no_grad():
        for stage in make_stages(work.model, case.balance)[:-1]:
            given = stage(*tensors)
            tensors = given if isinstance(given, tuple) else (given,)
            payloads.append(list(tensors))
    share = seconds / len(payloads)
    with tempfile.TemporaryDirectory(prefix="transfers-") as folder:
        store = str(Path(folder) / "store")
        # Each rank waits for the other, so each of the two processes takes one.
        (empty, *times), _ = spread(lambda rank: _exchange(rank, store, payloads, share), range(2), processes=2)
    return {"one_way_s": [max(t - empty, 0.0) for t in times]}


def _exchange(rank: int, store: str, payloads: list[list[Tensor]], seconds: float) -> list[float]:
    """Half the median time of a round trip of each payload; the two ranks count rounds alike."""
    start_group(rank, 2, store, "cpu")
    return [_round_trips(rank, payload, seconds) / 2 for payload in payloads]


def _round_trips(rank: int, payload: list[Tensor], seconds: float) -> float:
    taken: list[float] = []
    more = torch.ones(1)
    deadline = time.perf_counter() + seconds
    while more.item():
        start = time.perf_counter()
        for move in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
            for tensor in payload:
                move(tensor, 1 - rank)
        taken.append(time.perf_counter() - start)
        more.fill_(float(len(taken) < FEWEST_ROUNDS or time.perf_counter() < deadline))
        dist.broadcast(more, 0)
    return median(taken)
