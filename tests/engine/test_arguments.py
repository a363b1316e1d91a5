"""What a pipeline refuses, and in which words: what was got, and what to change."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe, WithDevice
from gpipe_bench.errors import (
    BalanceError,
    DeviceCountError,
    GpipeBenchError,
    PlacementError,
    ScheduleError,
    SkipLayoutError,
)
from gpipe_bench.schedules import SCHEDULES
from tests.engine.support import Mix, Pop, Stash


def module(layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Mix() for _ in range(layers)))


def make(sequential=None, balance=(1, 1), **options):
    options.setdefault("devices", ["cpu"] * 2)
    return GPipe(module() if sequential is None else sequential, balance, **options)


def tied():
    first, second = Mix(), Mix()
    second.linear = first.linear
    return nn.Sequential(first, second)


def repeated():
    layer = nn.ReLU()
    return nn.Sequential(layer, layer)


class Own(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def with_own(method, *arguments):
    sequential = module()
    getattr(sequential, method)(*arguments)
    return sequential


REFUSED = {
    "no Sequential": (lambda: make(nn.ModuleList([Mix()])), TypeError, "got ModuleList; list its layers in one"),
    "a layer alone": (lambda: make(Mix()), TypeError, "module must be an nn.Sequential, got Mix"),
    "a word for a flag": (lambda: make(deferred_batch_norm="yes"), TypeError, "got 'yes'; use one of them"),
    "a device that holds no numbers": (
        lambda: make(devices=["cpu", "meta"]),
        ValueError,
        "devices must keep the weights of partition 1, got 'meta', which holds no numbers; use one such as 'cpu'",
    ),
    "no balance": (lambda: make(balance=None), BalanceError, "balance must give the layers per partition, got None"),
    "a balance that adds up to less": (lambda: make(module(3)), BalanceError, "got [1, 1], which adds up to 2"),
    "a balance that adds up to more": (lambda: make(module(1)), BalanceError, "got [1, 1], which adds up to 2"),
    "an empty partition": (
        lambda: make(balance=[2, 0]),
        BalanceError,
        "balance must be a list of whole numbers of at least 1",
    ),
    "a negative partition": (lambda: make(balance=[3, -1]), BalanceError, "got [3, -1]; use e.g. [2, 2]"),
    "a broken partition": (lambda: make(balance=[1.5, 0.5]), BalanceError, "at least 1, got [1.5, 0.5]"),
    "an empty balance": (lambda: make(balance=[]), BalanceError, "got [], which adds up to 0"),
    "no chunks": (lambda: make(chunks=0), ValueError, "chunks must be a whole number of at least 1, got 0"),
    "negative chunks": (lambda: make(chunks=-3), ValueError, "at least 1, got -3"),
    "broken chunks": (lambda: make(chunks=2.0), ValueError, "chunks must be a whole number of at least 1, got 2.0"),
    "NumPy's broken chunks": (lambda: make(chunks=np.float64(2)), ValueError, "of at least 1, got np.float64(2.0)"),
    "NumPy's broken partition": (lambda: make(balance=np.ones(2)), BalanceError, "got [np.float64(1.0), np.float64"),
    "a forward of its own": (lambda: make(Own(Mix(), Mix())), TypeError, "got Own with a forward of its own"),
    "a parameter of its own": (
        lambda: make(with_own("register_parameter", "scale", nn.Parameter(torch.ones(1)))),
        ValueError,
        "module must have all its parameters and buffers in its layers, got ['scale']",
    ),
    "a buffer of its own": (
        lambda: make(with_own("register_buffer", "scale", torch.ones(1))),
        ValueError,
        "buffers in its layers, got ['scale']; move them there",
    ),
    "a hook of its own": (lambda: make(with_own("register_forward_hook", print)), ValueError, "got ['forward_hooks']"),
    "true chunks": (lambda: make(chunks=True), ValueError, "chunks must be a whole number of at least 1, got True"),
    "an unknown checkpoint mode": (lambda: make(checkpoint="sometimes"), ValueError, "got 'sometimes'"),
    "an unknown transfer": (lambda: make(transfer="mail"), ValueError, "transfer must be one of direct, host"),
    "too few devices": (lambda: make(devices=["cpu"]), DeviceCountError, "devices must be at least 2 for 2 partitions"),
    "too few devices for two partitions on each": (
        lambda: GPipe(nn.Sequential(*map(nn.Linear, [2] * 4, [2] * 4)), [1] * 4, devices=["cpu"], schedule="zb_v"),
        DeviceCountError,
        "devices must be at least 2 for 4 partitions, got 1 devices given; pass devices=",
    ),
    "a device of an unknown type": (
        lambda: make(devices=["cpu", "gpu"]),
        ValueError,
        "devices must be what PyTorch knows, got 'gpu' (Expected one of cpu, cuda",
    ),
    "a device that is no name": (lambda: make(devices=[None, None]), TypeError, "devices must be of names of devices"),
    "a device that is not here": (
        lambda: make(devices=["cpu", "cuda:99"]),
        DeviceCountError,
        f"devices must be on this machine, got 'cuda:99' where PyTorch sees {torch.cuda.device_count()} of type cuda",
    ),
    "a layer on an unknown device": (lambda: WithDevice(nn.ReLU(), "gpu"), ValueError, "device must be what PyTorch"),
    "a child twice": (lambda: make(repeated()), ValueError, "got one module as children 0 and 1"),
    "a module twice": (lambda: make(tied()), ValueError, "got 'linear' of child '1' shared with child '0'"),
    "a skip that nobody pops": (
        lambda: make(nn.Sequential(Stash(), Mix())),
        SkipLayoutError,
        "every skip must be stashed once and read by later layers, of which only the last one pops it, got no layer",
    ),
    "a label for components": (lambda: make(components="dep-x-x"), TypeError, "got 'dep-x-x'"),
    "a balance that is a number": (lambda: make(balance=1), TypeError, "got 1; put it into a list"),
    "devices that are a name": (lambda: make(devices="cpu"), TypeError, "got 'cpu'; put it into a list"),
    "devices that are one": (lambda: make(devices=torch.device("cpu")), TypeError, "got device(type='cpu')"),
    "a component that is no bool": (lambda: make(components=Components(portals=1)), TypeError, "got 1; pass a bool"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    attempt, error, message = REFUSED[name]
    with pytest.raises(error, match=re.escape(message)):
        attempt()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("n", [2, 4, 6])
@pytest.mark.parametrize("count", range(1, 8))
def test_each_device_has_a_partition_or_is_refused(schedule, n, count):
    try:
        pipe = make(module(n), [1] * n, devices=["cpu"] * count, schedule=schedule)
    except (DeviceCountError, ScheduleError):
        return
    # More devices than partitions may be there where each partition has its own, as in torchgpipe.
    assert len(set(pipe._pipeline.ranks)) == min(n, count)


@pytest.mark.parametrize("schedule", ["zb_v", "v_half", "v_min", "dualpipe_v"])
def test_devices_that_a_schedule_leaves_idle_are_named(schedule):
    rule = "devices must be at most 1 for 2 partitions of a schedule that puts several on each, got 2, of which 1"
    with pytest.raises(DeviceCountError, match=f"{rule} would stay idle; pass 1, or a balance of 4 partitions"):
        make(schedule=schedule)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA, got one with it")
def test_by_default_the_cuda_devices_are_used():
    with pytest.raises(DeviceCountError, match="at least 2 for 2 partitions, got 0 CUDA devices on this machine"):
        make(devices=None)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (BalanceError, ValueError),
        (DeviceCountError, IndexError),
        (PlacementError, TypeError),
        (SkipLayoutError, TypeError),
    ],
)
def test_errors_are_those_that_callers_of_torchgpipe_catch(error, base):
    assert issubclass(error, base)
    assert issubclass(error, GpipeBenchError)


def test_a_refused_module_is_left_as_it_was():
    sequential = nn.Sequential(nn.BatchNorm1d(3), Mix())
    with pytest.raises(BalanceError):
        make(sequential, balance=[1], deferred_batch_norm=True)
    assert type(sequential[0]) is nn.BatchNorm1d


def test_tying_within_one_child_is_legal():
    pipe = make(nn.Sequential(tied(), Mix()))
    pipe(torch.ones(2, 3)).sum().backward()
    assert pipe[0][0].linear.weight is pipe[0][1].linear.weight


# --- attributes ----------------------------------------------------------------------------------------------------


def test_attributes():
    pipe = GPipe(module(3), (1, 2), devices=["cpu"] * 5, chunks=4, checkpoint="always", transfer="host")
    assert (pipe.balance, pipe.chunks, pipe.checkpoint, pipe.transfer) == ([1, 2], 4, "always", "host")
    # cut to the number of partitions
    assert pipe.devices == [torch.device("cpu")] * 2
    assert [len(partition) for partition in pipe.partitions] == [1, 2]
    assert all(type(partition) is nn.Sequential for partition in pipe.partitions)
    assert pipe.components == Components()


def test_defaults():
    pipe = make()
    assert (pipe.chunks, pipe.checkpoint, pipe.transfer, pipe.components) == (1, "except_last", "direct", Components())


def test_numbers_of_numpy_are_taken_as_pythons():
    pipe = make(balance=np.array([1, 1]), chunks=np.int64(3))
    assert [type(number) for number in (*pipe.balance, pipe.chunks)] == [int] * 3
    pipe.chunks = np.int32(2)
    torch.testing.assert_close(pipe(X), pipe[1](pipe[0](X)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("chunks", 0, "chunks must be a whole number of at least 1, got 0"),
        ("checkpoint", "sometimes", "checkpoint must be one of always, except_last, never, got 'sometimes'"),
        ("workers", 2, "workers must be one of always, never, got 2"),
    ],
)
def test_a_setting_that_changes_later_is_checked_at_once(name, value, message):
    pipe = make()
    before = getattr(pipe, name)
    with pytest.raises(ValueError, match=message):
        setattr(pipe, name, value)
    assert getattr(pipe, name) == before


def test_a_balance_may_be_a_generator():
    assert make(balance=(size for size in (1, 1))).balance == [1, 1]


# --- inputs --------------------------------------------------------------------------------------------------------

X = torch.ones(4, 3)

INPUTS = {
    "no tensor": (5, TypeError, "input must be a tensor or a tuple of tensors, got int; pass only tensors"),
    "a list": (
        [X],
        TypeError,
        "got list; pass only tensors, and wrap a list of ready-made micro-batches in MicroBatches",
    ),
    "a dict": ({"x": X}, TypeError, "got dict"),
    "nothing": (None, TypeError, "got NoneType"),
    "an empty tuple": ((), TypeError, "got an empty tuple"),
    "a tuple with something else": ((X, 3, "x"), TypeError, "got a tuple with int, str"),
    "a nested tuple": ((X, (X,)), TypeError, "got a tuple with tuple"),
    "a scalar": (torch.tensor(1.0), ValueError, "must have a batch dimension, got a tensor without dimensions"),
    "unequal sizes": ((X, X[:2]), ValueError, "tensors of an input must agree in dimension 0, got sizes [4, 2]"),
    "another device": (X.to("meta"), ValueError, "input must be on the first partition's device cpu, got meta"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_refused_input(name):
    value, error, message = INPUTS[name]
    with pytest.raises(error, match=re.escape(message)):
        make()(value)


def test_pop_before_stash_is_refused_before_anything_runs():
    with pytest.raises(SkipLayoutError, match="pops 'skip', which no earlier layer stashes"):
        make(nn.Sequential(Pop(), Stash()))
