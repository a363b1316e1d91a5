"""A pipeline across processes: torchrun --standalone --nproc-per-node 2 examples/distributed.py."""

import torch
import torch.distributed as dist
from torch import nn

from gpipe_bench.distributed import Pipe


def main() -> None:
    """Train in this process's part of the pipeline."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))
    pipe = Pipe(layers, balance=[2, 2], chunks=4, schedule="1f1b")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        loss = pipe.step(torch.rand(32, 8), torch.rand(32, 1), nn.functional.mse_loss)
        optimizer.step()
    if pipe.rank == 0:
        print(f"loss {float(loss):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
