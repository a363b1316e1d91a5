"""On two accelerators: what one cannot show."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.skip import pop, skippable
from tests.engine.support import MODES, Mix, Stash, Watch
from tests.gpu.support import LATE_BALANCE, Streams, late_batch, late_model, placed

pytestmark = pytest.mark.multigpu


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
