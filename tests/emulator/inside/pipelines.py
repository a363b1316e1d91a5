"""Pipelines on virtual devices, and the cases in which they are run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench import Components, GPipe, is_recomputing
from gpipe_bench.emulator.library import thread_index
from gpipe_bench.emulator.races import Race, find_races
from gpipe_bench.emulator.recording import recording
from gpipe_bench.machine.replay import Machine, replay
from gpipe_bench.machine.trace import Trace
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from gpipe_bench.skip import Namespace
from tests.emulator.bed.behaviour import duration
from tests.emulator.bed.rows import NS_PER_MS
from tests.engine.support import Peek, Pop, Stash

WIDTH = 3
FORWARD_MS, BACKWARD_MS, COPY_MS = 10.0, 20.0, 0.1


class Mix(nn.Module):
    """(B, 3) -> (B, 3), with parameters; gradients of its input come two ways and are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class BoomError(Exception):
    """What a :class:`Fuse` raises."""


class Fuse(nn.Module):
    """Raises where it is told to: ``forward``, ``recompute`` or ``backward``, at the nth call from 0."""

    def __init__(self, where: str, nth: int) -> None:
        super().__init__()
        self.where, self.left = where, nth
        self.armed = True

    def burn(self, where: str) -> None:
        if self.armed and where == self.where:
            if self.left == 0:
                raise BoomError(where)
            self.left -= 1

    def forward(self, x: Tensor) -> Tensor:
        self.burn("recompute" if is_recomputing() else "forward")
        if x.requires_grad:
            x.register_hook(lambda _: self.burn("backward"))
        return x * 1


SKIPS = {
    "none": (),
    "nested": ((0, [7], False), (1, [6], False)),
    "mixed": ((0, [3], False), (2, [7], False), (1, [5], True)),
    "many": ((0, [1, 2, 3, 5, 5, 7], False), (2, [3, 6, 7], False), (1, [4, 5], True), (4, [6], False)),
}
"""Skips of a model of eight blocks: (block that stashes, blocks that read, whether what it stashes is None)."""


def model(skips: str = "mixed", blocks: int = 8) -> nn.Sequential:
    """Equal weights in every call; blocks are layers, so that a balance cuts between them."""
    torch.default_generator.manual_seed(7)
    members: list[list[nn.Module]] = [[Mix()] for _ in range(blocks)]
    for source, readers, nothing in SKIPS[skips]:
        namespace = Namespace()
        members[source].append(Stash(namespace, nothing=nothing))
        # Where many read, none pops.
        for reader in readers:
            members[reader].insert(0, (Pop if len(readers) == 1 else Peek)(namespace))
    return nn.Sequential(*(nn.Sequential(*member) for member in members)).double()


def even_balance(n: int, layers: int = 8) -> list[int]:
    """``layers`` layers in ``n`` partitions, the first ones larger."""
    return [layers // n + (j < layers % n) for j in range(n)]


TRANSFERS = ("direct", "host")
WAYS = ((None, "backward"), ("gpipe", "backward"), *((name, "step") for name in SCHEDULES))
"""(schedule, what runs the backward pass: ``loss.backward()`` or ``pipe.step()``); None is the paper's executor."""
DOUBLE = TWO_PER_DEVICE
"""Schedules with several partitions on each device, here two."""


@dataclass(frozen=True)
class Case:
    """One way to run a pipeline.

    Attributes:
        devices: of the partitions; of each two of them, where the schedule has two on a device.
        m: micro-batches.
        schedule: of the runtime, or None for the paper's executor.
        through: ``backward``, or ``step`` for ``pipe.step``.
        workers: who runs the tasks.
        size: rows of a micro-batch; the last one has one less.
    """

    devices: tuple[int, ...]
    m: int
    components: Components
    checkpoint: str
    skips: str
    transfer: str
    schedule: str | None = None
    through: str = "backward"
    workers: str = "always"
    size: int = 2

    def __str__(self) -> str:
        places = "".join(map(str, self.devices))
        return (
            f"{places}-m{self.m}-{self.components.label}-{self.checkpoint}-{self.skips}-{self.transfer}"
            f"-{self.schedule}-{self.through}-{self.workers}-{self.size}"
        )

    @property
    def n(self) -> int:
        return len(self.devices) * (2 if self.schedule in DOUBLE else 1)

    @property
    def rows(self) -> int:
        return max(self.size * self.m - 1, self.size)

    def pipe(self, module: nn.Sequential | None = None) -> GPipe:
        return GPipe(
            model(self.skips) if module is None else module,
            even_balance(self.n),
            devices=[f"virtual:{index}" for index in self.devices],
            chunks=self.m,
            checkpoint=self.checkpoint,
            components=self.components,
            transfer=self.transfer,
            schedule=self.schedule,
            workers=self.workers,
        )


def placements(n: int) -> Iterator[tuple[int, ...]]:
    """Where n partitions, or pairs of them, may be: each alone; back and forth; neighbours together; all together."""
    yield tuple(range(n))
    if n > 2:
        yield tuple(j % 2 for j in range(n))
        yield (0, *(1,) * (n - 2), 2)
    if n > 1:
        yield (3,) * n


def switches(schedule: str | None) -> list[Components]:
    """The combinations of components that an executor can have; the runtime needs neither Fork nor Join."""
    return [components for components in Components.factorial() if schedule is None or components.fork_join]


def some_cases(seed: int, each: int) -> Iterator[Case]:
    """For each schedule, and each placement of n = 1 to 8 partitions, so many cases with everything else at random."""
    draw = Random(seed)
    for schedule, through in WAYS:
        for n in range(1, 5 if schedule in DOUBLE else 9):
            for devices, _ in product(placements(n), range(each)):
                components, checkpoint = draw.choice(switches(schedule)), draw.choice(CHECKPOINT_MODES)
                skips, transfer, workers = (draw.choice(one) for one in ((*SKIPS,), TRANSFERS, ("always", "never")))
                m = draw.randint(1, 8)
                yield Case(devices, m, components, checkpoint, skips, transfer, schedule, through, workers)


def score(output: Tensor) -> Tensor:
    """A loss that adds up over the batch."""
    return (output.sin() * torch.linspace(0.5, 1.5, WIDTH, dtype=output.dtype, device="cpu").to(output.device)).sum()


def mean_score(output: Tensor, target: Tensor) -> Tensor:
    """For ``pipe.step``: its mean over the batch is the score of the batch, if targets are the batch size."""
    return score(output) * target.mean() / len(output)


def targets(pipe: GPipe, rows: int) -> Tensor:
    """Targets for :func:`mean_score`."""
    return torch.full((rows, 1), float(rows), dtype=torch.float64).to(pipe.devices[-1])


@dataclass(frozen=True)
class Step:
    """What a training step gave, on the CPU, and its trace."""

    loss: Tensor
    output: Tensor
    gradients: dict[str, Tensor]
    trace: Trace

    @property
    def races(self) -> list[Race]:
        return find_races(self.trace.records)


def step(network: nn.Module, x: Tensor, through: str = "backward") -> Step:
    """One step from fresh gradients. All results are read on the caller's streams, with no synchronisation before."""
    network.zero_grad()
    leaf = x.detach().requires_grad_()
    with recording() as trace:
        if through == "step":
            loss, output = network.step(leaf, targets(network, len(x)), mean_score, return_output=True)
        else:
            output = network(leaf)
            loss = score(output)
            loss.backward()
        found = {name: parameter.grad * 1 for name, parameter in network.named_parameters()} | {"input": leaf.grad * 1}
        loss, output = loss.detach() * 1, output.detach() * 1
    return Step(loss.cpu(), output.cpu(), {name: gradient.cpu() for name, gradient in found.items()}, trace)


def batch(rows: int, device: torch.device | str = "cpu") -> Tensor:
    """Equal numbers in every call."""
    return torch.rand(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)).to(device)


@cache
def plain_step(skips: str, rows: int) -> Step:
    """What the plain module gives."""
    return step(model(skips), batch(rows))


def problems(case: Case, pipe: GPipe | None = None) -> list[str]:
    """What is wrong with a step of a new pipeline, or of ``pipe``: values other than the plain module's, or races."""
    plain = plain_step(case.skips, case.rows)
    pipe = pipe or case.pipe()
    found = step(pipe, batch(case.rows, pipe.devices[0]), case.through)
    wrong = [f"{case}: {race}" for race in found.races]
    pairs = {"loss": (found.loss, plain.loss), "output": (found.output, plain.output)}
    pairs |= {name: (found.gradients[name], expected) for name, expected in plain.gradients.items()}
    return wrong + [f"{case}: {name} differs" for name, (one, other) in pairs.items() if not torch.allclose(one, other)]


def problems_after_an_exception(case: Case, where: str, block: int, nth: int) -> list[str]:
    """What is wrong when a block raises in the middle of a step: races, a step that goes on, or a bad next step."""
    module, fuse = model(case.skips), Fuse(where, nth)
    module[block].append(fuse)
    pipe = case.pipe(module)
    x = batch(case.rows, pipe.devices[0]).requires_grad_()
    with recording() as trace:
        try:
            if case.through == "step":
                pipe.step(x, targets(pipe, case.rows), mean_score)
            else:
                score(pipe(x)).backward()
        except BoomError:
            fuse.armed = False
    what = f"{case} with an exception in {where} of block {block}"
    recomputed = case.checkpoint == "always" or (case.checkpoint == "except_last" and nth < case.m - 1)
    wrong = [f"{what}: {race}" for race in find_races(trace.records)]
    if fuse.armed and (where != "recompute" or recomputed):
        wrong.append(f"{what}: nothing was raised")
    fuse.armed = False
    return wrong + problems(case, pipe)


class Watch:
    """An observer that keeps each task with the thread that issued it."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, int]] = []
        self._lock = threading.Lock()

    def start(self, task: Any) -> None:
        with self._lock:
            self.seen.append((task, thread_index()))

    def finish(self, token: Any, nbytes: int) -> None:
        pass


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        with duration(FORWARD_MS):
            return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        with duration(BACKWARD_MS):
            grad_input = grad * weight
        return grad_input, grad.sum().reshape(1)


class Work(nn.Module):
    """One kernel of 10 ms forward, one of 20 ms backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, self.weight)


def working_pipe(n: int, m: int, **options: Any) -> GPipe:
    """A chain of n partitions that each do one :class:`Work`, on n devices."""
    devices = [f"virtual:{j}" for j in range(n)]
    return GPipe(nn.Sequential(*(Work() for _ in range(n))), [1] * n, devices=devices, chunks=m, **options)


def run_ends(trace: Trace, machine: Machine) -> list[float]:
    """When each kernel and each copy ends, in milliseconds."""
    ends = replay(trace, machine).end_ns
    return [ends[i] / NS_PER_MS for i, record in enumerate(trace.records) if record.kind in ("kernel", "copy")]


def working_step(pipe: GPipe, through: str = "backward") -> Trace:
    """The trace of one step with one row per micro-batch."""
    x = torch.ones(pipe.chunks, WIDTH, device=pipe.devices[0])
    target = torch.ones(pipe.chunks, WIDTH, device=pipe.devices[-1])
    with recording() as trace:
        if through == "step":
            pipe.step(x, target, lambda output, expected: (output * expected).mean())
        else:
            pipe(x).sum().backward()
    return trace
