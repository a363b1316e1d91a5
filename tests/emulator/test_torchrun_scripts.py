"""What tutorials of distributed PyTorch do runs on virtual devices, with the values that it has on GPUs."""

from __future__ import annotations

import pytest

from gpipe_bench.emulator.build import obstacle
from gpipe_bench.emulator.torchrun import run_ranks
from gpipe_bench.machine.profile import load_profile
from tests.emulator.test_torchrun import START

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

DATA_PARALLEL = """
from contextlib import nullcontext
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# Each rank gets its half of the rows, and another half in the next epoch.
rows = torch.arange(16.0).unsqueeze(1).expand(16, 256).contiguous()
data = TensorDataset(rows, rows[:, :1].contiguous())
sampler = DistributedSampler(data, shuffle=True, seed=3)
loader = DataLoader(data, batch_size=2, sampler=sampler, pin_memory=True)
epochs = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    epochs.append([int(one) for x, _ in loader for one in x[:, 0]])
assert epochs[0] != epochs[1]
both = [None, None]
dist.all_gather_object(both, epochs[0])
assert sorted(both[0] + both[1]) == list(range(16)), both

layers = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
model = DistributedDataParallel(layers, device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for number, (x, y) in enumerate(loader):
    last = number % 2 == 1
    with nullcontext() if last else model.no_sync():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)) / 2
        assert loss.dtype == torch.float32
        scaler.scale(loss).backward()
    if last:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
# Gradients add up on each rank, and meet in the last pass.
small = nn.Linear(4, 1, bias=False).cuda()
nn.init.ones_(small.weight)
model = DistributedDataParallel(small, device_ids=[rank])
x = torch.full((1, 4), rank + 1.0, device="cuda")
with model.no_sync():
    model(x).sum().backward()
assert small.weight.grad.tolist() == [[rank + 1] * 4]
model(x).sum().backward()
assert small.weight.grad.tolist() == [[3] * 4], small.weight.grad
dist.destroy_process_group()
print("trained on rank", rank)
"""

MODEL_PARALLEL = """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("a", "b"))

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

# Two ranks share a block: the first layer by columns, the second by rows.
block = Block(4).cuda()
with torch.no_grad():
    block.up.weight.fill_(1.0)
    block.down.weight.fill_(0.5)
block = parallelize_module(block, mesh["b"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
assert tuple(block.up.weight.to_local().shape) == (8, 4)
assert tuple(block.down.weight.to_local().shape) == (4, 8)
x = torch.ones(2, 4, device="cuda", requires_grad=True)
y = block(x)
y.sum().backward()
assert y.tolist() == [[32.0] * 4] * 2, y
assert x.grad.tolist() == [[32.0] * 4] * 2, x.grad
optimizer = torch.optim.AdamW(block.parameters())
optimizer.step()
# Checkpoints compute again what they did not keep.
block = Block(4).cuda()
for reentrant in (False, True):
    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    block.zero_grad()
    nn.init.ones_(block.up.weight)
    nn.init.ones_(block.down.weight)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert x.grad.tolist() == [[64.0] * 4] * 2, x.grad
    assert block.down.weight.grad.tolist() == [[8.0] * 16] * 4
# A pipeline of two stages, twice; ranks with the same stage share gradients.
stage, copy = mesh.get_local_rank("a"), mesh.get_local_rank("b")
layer = nn.Linear(4, 4, bias=False).cuda()
module = DistributedDataParallel(layer, device_ids=[rank], process_group=mesh.get_group("b"))
nn.init.ones_(module.module.weight)
part = PipelineStage(module, stage, 2, torch.device("cuda", rank), group=mesh.get_group("a"))
pipeline = ScheduleGPipe(part, 2, loss_fn=nn.functional.mse_loss)
x = torch.full((4, 4), float(copy + 1), device="cuda")
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
losses = []
if stage == 0:
    pipeline.step(x)
else:
    pipeline.step(target=torch.zeros(4, 4, device="cuda"), losses=losses)
    assert [one.item() for one in losses] == [256.0 * (copy + 1) ** 2] * 2, losses
# The mean of 32 and 128, since the second pipeline's rows are twice as large.
assert module.module.weight.grad.tolist() == [[80.0] * 4] * 4, module.module.weight.grad
optimizer.step()
dist.destroy_process_group()
print("parallel on rank", rank)
"""


def run(folder, text, ranks):
    script = folder / "train.py"
    script.write_text(START + text)
    return run_ranks(script, [], ranks=ranks, profile=load_profile("h100"), races=True, host_time=True)


def test_ddp_accumulates_with_a_scaler_from_a_distributed_sampler(tmp_path, capfd):
    found = run(tmp_path, DATA_PARALLEL, 2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["trained on rank 0", "trained on rank 1"]
    assert not found.hangs
    assert not found.races
    # Four batches a rank, two of them a step.
    assert [len(ends) for ends in found.step_ends_ns] == [2, 2]
    # Gradients meet once in a step, and once for the small layer.
    own = found.records[: found.starts[1]]
    assert sum(record.nbytes for record in own if record.name == "all_reduce") == 2 * 4 * (256 * 257 + 257) + 4 * 4


def test_tensor_parallel_checkpoints_and_pipelines_that_share_gradients(tmp_path, capfd):
    found = run(tmp_path, MODEL_PARALLEL, 4)
    assert sorted(capfd.readouterr().out.splitlines()) == [f"parallel on rank {rank}" for rank in range(4)]
    assert not found.hangs
    assert not found.races
