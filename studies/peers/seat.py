"""A place in the race: what a process of a contender is told, and the step that it makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gpipe_bench.schedules.cycles import checkpoint_stop
from studies.peers.cases import PeerCase
from studies.peers.contenders import Contender


class Seat(NamedTuple):
    """One of the processes of a contender.

    Attributes:
        contender: what all ranks are part of.
        case: what all ranks run.
        rank: 0-based.
        ranks: how many there are.
    """

    contender: Contender
    case: PeerCase
    rank: int = 0
    ranks: int = 1

    @property
    def place(self) -> str:
        """The device of this rank."""
        places = self.case.partition_devices()
        if not self.contender.process_per_device:
            places = sorted(set(places))
        return places[self.rank % len(places)]

    @property
    def recomputed(self) -> int:
        """How many micro-batches of a step are checkpointed, the first ones."""
        mode: Any = self.case.checkpoint
        return checkpoint_stop(mode, self.case.chunks)

    def own(self) -> list[int]:
        """Partitions of this rank: every so manieth, so that neighbours are on different ranks, or a V."""
        there = [*range(self.ranks)]
        way = [*there, *reversed(there)] if self.contender.v_shaped else there
        return [j for j in range(len(self.case.balance)) if way[j % len(way)] == self.rank]


class Step:
    """A training step in this process: forward and backward over the whole batch, until all devices are done.

    There is no optimizer: it costs every contender the same, and without it all steps are alike.

    Args:
        parameters: of the model, in its order.
        forward_backward: what a step does besides clearing the gradients.
        devices: to wait for at the end.
        pieces: equal parts, one after the other, in which the batch passes the layers.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        forward_backward: Callable[[], None],
        devices: Sequence[str],
        pieces: int,
    ) -> None:
        self._parameters, self._forward_backward = list(parameters), forward_backward
        self._devices, self._pieces = list(dict.fromkeys(devices)), pieces

    def __call__(self) -> None:
        """Train once."""
        for parameter in self._parameters:
            parameter.grad = None
        self._forward_backward()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the devices have done all their work."""
        for device in self._devices:
            if device != "cpu":
                torch.accelerator.synchronize(device)

    def gradients(self) -> list[Tensor]:
        """Those that the last step left, on the CPU; zeros for parameters of other ranks."""
        found = (torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters)
        return [gradient.cpu() for gradient in found]

    def forward_passes(self) -> float:
        """Train once; how often each sample passed each layer with parameters, recomputation included, on average."""
        passed: list[int] = []  # appended to by all threads

        def note(layer: nn.Module, _: tuple[Any, ...]) -> None:
            passed.append(len(list(layer.parameters(recurse=False))))

        with register_module_forward_pre_hook(note):
            self()
        return sum(passed) / (len(self._parameters) * self._pieces)
