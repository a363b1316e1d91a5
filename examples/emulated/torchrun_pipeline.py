"""An ordinary script of ``torchrun``: PyTorch's pipeline with a stage on each rank, trained for three steps.

On GPUs: ``torchrun --nproc-per-node 2 torchrun_pipeline.py``.
Without: ``gpipe-bench emulate --nproc 2 torchrun_pipeline.py``.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=8, help="micro-batches")
    parser.add_argument("--width", type=int, default=4096, help="width of a layer, and rows of a micro-batch")
    parser.add_argument("--layers", type=int, default=32, help="layers of all stages")
    given = parser.parse_args()
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    with device:
        layers = [nn.Linear(given.width, given.width, bias=False) for _ in range(given.layers // size)]
        x = torch.randn(given.chunks * given.width, given.width)
    module = nn.Sequential(*layers)
    stage = PipelineStage(module, rank, size, device)
    schedule = Schedule1F1B(stage, given.chunks, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        schedule.step(*([x] if rank == 0 else []), target=x if rank == size - 1 else None)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
