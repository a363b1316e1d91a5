"""DDP, FSDP2 and distributed checkpoints of unchanged `torchrun` scripts, and ranks of several hosts."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from gpipe_bench.emulator.build import obstacle
from gpipe_bench.emulator.torchrun import run_ranks
from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.networks import machine_of
from gpipe_bench.machine.profile import load_profile
from tests.emulator.test_torchrun import PING_PONG, START

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

DATA_PARALLEL = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x):
        return self.used(x)

model = DistributedDataParallel(Two().cuda(), device_ids=[rank], find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(256, 512, device="cuda")).sum().backward()
    optimizer.step()
# Small ones go through buckets, too, and keep their values: the mean of both ranks' gradients.
small = nn.Linear(4, 1, bias=False).cuda()
with torch.no_grad():
    small.weight.fill_(1 + rank)
model = DistributedDataParallel(small, device_ids=[rank])
assert small.weight.tolist() == [[1] * 4], "rank 0's weights"
model(torch.full((2, 4), rank + 1.0, device="cuda")).sum().backward()
assert small.weight.grad.tolist() == [[3] * 4], small.weight.grad
"""

SHARDED = """
import sys
from torch import nn
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(2))).cuda()
small = nn.Linear(4, 2).cuda()
with torch.no_grad():
    small.weight.fill_(3.0)
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(256, 512, device="cuda")).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dcp.save({"model": model.state_dict(), "small": small.state_dict(), "step": 7}, checkpoint_id=sys.argv[1])
with torch.no_grad():
    small.weight.fill_(0.0)
state = {"model": model.state_dict(), "small": small.state_dict(), "step": 0}
dcp.load(state, checkpoint_id=sys.argv[1])
assert small.weight.tolist() == [[3] * 4] * 2, small.weight
assert state["step"] == 7
"""

FORGOTTEN = """
import sys
x = torch.zeros(2**20, device="cuda")
work = dist.all_reduce(x, async_op=True)  # writes
if sys.argv[1] == "wait":
    work.wait()
y = x + 1  # reads
"""

UNKNOWN = """
def refused(read):
    try:
        read()
    except RuntimeError as error:
        assert "must be known" in str(error) or "must have values" in str(error), error
    else:
        raise AssertionError("read")

large = torch.ones(2**20, device="cuda")
# Copies of floats hold NaN, and say so.
refused(large.cpu().tolist)
copy = torch.rand(4, device="cuda").cpu()
refused(copy.tolist)
refused(copy.numpy)
refused(lambda: bool((copy * 2 > 1).any()))
refused(lambda: f"{copy[0]:.2f}")
refused(torch.rand(4, device="cuda").tolist)
refused(lambda: large.sum().item())
refused(lambda: torch.ones(2**20, dtype=torch.int64, device="cuda").cpu())
refused(lambda: torch.rand(4, device="cuda")[0].item())
# Nobody has waited for the message.
flag = torch.ones(1, device="cuda")
work = dist.all_reduce(flag, async_op=True)
refused(lambda: flag.item())
work.wait()
assert flag.item() == 2
# One rank knows them only.
mixed = torch.ones(4, device="cuda") if rank else torch.rand(4, device="cuda")
dist.all_reduce(mixed)
refused(lambda: mixed[0].item())
"""

PLACES = """
assert (os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"]) == ("0", str(rank)), os.environ
assert torch.cuda.device_count() == 1
"""


def run(folder, text, *arguments, hosts=1, network="ndr400", host_time=True, races=False):
    script = folder / "train.py"
    script.write_text(START + text)
    options = {"hosts": hosts, "network": network, "host_time": host_time}
    return run_ranks(script, arguments, ranks=2, profile=load_profile("h100"), races=races, **options)


def collectives(found):
    """How many of each kind rank 0 issues in the last step, and their bytes together."""
    begin, end = found.step_ends_ns[0][-2:]
    first, last = found.starts[:2]
    own = [
        record
        for row, record in enumerate(found.records[first:last])
        if record.kind == "meet" and begin < found.replayed.end_ns[row] <= end
    ]
    return Counter(record.name for record in own), sum(record.nbytes for record in own)


def test_ddp_reduces_all_gradients_and_keeps_those_of_small_parameters(tmp_path):
    found = run(tmp_path, DATA_PARALLEL, races=True)
    assert not found.hangs
    assert not found.races
    assert len(found.step_times_ms) == 2
    counts, nbytes = collectives(found)
    # Two buckets, as the first one holds a MiB; and which parameters were used.
    assert counts == {"all_reduce": 3}
    # Two layers of 512 x 512 with bias, and a number for each of the four parameters.
    assert nbytes == 2 * 4 * (512 * 512 + 512) + 4 * 4


def test_fsdp_gathers_and_scatters_each_layer_and_a_checkpoint_comes_back(tmp_path):
    found = run(tmp_path, SHARDED, str(tmp_path / "checkpoint"), races=True)
    assert not found.hangs
    assert not found.races
    counts, _ = collectives(found)
    # Layer 1 stays gathered between its passes, as it is the last; a norm of the gradients is summed up.
    assert counts["reduce_scatter"] == 2
    assert counts["all_gather"] in {3, 4}
    assert counts["all_reduce"] == 1


def test_what_no_device_has_is_never_read_as_zeros(tmp_path):
    assert not run(tmp_path, UNKNOWN).hangs


@pytest.mark.parametrize(("argument", "kinds"), [("forget", ["read", "read"]), ("wait", [])])
def test_a_message_that_nobody_waits_for_is_a_race_with_its_lines(tmp_path, argument, kinds):
    found = run(tmp_path, FORGOTTEN, argument, races=True)
    assert [race.kind for race in found.races] == kinds
    text = (tmp_path / "train.py").read_text().splitlines()
    row = {id(record): place for place, record in enumerate(found.records)}
    for rank, race in enumerate(found.races):
        assert (race.before.device, race.after.device) == (rank, rank)
        lines = [int(found.lines[row[id(record)]].rsplit(":")[-1]) for record in (race.before, race.after)]
        assert [text[line - 1].split("# ")[1] for line in lines] == ["writes", "reads"]


def test_ranks_of_two_hosts_take_the_network(tmp_path):
    found = run(tmp_path, PLACES + PING_PONG, hosts=2, network="ethernet10", host_time=False)
    machine = machine_of(load_profile("h100"), hosts=2, devices=2, network="ethernet10")
    spans = {
        end - begin
        for record, begin, end in zip(found.records, found.replayed.begin_ns, found.replayed.end_ns, strict=True)
        if record.kind == "meet"
    }
    assert spans == {machine.copy_ns(0, 1, 1_000_000)}
    assert machine.copy_ns(0, 1, 1_000_000) > 5 * machine_of(
        load_profile("h100"), hosts=1, devices=2, network="ndr400"
    ).copy_ns(0, 1, 1_000_000)


def test_hosts_that_do_not_divide_the_ranks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=re.escape("hosts must divide the 2 devices evenly, got 3")):
        run(tmp_path, "", hosts=3)
