"""DistributedDataParallel around a pipeline: gradients are averaged, or the batch is refused."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from gpipe_bench import GPipe, LocalValue, Pipe
from gpipe_bench.errors import UnsupportedError
from tests.distributed.ranks import run_processes

STATIC = {"static_graph": True}
TOGETHER = (
    ("never", None, {}),
    ("never", None, STATIC),
    ("except_last", None, STATIC),
    ("always", None, STATIC),
    ("never", "gpipe", STATIC),
    ("except_last", "gpipe", STATIC),
)
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh())


def pipe(checkpoint="always", schedule=None, chunks=2):
    return Pipe(chain(), chunks, checkpoint, balance=[2, 2], schedule=schedule)


def loss_of(result):
    assert isinstance(result, LocalValue)
    return result.local_value().square().mean()


def train(rank):
    """The gradients of each model."""
    found, half = [], X.chunk(2)[rank]
    for checkpoint, schedule, options in TOGETHER:
        model = DistributedDataParallel(pipe(checkpoint, schedule), **options)
        for step in range(3):
            model.zero_grad()
            # Of two batches, the first of which is not averaged by itself.
            with model.no_sync() if step == 2 else nullcontext():
                loss_of(model(half)).backward()
        loss_of(model(half + 1)).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    # A thread of the group may have a gradient's context to free. It takes the interpreter lock for that, which the
    # end of the group holds while it waits for the thread.
    torch.distributed.barrier()
    return found


def test_two_processes_average_their_gradients(tmp_path):
    plain = chain()
    (plain(X).square().mean() + plain(X + 1).square().mean()).backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    torch.testing.assert_close(run_processes(2, tmp_path, train), [[expected] * len(TOGETHER)] * 2)


@pytest.fixture
def _alone(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("checkpoint", "schedule"), [("always", None), ("except_last", None), ("never", "gpipe"), ("always", "gpipe")]
)
def test_what_would_not_be_averaged_is_refused_before_it_runs(checkpoint, schedule):
    seen, model = [], DistributedDataParallel(pipe(checkpoint, schedule))
    model.module[0].register_forward_hook(lambda *_: seen.append("ran"))
    with pytest.raises(UnsupportedError, match="must have static_graph=True around a pipeline with"):
        model(X)
    assert not seen


@pytest.mark.usefixtures("_alone")
def test_a_layer_of_a_larger_module_is_refused_alike():
    model = DistributedDataParallel(nn.Sequential(pipe()))
    with pytest.raises(UnsupportedError, match="static_graph"):
        model(X)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_step_within_its_forward_is_refused(schedule):
    inner = pipe("never", schedule)
    model = DistributedDataParallel(nn.ModuleDict({"pipe": inner}), static_graph=True)
    model.module.forward = lambda x: inner.step(x, x, mse_loss)
    with pytest.raises(UnsupportedError, match=r"pipe\.step must run outside of DistributedDataParallel"):
        model(X)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_single_microbatch_needs_no_static_graph(checkpoint):
    model = DistributedDataParallel(pipe(checkpoint, chunks=1))
    loss_of(model(X)).backward()
    plain = chain()
    plain(X).square().mean().backward()
    torch.testing.assert_close([each.grad for each in model.parameters()], [each.grad for each in plain.parameters()])


@pytest.mark.usefixtures("_alone")
def test_what_is_not_averaged_is_not_refused():
    model, other = DistributedDataParallel(pipe()), pipe()
    with torch.no_grad():
        model(X)
    with model.no_sync():
        loss_of(model(X)).backward()
    model.module[1].register_forward_hook(lambda *_: loss_of(other(X)).backward())
    model.module.checkpoint = "never"
    loss_of(model(X)).backward()


def shard(layer):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, shard])
@pytest.mark.parametrize(
    ("checkpoint", "schedule"), [("except_last", None), ("never", "gpipe"), ("never", "zb_h1"), ("always", "zb_h1")]
)
def test_a_layer_that_averages_gradients_itself_is_refused_before_it_runs(checkpoint, schedule, wrap):
    seen, options = [], {"balance": [2, 2], "devices": ["cpu"] * 2, "chunks": 2}
    layers = chain()
    layers[2] = wrap(layers[2])
    layers[0].register_forward_hook(lambda *_: seen.append("ran"))
    model = GPipe(layers, checkpoint=checkpoint, schedule=schedule, **options)
    with pytest.raises(ValueError, match=r"layers must not average gradients themselves, .* got '2', which is a"):
        model.step(X, X, mse_loss)
    assert not seen


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, shard])
def test_a_layer_that_averages_gradients_itself_may_run_in_one_graph_or_without_gradients(wrap):
    layers = chain()
    layers[2] = wrap(layers[2])
    model = GPipe(layers, [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint="never")
    model.step(X, X, mse_loss)
    with torch.no_grad():
        model.checkpoint = "always"
        torch.testing.assert_close(model(X), chain()(X))
