"""A pipeline as an nn.Module: a sequence of its layers, with the plain module's names, that stays on its devices."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from gpipe_bench import GPipe, Pipe, distributed
from gpipe_bench.engine.module import PartitionedModule
from gpipe_bench.engine.paper.executor import PaperExecutor
from gpipe_bench.engine.runtime.executor import RuntimeExecutor
from gpipe_bench.errors import PlacementError
from tests.engine.support import Mix, Watch, on_cpu

X = torch.ones(4, 3)


def layers() -> list[nn.Module]:
    return [Mix(), nn.BatchNorm1d(3), nn.Tanh(), Mix()]


# --- sequence ------------------------------------------------------------------------------------------------------


def test_length_iteration_and_index():
    made = layers()
    pipe = on_cpu(nn.Sequential(*made), [1, 2, 1])
    assert len(pipe) == 4
    assert list(pipe) == made
    assert [pipe[index] for index in range(4)] == made
    assert [pipe[index] for index in range(-4, 0)] == made


@pytest.mark.parametrize("index", [4, -5])
def test_an_index_beyond_the_layers(index):
    with pytest.raises(IndexError):
        on_cpu(nn.Sequential(*layers()), [2, 2])[index]


def test_partitions_hold_the_layers_in_order():
    made = layers()
    pipe = on_cpu(nn.Sequential(*made), [1, 2, 1])
    assert [list(partition) for partition in pipe.partitions] == [made[:1], made[1:3], made[3:]]


def test_an_empty_pipeline_returns_its_input():
    pipe = GPipe(nn.Sequential(), [], devices=[])
    assert pipe(X) is X
    assert len(pipe) == 0
    assert list(pipe) == []


@pytest.mark.parametrize("value", [42, [X], (X, 42), (), None])
def test_an_empty_pipeline_takes_tensors_only(value):
    with pytest.raises(TypeError, match="input must be a tensor or a tuple of tensors, got"):
        GPipe(nn.Sequential(), [])(value)


# --- names and checkpoints of parameters ---------------------------------------------------------------------------


def named() -> nn.Sequential:
    """Names that the pipeline uses for itself."""
    names = ["devices", "balance", "partitions", "chunks", "checkpoint", "components", "observe", "_pipeline"]
    names += ["task_observer", "batch_lock", "layers_in_use", "skip_layout"]
    return nn.Sequential(OrderedDict((name, nn.Linear(3, 3)) for name in names))


def test_keys_are_those_of_the_plain_module():
    plain = nn.Sequential(OrderedDict(stem=Mix(), body=nn.Sequential(Mix(), nn.BatchNorm1d(3)), head=Mix()))
    pipe = on_cpu(copy.deepcopy(plain), [1, 2])
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in pipe.named_buffers()] == [name for name, _ in plain.named_buffers()]
    assert [name for name, _ in pipe.named_children()] == ["stem", "body", "head"]
    assert [name for name, _ in pipe.named_modules()] == [name for name, _ in plain.named_modules()]


@pytest.mark.parametrize("deferred", [False, True])
def test_checkpoints_load_both_ways(deferred):
    plain, other = nn.Sequential(*layers()), nn.Sequential(*layers())
    pipe = on_cpu(copy.deepcopy(other), [2, 2], deferred_batch_norm=deferred)
    pipe.load_state_dict(plain.state_dict())
    torch.testing.assert_close(pipe.eval()(X), plain.eval()(X))
    other.load_state_dict(pipe.state_dict())
    torch.testing.assert_close(other.eval()(X), plain(X))


def test_layers_may_have_the_names_of_attributes():
    plain = named()
    pipe = on_cpu(copy.deepcopy(plain), [6, 6], chunks=2)
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert (pipe.balance, pipe.chunks, pipe.devices[0].type) == ([6, 6], 2, "cpu")
    torch.testing.assert_close(pipe(X), plain(X))
    pipe(X).sum().backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_of_such_a_pipeline_work(again):
    pipe = on_cpu(named(), [6, 6], chunks=2)
    with pipe.observe(Watch()):
        copied = again(pipe)
    torch.testing.assert_close(copied(X), pipe(X))
    assert (copied.task_observer, copied.batch_lock.locked()) == (None, False)


@pytest.mark.parametrize(("schedule", "kind"), [(None, PaperExecutor), ("1f1b", RuntimeExecutor)])
def test_a_pipeline_holds_one_executor(schedule, kind):
    pipe = on_cpu(nn.Sequential(*layers()), [2, 2], schedule=schedule)
    executor = pipe._pipeline.executor
    assert type(executor) is kind
    pipe.step(X, X, nn.functional.mse_loss)
    pipe[0] = Mix()
    pipe.step(X, X, nn.functional.mse_loss)
    assert pipe._pipeline.executor is executor


@pytest.mark.parametrize("kind", [GPipe, Pipe, distributed.Pipe])
def test_tools_see_the_parameters_of_a_pipeline(kind):
    """Nothing stands between it and the module of layers, and nothing is handed on by ``*args`` or ``**kwargs``."""
    assert kind.__mro__ == (kind, PartitionedModule, nn.Module, object)
    for call in (kind, kind.step):
        kinds = {each.kind for each in inspect.signature(call).parameters.values() if each.name != "kwargs"}
        assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def test_an_optimizer_trains_the_layers_of_the_module_itself():
    module = nn.Sequential(*layers())
    pipe = on_cpu(module, [2, 2], chunks=2)
    before = module[0].linear.weight.detach().clone()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe(X + torch.arange(4.0).unsqueeze(1)).sum().backward()
    optimizer.step()
    assert not torch.equal(module[0].linear.weight, before)


# --- moving and modes ----------------------------------------------------------------------------------------------

MOVES = {
    "cuda()": lambda pipe: pipe.cuda(),
    "cuda(1)": lambda pipe: pipe.cuda(1),
    "to(meta)": lambda pipe: pipe.to(torch.device("meta")),
    "to(0)": lambda pipe: pipe.to(0),
    "to(meta) ": lambda pipe: pipe.to(device="meta"),
    "to(meta)  ": lambda pipe: pipe.to("meta", torch.float64),
    "to(meta)   ": lambda pipe: pipe.to(X.to("meta")),
    "to(meta)    ": lambda pipe: pipe.to(tensor=X.to("meta")),
    "to(meta)     ": lambda pipe: pipe.to(torch.float64, device="meta"),
    "to_empty(device=meta)": lambda pipe: pipe.to_empty(device="meta"),
}


@pytest.mark.parametrize("call", MOVES)
def test_a_pipeline_does_not_move(call):
    pipe = on_cpu(nn.Sequential(*layers()), [2, 2])
    with pytest.raises(PlacementError) as caught:
        MOVES[call](pipe)
    assert str(caught.value) == (
        f"a pipeline must stay on the devices it was made for, got {call.strip()}; make a new one on other devices"
    )
    assert pipe[0].linear.weight.dtype == torch.float32


STAYS = {
    "cpu()": lambda pipe: pipe.cpu(),
    "to(cpu)": lambda pipe: pipe.to("cpu"),
    "to(device)": lambda pipe: pipe.to(device=torch.device("cpu")),
    "to(tensor)": lambda pipe: pipe.to(X),
    "to_empty()": lambda pipe: pipe.to_empty(device="cpu"),
}


@pytest.mark.parametrize("call", STAYS)
def test_a_move_to_where_it_is_changes_nothing(call):
    pipe = on_cpu(nn.Sequential(*layers()), [2, 2], chunks=2)
    assert STAYS[call](pipe) is pipe
    assert pipe(X).shape == X.shape


CASTS = {
    "to(cpu, dtype)": lambda pipe: pipe.to("cpu", torch.float64),
    "to(dtype)": lambda pipe: pipe.to(torch.float64),
    "to(dtype=)": lambda pipe: pipe.to(dtype=torch.float64),
    "double()": lambda pipe: pipe.double(),
}


@pytest.mark.parametrize("call", CASTS)
def test_the_type_may_change(call):
    pipe = on_cpu(nn.Sequential(*layers()), [2, 2], chunks=2)
    assert CASTS[call](pipe) is pipe
    assert pipe(X.double()).dtype == torch.float64


def test_half_precision():
    pipe = on_cpu(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], chunks=2).half()
    pipe(X.half()).float().sum().backward()
    assert {parameter.grad.dtype for parameter in pipe.parameters()} == {torch.float16}


def test_the_memory_format_may_change():
    pipe = on_cpu(nn.Sequential(nn.Conv2d(2, 2, 3)), [1]).to(memory_format=torch.channels_last)
    assert pipe[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_modes_reach_every_layer():
    pipe = on_cpu(nn.Sequential(*layers()), [2, 2])
    assert not any(layer.training for layer in pipe.eval())
    assert all(layer.training for layer in pipe.train())


def test_hooks_of_layers_and_of_the_pipeline_run():
    pipe = on_cpu(nn.Sequential(*layers()), [2, 2], chunks=2)
    calls = []
    pipe[0].register_forward_hook(lambda *_: calls.append("layer"))
    pipe.register_forward_hook(lambda *_: calls.append("pipeline"))
    with torch.no_grad():
        pipe(X)
    assert calls == ["layer", "layer", "pipeline"]


def test_its_text_lists_the_layers():
    pipe = on_cpu(nn.Sequential(OrderedDict(first=nn.Linear(3, 2), second=nn.ReLU())), [1, 1])
    assert "(first): Linear(in_features=3, out_features=2, bias=True)" in repr(pipe)
    assert "(second): ReLU()" in repr(pipe)
