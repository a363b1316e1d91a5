"""What each of two hosts runs: some steps of a pipeline whose processes are on both; rank 0 prints the losses.

torchrun ... tests/distributed/two_hosts.py SCHEDULE STEPS TIMEOUT_S
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


def main(schedule: str, steps: int, timeout_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    balance = [1, 1, 1, 1] if schedule == "zb_v" else [2, 2]
    pipe = Pipe(model(), balance, schedule=schedule, chunks=4, timeout_s=timeout_s)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 64 * 64).view(64, 64)
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = pipe.step(x if pipe.rank == 0 else None, x, functional.mse_loss)
            optimizer.step()
            if pipe.rank == 0:
                print(f"loss {float(loss):.9f}", flush=True)
    except PeerError as error:
        print(f"rank {pipe.rank}: {error}", flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
