"""What the host takes: steps of networks so small that the device idles, updates, and threads that launch at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from statistics import fmean
from threading import Barrier, BrokenBarrierError
from time import perf_counter
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpipe_bench.measure.clock import synchronize
from gpipe_bench.models.gpt2 import Attention, Mlp

THREADS: Final = (1, 2, 4)
"""Numbers of threads whose rates are measured."""

_WIDTH: Final = 16
_BLOCKS: Final = 4
_PARAMETERS: Final = 400
_STEPS: Final = 5  # few enough that the launch queue never fills
_PASSES: Final = 20


def _convolutions() -> nn.Sequential:
    layers = ((nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2 * _BLOCKS))
    return nn.Sequential(*(layer for three in layers for layer in three))


def _transformer() -> nn.Sequential:
    layers = ((Attention(_WIDTH, 2, 0.0), Mlp(_WIDTH, 0.0)) for _ in range(_BLOCKS))
    return nn.Sequential(*(layer for two in layers for layer in two))


TINY: Final[Mapping[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]]] = MappingProxyType(
    {"convolutions": (_convolutions, (2, 3, 8, 8)), "transformer": (_transformer, (2, 8, _WIDTH))}
)
"""Networks that keep the host busy and the device not, and the shapes of their inputs."""


def loss(output: Tensor, _target: Tensor | None = None) -> Tensor:
    """What they are trained for."""
    return output.square().mean()


def step_seconds(name: str, device: torch.device, repeats: int) -> list[float]:
    """Host time of a training step of one of :data:`TINY`, once for each repeat."""
    make, shape = TINY[name]
    net, data = make().to(device), torch.randn(shape, device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        torch.autograd.backward(loss(net(data)))
        optimizer.step()
        optimizer.zero_grad()

    _host_seconds(step, device, _STEPS)
    return [_host_seconds(step, device, _STEPS) / _STEPS for _ in range(repeats)]


def update_seconds(device: torch.device, repeats: int) -> list[float]:
    """Host time of an update for each parameter, once for each repeat; in the end gradients are given up."""
    parameters = [torch.zeros(1, device=device, requires_grad=True) for _ in range(_PARAMETERS)]
    optimizer = torch.optim.SGD(parameters, lr=1e-3, foreach=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    found = []
    for _ in range(1 + repeats):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        found.append(_host_seconds(update, device, 1) / _PARAMETERS)
    return found[1:]


def _host_seconds(step: Callable[[], None], device: torch.device, times: int) -> float:
    """Until all is queued, from an idle device on."""
    synchronize([device])
    start = perf_counter()
    for _ in range(times):
        step()
    return perf_counter() - start


def thread_slowdowns(device: torch.device, repeats: int) -> list[float]:
    """How much longer an operation takes where several threads launch, all of them taken together.

    1: threads take turns, as if an interpreter lock were held all the time; 0.5: two of them launch at once.
    """
    found = []
    for _ in range(repeats):
        alone, *others = (_seconds_each(device, threads) for threads in THREADS)
        found.append(fmean(others) / alone)
    return found


def _seconds_each(device: torch.device, threads: int) -> float:
    """Seconds over passes, of threads that each run the same number."""
    make, shape = TINY["transformer"]
    barrier = Barrier(threads)

    def launch(net: nn.Sequential, data: Tensor) -> tuple[float, float]:
        """When it starts and ends."""
        try:
            # A stream of its own for each thread; the CPU has none.
            stream: AbstractContextManager[Any] = nullcontext() if device.type == "cpu" else torch.Stream(device)
            with torch.no_grad(), stream:
                net(data)
                # Where one of them fails, the others do not wait for it.
                with suppress(BrokenBarrierError):
                    barrier.wait()
                start = perf_counter()
                for _ in range(_PASSES):
                    net(data)
                return start, perf_counter()
        except BaseException:
            barrier.abort()
            raise

    nets = [(make().to(device), torch.randn(shape, device=device)) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(launch, *net) for net in nets]
    spans = [thread.result() for thread in running]
    synchronize([device])
    return (max(end for _, end in spans) - min(start for start, _ in spans)) / threads
