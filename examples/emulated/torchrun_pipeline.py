"""An ordinary script of ``torchrun``: PyTorch's pipeline with one or two stages on each rank, trained for three steps.

On GPUs: ``torchrun --nproc-per-node 2 torchrun_pipeline.py``.
Without: ``gpipe-bench emulate --nproc 2 torchrun_pipeline.py``.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1F1B", help="name of a schedule of torch.distributed.pipelining")
    parser.add_argument("--chunks", type=int, default=8, help="micro-batches")
    parser.add_argument("--width", type=int, default=4096, help="width of a layer, and rows of a micro-batch")
    parser.add_argument("--layers", type=int, default=32, help="layers of all stages")
    parser.add_argument(
        "--list", default="", help="CSV file for the actions and messages of the schedule, if it has several stages"
    )
    given = parser.parse_args()
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    kind = schedules.get_schedule_class(given.schedule)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    count = size if single else 2 * size
    in_v = given.schedule in {"ZBVZeroBubble", "DualPipeV"}
    own = [rank] if single else [rank, count - 1 - rank if in_v else rank + size]
    with device:
        modules = nn.ModuleList(
            nn.Sequential(*(nn.Linear(given.width, given.width, bias=False) for _ in range(given.layers // count)))
            for _ in own
        )
        x = torch.randn(given.chunks * given.width, given.width)
    stages = [PipelineStage(module, number, count, device) for module, number in zip(modules, own, strict=True)]
    schedule = kind(stages[0] if single else stages, given.chunks, loss_fn=nn.functional.mse_loss)
    if given.list and rank == 0:
        schedule._dump_csv(given.list, format="compute_comms")  # noqa: SLF001 - PyTorch has no public name for it
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        schedule.step(*([x] if 0 in own else []), target=x if count - 1 in own else None)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
