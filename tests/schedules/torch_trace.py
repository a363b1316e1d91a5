"""A rank of torch.distributed.pipelining under the profiler: ``python torch_trace.py DIR RANK``."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.profiler import ProfilerActivity, profile

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
stages = [PipelineStage(nn.Linear(8, 8), j, 4, torch.device("cpu")) for j in (rank, rank + 2)]
schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
x, y = torch.rand(8, 8), torch.rand(8, 8)
for _ in range(2):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == 1 else {}))
seen.export_chrome_trace(str(folder / f"rank{rank}.json"))
dist.destroy_process_group()
