"""What each of two hosts runs: some steps of pipelines whose processes are on both, the last one until it fails.

torchrun ... tests/distributed/two_hosts.py SCHEDULE...

Rank 0 prints the schedule and the loss of each step.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from gpipe_bench.distributed import PeerError, Pipe


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


def train(schedule: str, steps: int, timeout_s: float) -> None:
    balance = [1, 1, 1, 1] if schedule == "zb_v" else [2, 2]
    pipe = Pipe(model(), balance, schedule=schedule, chunks=4, timeout_s=timeout_s)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 64 * 64).view(64, 64)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = pipe.step(x if pipe.rank == 0 else None, x, functional.mse_loss)
        optimizer.step()
        if pipe.rank == 0:
            print(f"{schedule} {float(loss):.9f}", flush=True)
    pipe.close()


def main(*schedules: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for schedule in schedules:
        train(schedule, 3, 60)
    print("last one", flush=True)
    try:
        train("1f1b", 1_000_000, 8)
    except PeerError as error:
        print(error, flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
