"""A place in the race: what a process of a contender is told, and the step that it makes of it.

The adapters of ``gpipe-bench judge`` build pipelines and the plain module; :func:`_loop` is the race's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gpipe_bench.judge.pipes import PlainPipe
from gpipe_bench.judge.protocol import Loss, Setup
from gpipe_bench.judge.runner import adapter_of
from gpipe_bench.judge.skips import make_stages
from gpipe_bench.schedules.cycles import checkpoint_stop
from studies.peers.cases import PeerCase
from studies.peers.contenders import Contender
from studies.peers.workloads import Work, make_work


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
        forward_backward: Callable[[], object],
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


def build(seat: Seat) -> Step:
    """The step of a contender in the process of ``seat``."""
    contender, case, work = seat.contender, seat.case, make_work(seat.case)
    places = case.partition_devices() if contender.pipeline and not contender.process_per_device else [seat.place]
    work = work._replace(batch=work.batch.to(places[0]), target=work.target.to(places[-1]))
    if not contender.pipeline:
        work.model.to(seat.place)
    if contender.kind in {"loop", "loops"}:
        return Step(list(work.model.parameters()), _loop(seat, work), places, case.chunks)
    engine = adapter_of(contender.engine)
    setup = Setup(
        case.partitions, case.chunks, case.checkpoint, engine.per_device,
        cut=case.balance, devices=tuple(case.partition_devices()),
        # PyTorch scales gradients by itself, as losses that are means want it.
        defaults=contender.kind == "pipelining",
    )  # fmt: skip
    pipe: Any = engine.build(work.model, setup)
    step = partial(PlainPipe.step, pipe) if contender.called else pipe.step
    loss, pieces = Loss(work.loss), case.chunks if contender.pipeline else 1
    return Step(list(work.model.parameters()), lambda: step(work.batch, work.target, loss), places, pieces)


def _loop(seat: Seat, work: Work) -> Callable[[], None]:
    """The module over one micro-batch after another; of ``loop-processes`` over the share of this process."""
    case = seat.case
    pairs = list(zip(work.batch.chunk(case.chunks), work.target.chunk(case.chunks), strict=True))
    recomputed = checkpoint_stop(case.checkpoint, case.chunks)
    # Where the mode asks for no checkpoint the module runs as it is: a user would not cut it.
    stages: list[Any] = make_stages(work.model, case.balance, recomputed) if recomputed else []

    def step() -> None:
        for stage in stages:
            stage.calls = 0
        for part, wanted in pairs[seat.rank :: seat.ranks]:
            tensors: Any = (part,)
            for stage in stages or [work.model]:
                given = stage(*tensors)
                tensors = given if isinstance(given, tuple) else (given,)
            # Gradients are those of the mean over all micro-batches.
            torch.autograd.backward(work.loss(tensors[0], wanted) / case.chunks)

    return step
