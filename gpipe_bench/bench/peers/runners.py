"""A contender at work: the model in its hands, one training step, the gradients that this leaves.

A step clears the gradients, runs forward and backward over the whole batch, and ends when all devices are done. No
optimizer: it costs every contender the same, and without it all steps are alike.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gpipe_bench.bench.peers.cases import PeerCase
from gpipe_bench.bench.peers.contenders import Contender
from gpipe_bench.bench.peers.live import Peak
from gpipe_bench.bench.peers.skips import Stage, make_stages, translated
from gpipe_bench.bench.peers.workloads import Work, make_work
from gpipe_bench.components import Components
from gpipe_bench.engine.gpipe import GPipe
from gpipe_bench.schedules.cycles import checkpoint_stop

_ALL: Final = slice(None)


class TrainingStep:
    """A step in this process.

    Args:
        parameters: of the model, in its order.
        forward_backward: what a step does besides clearing the gradients.
        devices: to wait for at the end.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], forward_backward: Callable[[], None], devices: Sequence[str]
    ) -> None:
        self.parameters = list(parameters)
        self._forward_backward = forward_backward
        self._devices = list(dict.fromkeys(devices))

    def __call__(self) -> None:
        """Train once."""
        for parameter in self.parameters:
            parameter.grad = None
        self._forward_backward()
        synchronize(self._devices)

    def gradients(self) -> list[Tensor]:
        """Those that the last step left."""
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]

    def forward_passes(self, pieces: int) -> float:
        """Train once; how often each sample passed each layer with parameters, recomputation included, on average.

        Args:
            pieces: equal parts, one after the other, in which the batch passes the layers.
        """
        passed: list[int] = []  # appended to by all threads

        def note(layer: nn.Module, _: tuple[Any, ...]) -> None:
            passed.append(len(list(layer.parameters(recurse=False))))

        with register_module_forward_pre_hook(note):
            self()
        return sum(passed) / (len(self.parameters) * pieces)


class CountedStep:
    """A step and what is counted of it."""

    step: TrainingStep
    pieces: int
    peak: Peak | None

    def forward_passes(self) -> float:
        """Of a step, per sample: one, and what checkpoints compute again."""
        return self.step.forward_passes(self.pieces)

    def peak_bytes(self) -> int:
        """The most bytes of tensors that were alive at once; 0 where they are not counted."""
        return 0 if self.peak is None else self.peak.peak_bytes()


def synchronize(devices: Sequence[str]) -> None:
    """Wait until accelerators have done what they were given."""
    for device in devices:
        if device != "cpu":
            torch.accelerator.synchronize(device)


def make_step(contender: Contender, case: PeerCase) -> TrainingStep:
    """The step of a contender that lives in one process.

    Args:
        contender: one without a process per device.
        case: what it runs.

    Raises:
        Exception: whatever the contender raises when it is built.
    """
    torch.set_num_threads(case.cores if contender.all_threads else 1)
    work = make_work(case)
    if contender.kind == "plain":
        return _plain(contender, case, work)
    pipe: Any = (_engine if contender.kind == "engine" else _rival)(contender, case, work.model)
    places = case.placement()
    batch, target = work.batch.to(places[0]), work.target.to(places[-1])

    def step() -> None:
        if contender.one_call:
            pipe.step(batch, target, work.loss, reduction="mean")
        else:
            torch.autograd.backward(work.loss(pipe(batch), target))

    return TrainingStep(list(pipe.parameters()), step, places)


def _engine(contender: Contender, case: PeerCase, model: nn.Sequential) -> nn.Module:
    return GPipe(
        model, list(case.balance), devices=case.placement(), chunks=case.chunks, checkpoint=case.checkpoint,
        components=Components.from_label(case.variant) if case.variant else None, schedule=contender.option or None,
        workers="never" if contender.one_thread else "always",
    )  # fmt: skip


def _rival(contender: Contender, case: PeerCase, model: nn.Sequential) -> nn.Module:
    """The GPipe of torchgpipe or the Pipe of fairscale: one interface, as the latter was made from the former."""
    if contender.name == "torchgpipe":
        build, skip = importlib.import_module("torchgpipe").GPipe, importlib.import_module("torchgpipe.skip")
    else:
        build, skip = importlib.import_module("fairscale.nn").Pipe, importlib.import_module("fairscale.nn.pipe.skip")
    options = {"devices": case.placement(), "chunks": case.chunks, "checkpoint": case.checkpoint}
    made: nn.Module = build(translated(model, skip), list(case.balance), **options)
    return made


def _plain(contender: Contender, case: PeerCase, work: Work) -> TrainingStep:
    """The module on one device: at once, or micro-batch after micro-batch with gradients that add up."""
    place = case.placement()[0]
    if contender.option == "loop":
        return loop_step(case, work, place)
    model, batch, target = work.model.to(place), work.batch.to(place), work.target.to(place)
    return TrainingStep(
        list(model.parameters()), lambda: torch.autograd.backward(work.loss(model(batch), target)), [place]
    )


def loop_step(case: PeerCase, work: Work, place: str, share: slice = _ALL) -> TrainingStep:
    """The module on one device, micro-batch after micro-batch, with gradients that add up.

    Args:
        case: what is run.
        work: its model and batch.
        place: the device.
        share: which of the micro-batches; gradients are those of the loss of all of them.
    """
    model, batch, target = work.model.to(place), work.batch.to(place), work.target.to(place)
    pairs = list(zip(batch.chunk(case.chunks), target.chunk(case.chunks), strict=True))[share]
    # Where the mode asks for no checkpoint the module runs as it is: a user would not cut it.
    stages = make_stages(model, case.balance, recomputed(case)) if recomputed(case) else []

    def step() -> None:
        for stage in stages:
            stage.calls = 0
        for part, wanted in pairs:
            output = _through(stages, part) if stages else model(part)
            torch.autograd.backward(work.loss(output, wanted) / case.chunks)

    return TrainingStep(list(model.parameters()), step, [place])


def _through(stages: Sequence[Stage], x: Tensor) -> Tensor:
    tensors: tuple[Tensor, ...] = (x,)
    for stage in stages:
        given = stage(*tensors)
        tensors = given if isinstance(given, tuple) else (given,)
    return tensors[0]


def recomputed(case: PeerCase) -> int:
    """How many micro-batches of a step are checkpointed, the first ones."""
    mode: Any = case.checkpoint
    return checkpoint_stop(mode, case.chunks)
