"""Each collective of the world, of groups and of meshes of ranks gives the values that it does on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_bench.emulator.build import obstacle
from gpipe_bench.emulator.torchrun import run_ranks
from gpipe_bench.machine.networks import machine_of
from gpipe_bench.machine.profile import load_profile
from tests.emulator.test_torchrun import START

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

COLLECTIVES = """
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

def own(*numbers):
    return torch.tensor(numbers, device="cuda")

def zeros(count, many=4):
    return [torch.zeros(count, dtype=torch.int64, device="cuda") for _ in range(many)]

# To one rank, and from it.
into = zeros(2) if rank == 1 else None
dist.gather(own(rank, -rank), into, dst=1)
if rank == 1:
    assert [one.tolist() for one in into] == [[n, -n] for n in range(4)], into
part = own(-1)
dist.scatter(part, [own(10 * n) for n in range(4)] if rank == 2 else None, src=2)
assert part.item() == 10 * rank, part
total = own(2**rank)
dist.reduce(total, dst=3)
if rank == 3:
    assert total.item() == 15, total
# Everyone to everyone: in one tensor, in lists.
arrived = own(*[0] * 4)
dist.all_to_all_single(arrived, own(*(10 * rank + n for n in range(4))))
assert arrived.tolist() == [10 * n + rank for n in range(4)], arrived
several = zeros(2)
dist.all_to_all(several, [own(rank, n) for n in range(4)])
assert [one.tolist() for one in several] == [[n, rank] for n in range(4)], several
# Rank r sends n + 1 numbers to rank n, in a list or in one tensor.
pieces = [own(*[10 * rank + n] * (n + 1)) for n in range(4)]
several = zeros(rank + 1)
dist.all_to_all(several, pieces)
assert [one.tolist() for one in several] == [[10 * n + rank] * (rank + 1) for n in range(4)], several
arrived = own(*[0] * 4 * (rank + 1))
dist.all_to_all_single(arrived, torch.cat(pieces), [rank + 1] * 4, [1, 2, 3, 4])
assert arrived.tolist() == [10 * n + rank for n in range(4) for _ in range(rank + 1)], arrived
# The same with large parts, whose time is tested below.
sizes = [250_000 * (n + 1) * (rank + 1) for n in range(4)]
large, arrived = (torch.empty(sum(sizes), dtype=torch.uint8, device="cuda") for _ in range(2))
dist.all_to_all_single(arrived, large, sizes, sizes)
piece = own(0)
dist.reduce_scatter_tensor(piece, own(*(n + rank for n in range(4))))
assert piece.item() == 4 * rank + 6, piece
# Ranks of a group are named by their numbers in the world; the others get no group.
odd = dist.new_group([1, 3])
if rank in (1, 3):
    number = own(rank)
    dist.all_reduce(number, group=odd)
    assert number.item() == 4, number
    told = own(rank)
    dist.broadcast(told, src=3, group=odd)
    assert told.item() == 3, told
    into = zeros(1, 2) if rank == 3 else None
    dist.gather(own(rank), into, dst=3, group=odd)
    assert into is None or [int(one) for one in into] == [1, 3], into
    here = own(rank)
    if rank == 1:
        dist.send(here, 3, group=odd)
    else:
        dist.recv(here, 1, group=odd)
        assert here.item() == 1
else:
    assert dist.get_rank(odd) == -1
# Rows and columns of a mesh.
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
assert list(mesh.get_coordinate()) == [rank // 2, rank % 2], mesh
for name, expected in [("dp", rank % 2 + rank % 2 + 2), ("tp", 4 * (rank // 2) + 1)]:
    number = own(rank)
    dist.all_reduce(number, group=mesh.get_group(name))
    assert number.item() == expected, (name, number)
# Functional collectives give new tensors.
before = own(rank)
assert funcol.all_reduce(before, "sum", mesh["tp"]).item() == 4 * (rank // 2) + 1
assert before.item() == rank
gathered = funcol.all_gather_tensor(own(rank, -rank), 0, mesh["dp"])
assert gathered.tolist() == [rank % 2, -(rank % 2), rank % 2 + 2, -(rank % 2) - 2], gathered
scattered = funcol.reduce_scatter_tensor(own(rank, 10 * rank), "sum", 0, mesh["tp"])
assert scattered.item() == (4 * (rank // 2) + 1) * (10 if rank % 2 else 1), scattered
swapped = funcol.all_to_all_single(own(rank, 10 + rank), None, None, mesh["tp"])
assert swapped.tolist() == [10 * (rank % 2) + 2 * (rank // 2) + n for n in range(2)], swapped
print("all collectives of rank", rank)
"""


def test_collectives_of_the_world_of_groups_and_of_meshes_give_their_values(tmp_path: Path, capfd):
    script = tmp_path / "train.py"
    script.write_text(START + COLLECTIVES)
    profile = load_profile("h100")
    run = run_ranks(script, [], ranks=4, profile=profile, races=False, host_time=True)
    told = capfd.readouterr().out
    assert sorted(told.splitlines()) == [f"all collectives of rank {rank}" for rank in range(4)]
    assert not run.hangs
    # The last one with parts of different sizes takes the ring's steps of the rank that sends most.
    largest = [row for row, one in enumerate(run.records) if one.name == "all_to_all" and one.nbytes >= 10 * 250_000]
    machine = machine_of(profile, hosts=1, devices=4, network="ndr400")
    step = max(machine.copy_ns(rank, (rank + 1) % 4, 10 * 250_000) for rank in range(4))
    spans = {int(run.replayed.end_ns[row] - run.replayed.begin_ns[row]) for row in largest}
    assert spans == {3 * step}
