"""Pipelines across processes, over gloo: what threads in the place of processes cannot show."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from gpipe_bench import GPipe
from gpipe_bench.distributed import Pipe
from tests.distributed.ranks import die, run_processes
from tests.distributed.test_failures import BoomError, Layer
from tests.engine.steps import DOUBLE, scheduled

SIZE = 3
KINDS = ("gpipe", "1f1b", "zb_h1", "interleaved", "zb_v")


def chain(count=2 * SIZE, dropout=0.3):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(dropout)) for _ in range(count)]
    return nn.Sequential(*blocks).double()


def numbers(rows=12):
    return torch.linspace(-1, 1, rows * 4, dtype=torch.float64).view(rows, 4)


def even(schedule, size, layers):
    count = 2 * size if schedule in DOUBLE else size
    return [layers // count] * count


# --- what one process gives ------------------------------------------------------------------------------------------


def one_step(pipe, x):
    pipe.zero_grad()
    loss = pipe.step(x, numbers(), functional.mse_loss)
    return loss, {name: parameter.grad.clone() for name, parameter in pipe.named_parameters()}


def steps(rank):
    """Three steps with each schedule; only the first process has the seed of the one process."""
    found = []
    for schedule in KINDS:
        pipe = Pipe(chain(), even(schedule, SIZE, 6), schedule=schedule, chunks=4, checkpoint="always")
        torch.manual_seed(7 if rank == 0 else 100 + rank)
        found.append([one_step(pipe, numbers() if rank == 0 else None) for _ in range(3)])
        pipe.close()
    return found


def test_steps_and_masks_are_those_of_one_process(tmp_path):
    results = run_processes(SIZE, tmp_path, steps)
    for number, schedule in enumerate(KINDS):
        pipe = scheduled(chain(), even(schedule, SIZE, 6), schedule, chunks=4, checkpoint="always")
        torch.manual_seed(7)
        for step in range(3):
            loss, grads = one_step(pipe, numbers())
            there = [result[number][step] for result in results]
            assert all(torch.equal(value, there[0][0]) for value, _ in there)
            torch.testing.assert_close(there[0][0], loss)
            merged = {name: grad for _, found in there for name, grad in found.items()}
            assert merged.keys() == grads.keys()
            assert all(torch.equal(merged[name], grads[name]) for name in grads)


# --- failures --------------------------------------------------------------------------------------------------------


def fail():
    raise BoomError("by accident")


def failing_step(rank, schedule, place, number, burn):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(len(even(schedule, SIZE, 6)))))
    layers[place] = Layer(burn, number)
    pipe = Pipe(layers, [1] * len(layers), schedule=schedule, chunks=4, checkpoint="always")
    try:
        pipe.step(torch.rand(8, 3, requires_grad=True), torch.rand(8, 3), functional.mse_loss)
    except Exception as error:  # noqa: BLE001 - it is a result
        return type(error).__name__, str(error)


@pytest.mark.parametrize(("schedule", "burn"), [("1f1b", fail), ("zb_v", die)])
def test_all_processes_end_with_the_cause(schedule, burn, tmp_path):
    """Every schedule, and other places, in test_failures.py."""
    draw = random.Random(schedule)
    place = draw.randrange(SIZE)
    results = run_processes(SIZE, tmp_path, failing_step, schedule, place, draw.randint(1, 12), burn)
    first = results.pop(place)
    assert first is None if burn is die else first == ("BoomError", "by accident")
    for kind, message in results:
        assert kind == "PeerError"
        cause = f"rank {place} is gone or silent" if burn is die else f"rank {place} failed at "
        assert cause in message
        assert burn is die or "BoomError: by accident" in message


# --- state -----------------------------------------------------------------------------------------------------------


def trained(pipe, rank, count=2):
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        pipe.step(numbers() if rank == 0 else None, numbers(), functional.mse_loss)
        norm = pipe.clip_grad_norm_(0.01)
        optimizer.step()
    return norm


def save(rank, folder):
    pipe = Pipe(chain(dropout=0.0), [3, 3], schedule="1f1b", chunks=4)
    norm = trained(pipe, rank)
    dcp.save(get_model_state_dict(pipe), checkpoint_id=f"{folder}/first")
    return norm


def move(rank, folder):
    """Into other partitions, of a module that has no memory before."""
    with torch.device("meta"):
        module = chain(dropout=0.0)
    pipe = Pipe(module, [2, 1, 2, 1], schedule="zb_v", chunks=4)
    state = get_model_state_dict(pipe)
    dcp.load(state, checkpoint_id=f"{folder}/first")
    set_model_state_dict(pipe, state)
    norm = trained(pipe, rank, 1)
    dcp.save(get_model_state_dict(pipe), checkpoint_id=f"{folder}/second")
    return norm


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # no_dist=True says so already
def test_a_checkpoint_moves_between_pipelines(tmp_path):
    plain = chain(dropout=0.0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        functional.mse_loss(plain(numbers()), numbers()).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
        optimizer.step()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    torch.testing.assert_close(run_processes(2, tmp_path / "a", save, str(tmp_path)), [norms[1]] * 2)
    torch.testing.assert_close(run_processes(2, tmp_path / "b", move, str(tmp_path)), [norms[2]] * 2)
    one = GPipe(chain(dropout=0.0), [2, 2, 2], devices=["cpu"] * 3)
    state = one.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "second", no_dist=True)
    torch.testing.assert_close(state, dict(plain.state_dict()))


# --- data parallelism ------------------------------------------------------------------------------------------------


def replicas(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    found = []
    for schedule in ("1f1b", "zb_v"):
        layers = chain(4, 0.0)
        if rank >= 2:  # all replicas get the weights of the first one
            for parameter in layers.parameters():
                nn.init.constant_(parameter, rank)
        options = {"mesh": mesh["pipeline"], "replicas": mesh["data"]}
        pipe = Pipe(layers, even(schedule, 2, 4), schedule=schedule, chunks=2, **options)
        half = numbers().chunk(2)[mesh["data"].get_local_rank()]
        pipe.step(half, half, functional.mse_loss)
        found.append({name: parameter.grad for name, parameter in pipe.named_parameters()})
    return found


def test_replicas_average_their_gradients(tmp_path):
    plain = chain(4, 0.0)
    functional.mse_loss(plain(numbers()), numbers()).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    results = run_processes(4, tmp_path, replicas)
    for ranks in ((0, 1), (2, 3)):
        for number in range(2):
            merged = {name: grad for rank in ranks for name, grad in results[rank][number].items()}
            torch.testing.assert_close(merged, {name: expected[name] for name in merged})
            assert merged.keys() == expected.keys()


def wrapped(rank, way):
    """A pipeline of one process, which has a replica in the other."""
    from torch.distributed.fsdp import fully_shard

    layers, mesh = chain(2, 0.0), init_device_mesh("cpu", (2,))
    pipeline = dist.new_subgroups(1)[0]
    if way == "FSDPModule after":
        pipe = Pipe(layers, [2], schedule="zb_h1", group=pipeline, chunks=2)
        fully_shard(pipe[1], mesh=mesh)
        return pipe.step(numbers(), numbers(), functional.mse_loss)
    layers[1] = fully_shard(layers[1], mesh=mesh) if way == "FSDPModule" else getattr(nn.parallel, way)(layers[1])
    return Pipe(layers, [2], group=pipeline)


def refusals(rank):
    found = {}
    for way in ("DistributedDataParallel", "FSDPModule", "FSDPModule after"):
        with pytest.raises(ValueError, match="layers must not average gradients themselves") as caught:
            wrapped(rank, way)
        found[way] = str(caught.value)
    return found


def test_a_layer_that_averages_gradients_itself_is_refused(tmp_path):
    for found in run_processes(2, tmp_path, refusals):
        assert [way for way, message in found.items() if way.split()[0] not in message] == []
