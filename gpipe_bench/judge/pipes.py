"""What adapters share: pipes that are modules, and stages of a process with all that their users write by hand."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode

from gpipe_bench.judge.protocol import Loss, Setup
from gpipe_bench.judge.skips import make_stages

_TWICE = "torch.utils.checkpoint, which its user writes, runs layers twice"

BY_HAND: Final = {
    "tied": "left to the user",
    "recovery": "the group cannot go on after an error",
    "batch norm/always": _TWICE,
    "batch norm/except_last": _TWICE,
    "spectral norm/always": _TWICE,
    "hook on input/always": _TWICE,
}
"""Limits of engines whose users write checkpoints and shared weights by hand; see :class:`StagePipe`."""

SPLIT: Final = {"zb_h1", "interleaved_zb", "zb_v", "dualpipe_v"}
"""Schedules that split backward into I and W, between which a checkpoint keeps activations."""


def by_hand(schedule: str) -> dict[str, str]:
    """Those limits, and those of a checkpoint in a schedule with I and W."""
    split = {
        key: f"{_TWICE}: for I and for W"
        for name in ("passes", "memory")
        for key in (f"{name}/always", f"{name}/except_last")
    }
    return BY_HAND | (split if schedule in SPLIT else {})


def options_of(setup: Setup) -> dict[str, Any]:
    """Options of engines with checkpoints and deferred batch norm of their own; none where defaults are judged."""
    return {} if setup.defaults else {"checkpoint": setup.checkpoint, "deferred_batch_norm": True}


@cache
def mesh_of(copies: int, n: int) -> DeviceMesh:
    """The processes of a case: ``copies`` replicas or shards, each a pipeline of n processes."""
    return init_device_mesh("cpu", (copies, n), mesh_dim_names=("copies", "pp"))


def at_two_a_device(setup: Setup) -> Setup:
    """A setup for a schedule that needs two micro-batches for each device: with four of them on two devices.

    One with fewer micro-batches than devices stays as it is.
    """
    return replace(setup, n=2, chunks=4) if setup.n <= setup.chunks < 2 * setup.n else setup


class PlainPipe:
    """A module that is called and then run backward: what pipes in one process share."""

    def __init__(self, model: nn.Module, pipe: nn.Module) -> None:
        self.model, self.pipe = model, pipe

    def own(self) -> list[nn.Module]:
        """All of it."""
        return [self.pipe]

    def step(self, x: Any, target: Any, loss: Loss) -> Tensor:
        """Forward, backward."""
        value = loss.call(self.pipe(x), target)
        torch.autograd.backward(value)
        return value.detach()

    def evaluate(self, x: Any) -> Any:
        """Forward."""
        with torch.no_grad():
            return self.pipe(x)

    def clip(self, max_norm: float) -> Tensor:
        """By PyTorch's function."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)


class StepPipe(PlainPipe):
    """A pipe of this project, whose method trains on a batch."""

    def step(self, x: Any, target: Any, loss: Loss) -> Tensor:
        """By the pipe's method."""
        pipe: Any = self.pipe
        value: Tensor = pipe.step(x, target, loss.call, reduction=loss.reduction)
        return value.detach()


class StagePipe(ABC):
    """The stages of this process, for engines whose users write skips, checkpoints and shares of the loss.

    Args:
        model: the whole of it.
        setup: of the pipeline.
        v_shaped: whether the second stage of a process is that behind the last one of all first stages.

    Attributes:
        whole: all stages, of which a process runs some.
        stages: those of this process, by their places.
        device: of this process.
        group: the processes of this pipeline; None: all.
        averages: whether the engine itself divides gradients by the number of micro-batches.
        kind, loss: for the engine's schedule, and the loss of the step.
        plans: what the engine prepares for the shapes of inputs.
    """

    averages = False
    kind: Any = None
    loss: Any = None

    def __init__(self, model: nn.Sequential, setup: Setup, *, v_shaped: bool) -> None:
        self.setup = setup
        # The first step of an engine that finds shapes by running stages has one call more.
        recomputed = {"never": 0, "except_last": setup.chunks - 1, "always": 10**9}[setup.checkpoint]
        self.whole = make_stages(model, setup.balance(len(model)), recomputed, sent=True)
        rank, n = dist.get_rank() % setup.n, setup.n
        second = 2 * n - 1 - rank if v_shaped else n + rank
        self.device = setup.places[rank]
        self.stages = {j: self.whole[j].to(self.device) for j in [rank, second][: setup.per_device]}
        self.is_last = len(self.whole) - 1 in self.stages
        self.group = mesh_of(setup.copies, n)["pp"].get_group() if setup.copies > 1 else None
        self.plans = dict[Any, Any]()

    def now(self, out: Any, part: Any) -> Tensor:
        """The loss of this step, for engines that are given a loss once."""
        value: Tensor = self.loss(out, part)
        return value

    @abstractmethod
    def train(self, inputs: tuple[Tensor, ...], target: Any, loss: Callable[..., Tensor]) -> list[Tensor]:
        """Train on a batch, with a loss of output and target of a micro-batch; the losses where they are known."""

    @abstractmethod
    def infer(self, inputs: tuple[Tensor, ...]) -> Any:
        """The output for a batch, where it is known."""

    def own(self) -> list[nn.Module]:
        """The stages of this process."""
        return [*self.stages.values()]

    def step(self, x: Any, target: Any, loss: Loss) -> Tensor | None:
        """Train with the share of each micro-batch in the loss."""
        share = loss.shares(target)
        own = loss.call if self.averages else lambda out, part: loss.call(out, part) * share(part)
        given = x if isinstance(x, tuple) else (x,)
        for stage in self.stages.values():
            stage.calls = 0
        losses = self.train(given, target, own)
        if not losses:
            return None
        return (torch.stack(losses).mean() if self.averages else torch.stack(losses).sum()).detach()

    def evaluate(self, x: Any) -> Any:
        """Forward."""
        with torch.no_grad():
            return self.infer(x if isinstance(x, tuple) else (x,))

    def clip(self, max_norm: float) -> Tensor:
        """Not by this engine."""
        raise RuntimeError(f"clipping to {max_norm} is left to the user")


class PackPipe(StagePipe):
    """Stages for an engine that takes a tuple of micro-batches, and asks stages for what goes between them.

    The engine is d9d, and this is what its users write; ``docs/models/pipeline_parallelism.md`` there shows it. d9d
    makes buffers on "cuda" and wants a context of its own, so both are given CPUs.

    Args:
        model, setup, v_shaped: see :class:`StagePipe`.
        plans: the engine's settings of schedules: to train, and to evaluate, which takes one stage per device.
    """

    def __init__(self, model: nn.Sequential, setup: Setup, plans: Sequence[Any], *, v_shaped: bool) -> None:
        super().__init__(model, setup, v_shaped=v_shaped)
        self.spec = import_module("d9d.core.types").TensorSpec
        build = import_module("d9d.pipelining.factory").build_schedule
        mesh, together = mesh_of(setup.copies, setup.n), SimpleNamespace(is_distributed=True)
        self.mesh = mesh["pp"]
        context = SimpleNamespace(mesh_for=lambda _: mesh, logger=logging.getLogger("d9d"), mesh_params=together)
        self.schedules = [
            build(context, plan, lambda place: _PackStage(self, place.current_stage))[0].schedule
            for plan in plans[: 3 - setup.per_device]
        ]

    def between(self, inputs: tuple[Any, ...]) -> list[Any]:
        """What each stage gives for a micro-batch: found once for each shape, from copies of the stages."""
        shapes = tuple((value.shape, value.dtype) for value in inputs)
        if shapes not in self.plans:
            self.plans[shapes], values = [], tuple(map(torch.zeros_like, inputs))
            with torch.no_grad(), torch.random.fork_rng([]):
                for stage in deepcopy(self.whole):
                    found = stage(*values)
                    values = found if isinstance(found, tuple) else (found,)
                    self.plans[shapes].append(
                        tuple(one if one is None else self.spec(tuple(one.shape), one.dtype) for one in values)
                    )
        result: list[Any] = self.plans[shapes]
        return result

    def on_cpu(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the engine."""
        with _OnCpu():
            return function(*arguments)

    def run(self, schedule: Any, inputs: tuple[Tensor, ...], loss: Callable[[Any, int], Tensor]) -> list[Tensor]:
        """Run micro-batches; what ``loss`` makes of their outputs, in their order."""
        found: dict[int, Tensor] = {}
        pack = tuple(zip(*(value.chunk(self.setup.chunks) for value in inputs), strict=True))
        self.on_cpu(schedule.step, pack, (None,) * len(pack), lambda out, i: found.setdefault(i, loss(out, i)))
        return [found[i] for i in sorted(found)]

    def train(self, inputs: tuple[Tensor, ...], target: Any, loss: Callable[..., Tensor]) -> list[Tensor]:
        """By the first schedule."""
        parts = target.chunk(self.setup.chunks)
        return self.run(self.schedules[0], inputs, lambda out, i: loss(out, parts[i]))

    def infer(self, inputs: tuple[Tensor, ...]) -> Any:
        """By the second schedule."""
        found = self.run(self.schedules[1], inputs, lambda out, _: out)
        return torch.cat(found) if found else None

    def clip(self, max_norm: float) -> Tensor:
        """By the engine's function."""
        norms, parameters = (
            import_module("d9d.internals.grad_norm"),
            (p for one in self.own() for p in one.parameters()),
        )
        groups = norms.group_parameters_for_norm(parameters)
        norm: Tensor = self.on_cpu(norms.clip_grad_norm_distributed_, groups, max_norm, 2.0, self.mesh)
        return norm


class _PackStage(nn.Module):
    def __init__(self, pipe: PackPipe, j: int) -> None:
        super().__init__()
        self.stage, self.pipe, self.j = pipe.whole[j], pipe, j

    def forward(self, inputs: Any, shared: None) -> Any:  # noqa: ARG002 - the interface of d9d
        found = self.stage(*inputs)
        return found if isinstance(found, tuple) or self.pipe.whole[-1] is self.stage else (found,)

    def stage_transfer_spec(self, pipeline_input: Any, boundary: Any) -> Any:
        return self.pipe.between(pipeline_input)[self.j - (boundary.value == "incoming")]


class _OnCpu(TorchFunctionMode):
    """CPUs for tensors that an engine makes on "cuda", whatever the processes have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        return func(*args, **given)
