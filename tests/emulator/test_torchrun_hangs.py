"""Hangs of three and four ranks are named: each rank that waits, its line, and the rank that it waits for."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from gpipe_bench.emulator.build import obstacle
from gpipe_bench.emulator.torchrun import run_ranks
from gpipe_bench.errors import TraceError
from gpipe_bench.machine.profile import load_profile
from tests.emulator.test_torchrun import line_of, written

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

CYCLE = """
dist.recv(torch.zeros(2**20, device="cuda"), (rank + 1) % 3)  # waits
dist.send(torch.zeros(2**20, device="cuda"), (rank - 1) % 3)  # sends
"""

# The others read what they wait for, as a script that logs its loss does.
MISSING = """
if rank != 2:
    x = torch.ones(1, device="cuda")
    dist.all_reduce(x)  # waits
    print(x.item())
"""

EARLY = """
if rank == 1:
    raise SystemExit
dist.barrier()  # waits
"""

SUBGROUP = """
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "pipeline"))
x = torch.zeros(2**20, device="cuda")
dist.all_reduce(x, group=mesh["data"].get_group())
group = mesh["pipeline"].get_group()
if rank < 2:
    dist.recv(x, 1 - rank, group=group)  # waits
    dist.send(x, 1 - rank, group=group)  # sends
else:
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
"""

SWAPPED = """
groups = [dist.new_group([0, 1, 2]) for _ in range(2)]
for group in groups if rank else reversed(groups):
    dist.all_reduce(torch.zeros(2**20, device="cuda"), group=group)  # waits
"""

KILLED = """
if rank == 1:
    {end}
dist.barrier()
"""

GROUPS = """
import os
import torch.distributed as dist
made = "GROUP"
if made == "new_group":
    dist.init_process_group("nccl")
if os.environ["RANK"] != "1":
    getattr(dist, made)()  # waits
"""

DISAGREEING = """
x = torch.ones(4096, device="cuda")
dist.all_reduce(x if rank else x.int())
dist.all_reduce(x, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
dist.broadcast(x, src=rank)
"""


def hangs(script, ranks):
    return run_ranks(script, [], ranks=ranks, profile=load_profile("h100"), races=False, host_time=True).hangs


def test_a_cycle_of_three_ranks_is_named(tmp_path):
    script = written(tmp_path, CYCLE)
    waits, sends = line_of(script, "waits"), line_of(script, "sends")
    ahead = {rank: (rank + 1) % 3 for rank in range(3)}
    assert sorted(hangs(script, 3)) == [
        f"rank {rank} waits at {waits} in recv no. 1 from rank {other} for rank {other} at {sends}"
        for rank, other in ahead.items()
    ]


@pytest.mark.parametrize(("text", "ranks", "absent", "kind"), [(MISSING, 4, 2, "all_reduce"), (EARLY, 3, 1, "barrier")])
def test_a_rank_that_is_missing_is_named_by_all_others(tmp_path, text, ranks, absent, kind):
    script = written(tmp_path, text)
    assert hangs(script, ranks) == [
        f"rank {rank} waits at {line_of(script, 'waits')} in {kind} no. 1, which rank {absent} never calls"
        for rank in range(ranks)
        if rank != absent
    ]


def test_only_the_ranks_of_a_subgroup_that_hangs_are_named(tmp_path):
    script = written(tmp_path, SUBGROUP)
    waits, sends = line_of(script, "waits"), line_of(script, "sends")
    assert hangs(script, 4) == [
        f"rank {rank} waits at {waits} in recv no. 1 of group 3 from rank {1 - rank} for rank {1 - rank} at {sends}"
        for rank in range(2)
    ]


def test_groups_in_another_order_on_one_rank_hang_all(tmp_path):
    script = written(tmp_path, SWAPPED)
    waits, found = line_of(script, "waits"), set(hangs(script, 3))
    assert found == {
        f"rank {rank} waits at {waits} in all_reduce no. 1 of group {1 if rank else 2} for "
        + ", ".join(f"rank {other} at {waits}" for other in range(3) if other != rank)
        for rank in range(3)
    }


@pytest.mark.parametrize(
    ("end", "said"), [("os._exit(0)", "exit status 0"), ("os.kill(os.getpid(), 9)", "ended by SIGKILL")]
)
def test_a_process_that_ends_at_once_is_named(tmp_path, end, said):
    with pytest.raises(TraceError, match=rf"got an error in rank 1 \({said}\);"):
        hangs(written(tmp_path, KILLED.format(end=end)), 3)


@pytest.mark.parametrize("call", ["init_process_group", "new_group"])
def test_a_rank_that_makes_no_group_is_named(tmp_path, call):
    script = tmp_path / "train.py"
    script.write_text(GROUPS.replace("GROUP", call))
    assert hangs(script, 3) == [
        f"rank {rank} waits at {line_of(script, 'waits')} in {call} no. 1, which rank 1 never calls" for rank in (0, 2)
    ]


def test_parts_that_disagree_are_named(tmp_path):
    script = written(tmp_path, DISAGREEING)
    found = [(what, got) for what, got in re.findall(r": (\w+) must be equal, got (.*)", "\n".join(hangs(script, 2)))]
    assert found == [
        ("terms", "SUM, int32 and SUM, float32"),
        ("terms", "SUM, float32 and MAX, float32"),
        ("terms", "root 0, float32 and root 1, float32"),
    ]


def test_ranks_end_with_the_command(tmp_path):
    script = written(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    words = [sys.executable, "-m", "gpipe_bench", "emulate", "--nproc", "2", str(script)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        started.kill()
        # Whoever has its end of the pipe open is alive.
        assert set(started.stdout.read().split()) <= {"ready"}
