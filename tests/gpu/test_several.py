"""On two accelerators: what one cannot show."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe
from gpipe_bench.skip import pop, skippable
from tests.engine.support import FACTORIAL, MODES, Mix, Stash, Watch, label, train_step
from tests.gpu.support import LATE_BALANCE, Streams, assert_same_elsewhere, late_batch, late_model, placed

pytestmark = pytest.mark.multigpu

every_combination = pytest.mark.parametrize("components", FACTORIAL, ids=label)


@pytest.fixture(scope="module")
def expected():
    """What the plain module gives on the CPU."""
    return train_step(late_model(), late_batch(torch.device("cpu")))


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
@every_combination
def test_four_partitions_on_two_devices(pair, expected, components, checkpoint, transfer):
    """The devices take turns, so every boundary is crossed: 0, 1, 0, 1."""
    pipe = placed(
        late_model(), LATE_BALANCE, pair, chunks=4, components=components, checkpoint=checkpoint, transfer=transfer
    )
    outcomes = [train_step(pipe, late_batch(pair[0])) for _ in range(3)]
    for outcome in outcomes:
        assert_same_elsewhere(outcome, expected)


@pytest.mark.parametrize("checkpoint", MODES)
@every_combination
def test_as_many_partitions_as_devices(accelerators, expected, components, checkpoint):
    devices = accelerators[:4]
    balance = {2: [4, 4], 3: [2, 2, 4], 4: [2, 2, 2, 2]}[len(devices)]
    pipe = GPipe(late_model(), balance, devices=devices, chunks=4, components=components, checkpoint=checkpoint)
    outcomes = [train_step(pipe, late_batch(devices[0])) for _ in range(3)]
    for outcome in outcomes:
        assert_same_elsewhere(outcome, expected)


def test_parameters_and_output_are_where_their_partition_is(pair):
    pipe = placed(nn.Sequential(Mix(), Mix()), [1, 1], pair, chunks=2)
    assert [layer.linear.weight.device for layer in pipe] == pair
    assert pipe(torch.ones(4, 3, device=pair[0])).device == pair[1]


@pytest.mark.parametrize("portals", [True, False])
def test_a_skip_arrives_on_the_device_of_its_pop(pair, portals):
    seen = []

    @skippable(pop=["skip"])
    class Where(nn.Module):
        def forward(self, x):
            skip = yield pop("skip")
            seen.append((skip.device, x.device))
            return x + skip

    layers = nn.Sequential(Mix(), Stash(), Mix(), Where())
    placed(layers, [2, 1, 1], [pair[0], pair[0], pair[1]], chunks=2, components=Components(portals=portals))(
        torch.ones(4, 3, device=pair[0])
    )
    assert seen == [(pair[1], pair[1])] * 2


def test_every_device_has_a_worker_and_autograd_thread_of_its_own(pair):
    threads = [set(), set()]

    class Threads(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index
            self.mix = Mix()

        def forward(self, x):
            threads[self.index].add(threading.get_ident())
            return self.mix(x)

    pipe = placed(nn.Sequential(Threads(0), Threads(1)), [1, 1], pair, chunks=3, checkpoint="always")
    pipe(torch.ones(6, 3, device=pair[0])).sum().backward()
    assert not threads[0] & threads[1]


@pytest.mark.parametrize("copy_streams", [True, False])
def test_copies_between_devices_stay_off_the_compute_streams(pair, copy_streams):
    components = Components(copy_streams=copy_streams)
    pipe = placed(nn.Sequential(Streams(), Streams()), [1, 1], pair, chunks=3, components=components)
    with pipe.observe(watch := Watch()):
        pipe(torch.ones(6, 3, device=pair[0])).sum().backward()
    copies = [seen.task for seen in watch.seen if seen.task.kind in ("copy", "copy_grad")]
    computing = [torch.accelerator.current_stream(device) for device in pair]
    assert len(copies) == 6
    assert {task.lane for task in copies} == {"copy" if copy_streams else "compute"}
    assert any(task.stream in computing for task in copies) != copy_streams
    for device, stream, layer in zip(pair, computing, pipe, strict=True):
        assert layer.seen["first"] == layer.seen["again"] == layer.seen["backward"] == {stream.stream_id}, device


@pytest.mark.parametrize("checkpoint", MODES)
def test_fork_and_join_order_the_backward_passes_of_every_device(pair, checkpoint):
    """Also where every device has an autograd thread of its own."""
    for _ in range(5):
        pipe = placed(late_model(), LATE_BALANCE, pair, chunks=4, checkpoint=checkpoint)
        with pipe.observe(watch := Watch()):
            pipe(late_batch(pair[0], 4)).sum().backward()
        for j in range(4):
            order = [name for name in watch.order("B").split() if name.endswith(f",{j}")]
            assert order == [f"B{i},{j}" for i in reversed(range(4))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_reaches_every_device(pair, dtype):
    seen = set()

    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            seen.add(y.dtype)
            return y

    pipe = placed(nn.Sequential(Typed(), Typed()), [1, 1], pair, chunks=2, checkpoint="always")
    with torch.autocast(pair[0].type, dtype):
        loss = pipe(torch.ones(4, 8, device=pair[0])).float().sum()
    loss.backward()
    assert seen == {dtype}


def test_an_exception_on_the_second_device_surfaces(pair):
    class Fail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.armed = True

        def forward(self, x):
            y = x * 1
            if y.requires_grad:
                y.register_hook(self.fail)
            return y

        def fail(self, grad):
            if self.armed:
                raise ArithmeticError("on the second device")

    pipe = placed(nn.Sequential(Mix(), Fail()), [1, 1], pair, chunks=3)
    x = torch.ones(6, 3, device=pair[0])
    with pytest.raises(ArithmeticError, match="on the second device"):
        pipe(x).sum().backward()
    pipe[1].armed = False
    pipe.zero_grad()
    pipe(x).sum().backward()
    assert pipe[0].linear.weight.grad is not None


def test_tuples_with_integers_cross_devices(pair):
    class Tag(nn.Module):
        def forward(self, x):
            return (x[:, 0] > 0).long(), x, None

    class Read(nn.Module):
        def forward(self, value):
            integers, x, nothing = value
            assert nothing is None
            return x * (1 + integers).unsqueeze(1)

    plain = nn.Sequential(Mix(), Tag(), Read(), Mix()).double()
    pipe = placed(copy.deepcopy(plain), [2, 2], pair, chunks=3)
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3).requires_grad_()
    assert_same_elsewhere(train_step(pipe, x.detach().to(pair[0]).requires_grad_()), train_step(plain, x))
