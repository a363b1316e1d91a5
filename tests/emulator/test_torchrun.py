"""Unchanged `torchrun` scripts on two ranks: times equal formulas, hangs are named, values are right or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpipe_bench.emulator.build import obstacle
from gpipe_bench.emulator.torchrun import run_ranks
from gpipe_bench.errors import TraceError
from gpipe_bench.machine.hardware import HardwareMachine
from gpipe_bench.machine.profile import load_profile
from tests.processes import command

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

START = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""

PING_PONG = """
x = torch.zeros(1_000_000, dtype=torch.uint8, device="cuda")
for _ in range(20):
    for turn in range(2):
        dist.send(x, 1 - rank) if rank == turn else dist.recv(x, 1 - rank)
"""

VALUES = """
flag = torch.tensor([rank + 1], device="cuda")
dist.all_reduce(flag)
assert flag.item() == 3, flag
largest = torch.tensor([rank + 1.5, -rank], device="cuda")
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
assert largest.tolist() == [2.5, 0.0], largest
told = torch.full((3,), 1, device="cuda") if rank == 1 else torch.randint(9, (3,), device="cuda")
dist.broadcast(told, src=1)
assert told.tolist() == [1, 1, 1], told
each = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2)]
dist.all_gather(each, torch.tensor([10 + rank], device="cuda"))
assert [int(one) for one in each] == [10, 11], each
objects = [{"seed": 7}] if rank == 0 else [None]
dist.broadcast_object_list(objects, src=0)
assert objects == [{"seed": 7}], objects
# As the vote of torch.distributed.pipelining: a flag goes from rank to rank and back.
vote = torch.tensor([1], dtype=torch.int32, device="cuda")
if rank == 0:
    dist.send(vote + 4, 1)
    dist.recv(vote, 1)
else:
    dist.recv(vote, 0)
    dist.send(vote * 2, 0)
assert vote.item() == (10 if rank == 0 else 5), vote
# Both receive first, and nobody waits before both have sent.
here, there = torch.tensor([rank], device="cuda"), torch.tensor([-1], device="cuda")
works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, there, 1 - rank), dist.P2POp(dist.isend, here, 1 - rank)])
for work in works:
    work.wait()
assert there.item() == 1 - rank, there
# A collective that is waited for after messages that the other rank calls before it.
late = torch.ones(1, device="cuda")
if rank == 0:
    work = dist.all_reduce(late, async_op=True)
    dist.send(here, 1)
else:
    dist.recv(there, 0)
    work = dist.all_reduce(late, async_op=True)
work.wait()
assert late.item() == 2, late
print("all values of rank", rank)
"""

DEADLOCK = """
x, y = torch.zeros({numbers}, device="cuda"), torch.ones({numbers}, device="cuda")
dist.recv(x, 1 - rank)  # receives first
dist.send(y, 1 - rank)
"""

LEFT_OUT = """
if rank == 0:
    dist.all_reduce(torch.zeros(8, device="cuda"))  # left out
torch.cuda.synchronize()
"""

UNEQUAL = """
if rank == 0:
    dist.send(torch.zeros(8, device="cuda"), 1)  # sends
else:
    dist.recv(torch.zeros(9, device="cuda"), 0)  # receives
"""

UNKNOWN = """
numbers = torch.rand(4, device="cuda")
dist.all_reduce(numbers)
if numbers.sum().item() > 1:  # reads
    print("taken")
"""


def written(folder, text):
    script = folder / "train.py"
    script.write_text(START + text)
    return script


def line_of(script, comment):
    """Where a comment stands, as reports name it."""
    number = next(n for n, line in enumerate(script.read_text().splitlines(), 1) if line.endswith(f"# {comment}"))
    return f"{script}:{number}"


def run(script, host_time=True):
    return run_ranks(script, [], ranks=2, profile=load_profile("h100"), races=False, host_time=host_time)


def test_ping_pong_takes_what_its_messages_take(tmp_path):
    found = run(written(tmp_path, PING_PONG), host_time=False)
    times = [
        (begin, end)
        for record, begin, end in zip(found.records, found.replayed.begin_ns, found.replayed.end_ns, strict=True)
        if record.kind == "meet" and record.device == 0
    ]
    own = HardwareMachine(load_profile("h100")).copy_ns(0, 1, 1_000_000)
    assert len(times) == 40
    assert [end - begin for begin, end in times] == [own] * 40
    assert times[-1][1] - times[0][0] == 40 * own
    assert not found.hangs


def test_small_tensors_keep_their_values(tmp_path):
    shown = command(["emulate", "--nproc", 2, written(tmp_path, VALUES)], ROOT)
    assert shown.returncode == 0, shown.stderr
    assert sorted(re.findall("all values of rank [01]", shown.stdout)) == [f"all values of rank {n}" for n in range(2)]
    assert "socket" not in shown.stderr


@pytest.mark.parametrize("numbers", [8, 2**20])
def test_ranks_that_both_receive_first_hang(tmp_path, numbers):
    script = written(tmp_path, DEADLOCK.format(numbers=numbers))
    place, sends = line_of(script, "receives first"), f"{script}:{len(script.read_text().splitlines())}"
    assert run(script).hangs == [
        f"rank {rank} waits at {place} in recv no. 1 from rank {1 - rank} for rank {1 - rank} at {sends}"
        for rank in range(2)
    ]


def test_a_collective_that_a_rank_leaves_out_hangs(tmp_path):
    script = written(tmp_path, LEFT_OUT)
    shown = command(["emulate", "--nproc", 2, script], ROOT)
    assert shown.returncode == 3
    assert shown.stderr.splitlines()[1:] == [
        f"  rank 0 waits at {line_of(script, 'left out')} in all_reduce no. 1, which rank 1 never calls"
    ]


def test_unequal_sizes_are_named(tmp_path):
    script = written(tmp_path, UNEQUAL)
    ends = f"rank 0 at {line_of(script, 'sends')}: send no. 1 to rank 1; rank 1 at {line_of(script, 'receives')}: "
    assert run(script).hangs == [ends + "recv no. 1 from rank 0: sizes must be equal, got 32 bytes and 36 bytes"]


def test_reading_a_value_that_no_device_has_is_an_error(tmp_path, capfd):
    with pytest.raises(TraceError, match=r"got an error in rank 0 \(exit status 1\), rank 1"):
        run(written(tmp_path, UNKNOWN))
    told = capfd.readouterr().err
    assert (
        told.count("a value that the program reads must be known, got one that a virtual device did not compute") == 2
    )
    assert told.count("if numbers.sum().item() > 1:  # reads") == 2


STEPS = """
weight = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(5):
    weight.grad = torch.ones_like(weight)
    optimizer.step()
"""

# What a mixed-precision script does between its first step and its last checkpoint.
MIXED = """
assert dist.get_backend() == "nccl" and torch.version.cuda and torch.cuda.nccl.version() >= (2, 10)
model = torch.nn.Linear(512, 512).cuda()
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
for _ in range(3):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(8, 512, device="cuda")).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
assert scaler.get_scale() == 65536
file = f"{os.path.dirname(__file__)}/{rank}.pt"
steps = torch.ones(3, device="cuda")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}, file)
for place in (f"cuda:{rank}", torch.device("cuda", rank), {"cuda:0": f"cuda:{rank}"}, None):
    saved = torch.load(file, map_location=place)
    assert saved["steps"].is_cuda and saved["steps"].tolist() == [1, 1, 1], saved["steps"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
assert torch.load(file, map_location="cpu")["model"]["weight"].isnan().all()
"""


def test_a_step_without_a_backward_pass_is_a_step(tmp_path):
    assert [len(ends) for ends in run(written(tmp_path, STEPS)).step_ends_ns] == [5, 5]


def test_mixed_precision_skips_no_step_and_checkpoints_are_loaded(tmp_path):
    assert [len(ends) for ends in run(written(tmp_path, MIXED)).step_ends_ns] == [3, 3]


def test_the_example_of_processes_runs_on_the_cpu_as_it_does_without():
    shown = command(["emulate", "--nproc", 2, ROOT / "examples" / "distributed.py"], ROOT)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"^loss 0\.\d{4}$", shown.stdout, re.MULTILINE)
    assert "no virtual device was used" in shown.stdout
