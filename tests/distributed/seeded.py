"""What one seed draws: ranks and where they are, a model, a schedule, some calls, and what goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn

from gpipe_bench import MicroBatches
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.table import LOOP, TWO_PER_DEVICE, placement
from gpipe_bench.skip import Namespace
from tests.distributed.seeded_layers import WIDTH, Adds, Keeps, Layer, Looks, Norm, Probe

PATIENCE_S = 5.0
TRAINING = ("step", "add", "hold", "load")
"""Calls that train: after the gradients are cleared; on top of those that are there; the same without a step of the
optimizer; or after other weights are loaded."""

DIFFERENCES = {
    "balance": ("balance", "processes"),
    "schedule": ("schedule", "processes"),
    "frozen": ("parameters",),
    "deferred": ("deferred_batch_norm",),
    "shared": ("the component shared",),
    "chunks": ("chunks",),
    "checkpoint": ("checkpoint",),
    "mode": ("training mode",),
    "call": ("the call", "training mode", "the schedule", "rows", "calls of pipe(x) before this step"),
    "max_norm": ("max_norm",),
    "grad mode": ("grad mode", "the schedule"),
}
"""What a rank can have otherwise than the others, and what an error may say of it."""
OF_REPLICAS = {
    "rows": ("rows", "the schedule"),
    "evaluation": ("calls of pipe(x) before this step",),
    "gradients": ("gradients before this step",),
    "reduction": ("reduction",),
    "freezes": ("parameters",),
    "part": ("modes of layers",),
}
"""What replicas must have alike, too. All ranks of one have other rows, evaluate once more or clip by another norm; or
one rank differs."""
KINDS = ("kill", "interrupt", "exception", "stall", "pause", "cut", "hitch", "difference", "idle")


@dataclass(frozen=True)
class Failure:
    """Something that goes wrong on a rank.

    Attributes:
        kind: ``kill``; ``interrupt``, a KeyboardInterrupt; ``exception``, in a layer or loss;
            ``stall``, it stands still for longer than the others wait, and ``pause``, for less; ``cut``, it loses the
            link to half of the others, and ``hitch``, for a short time; ``difference``, it does something else; or
            ``idle``, it makes no more calls, and stays, or goes.
        rank: in the whole job.
        number: of its use of the network, of its layers' passes, or of its call.
        name: of a difference; "layer" of a kill or an interrupt that comes in a layer, and not as it uses the network;
            "goes" of a rank that makes no more calls, and ends.
        apart: the ranks that have no link to the others.
    """

    kind: str
    rank: int
    number: int
    name: str = ""
    apart: tuple[int, ...] = ()

    @property
    def harmless(self) -> bool:
        """Whether nobody may notice it."""
        return self.kind in ("pause", "hitch")

    @property
    def silent(self) -> bool:
        """Whether nothing tells the others but time."""
        return self.kind in ("stall", "cut", "idle") and self.name != "goes"


@dataclass(frozen=True)
class Topology:
    """Where partitions are, and how they run.

    Attributes:
        grid: a row of ranks for each replica.
        schedule: see :class:`gpipe_bench.distributed.Pipe`, as for the others.
        balance: see there.
        places: for each partition its rank in the pipeline.
        chunks: see there.
        checkpoint: see there.
    """

    grid: list[list[int]]
    schedule: str
    balance: list[int]
    places: tuple[int, ...]
    chunks: int
    checkpoint: str

    def place(self, rank: int) -> tuple[int, int]:
        """Its replica, and its rank in the pipeline."""
        return next((number, row.index(rank)) for number, row in enumerate(self.grid) if rank in row)

    @classmethod
    def drawn(
        cls, draw: random.Random, schedule: str, per_device: int, grid: list[list[int]], balance: list[int]
    ) -> Self:
        partitions = len(grid[0]) * per_device
        chunks, checkpoint = draw.randint(1, 5), draw.choice(["always", "except_last", "never"])
        return cls(grid, schedule, balance, placement(schedule, partitions, len(grid[0])), chunks, checkpoint)


def per_device_of(draw: random.Random, schedule: str) -> int:
    """How many partitions a rank has."""
    return 1 if schedule not in TWO_PER_DEVICE else draw.choice([2, 2, 3]) if schedule in LOOP else 2


def grid_of(draw: random.Random, replicas: int, ranks: int) -> list[list[int]]:
    size = replicas * ranks
    order = draw.sample(range(size), size) if draw.random() < 0.5 else [*range(size)]
    return [order[start : start + ranks] for start in range(0, size, ranks)]


class Case:
    """All that a seed draws."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(f"case {seed}")
        self.seed = seed
        schedule = draw.choice(SCHEDULES)
        per_device = per_device_of(draw, schedule)
        replicas = draw.choice([1, 1, 1, 2, 2, 4])
        ranks = draw.choice([1, 2, 2, 3, 4] if replicas == 1 else [1, 2, 2, 3] if replicas == 2 else [1, 2])
        balance = [draw.choice([1, 1, 1, 2]) for _ in range(ranks * per_device)]
        self.first = Topology.drawn(draw, schedule, per_device, grid_of(draw, replicas, ranks), balance)
        self.grid, self.place, self.size = self.first.grid, self.first.place, replicas * ranks
        self.layers = self._layers(draw, sum(balance))
        self.ties = self._ties(draw, sum(balance)) if draw.random() < 0.4 else []
        self.skips = self._skips(draw, sum(balance)) if draw.random() < 0.5 else []
        self.shared = not self.skips or draw.random() < 0.7
        self.norms = (
            draw.sample(range(sum(balance)), min(sum(balance), draw.randint(1, 2))) if draw.random() < 0.3 else []
        )
        # Otherwise a pipeline updates the statistics again as it recomputes.
        self.deferred = self.first.checkpoint != "never" or draw.random() < 0.5
        kinds = ["step", "step", "step", "add", "hold", "load", "evaluate", "infer", "clip"]
        self.calls = [draw.choice(kinds) for _ in range(draw.randint(1, 3))]
        usual = draw.randint(1, 8)
        self.rows = [usual if draw.random() < 0.7 else draw.randint(1, 9) for _ in self.calls]
        # Batches of a kind that was there before, as in training.
        for _ in range(draw.choice([0, 0, 1, 2])):
            which = draw.randrange(len(self.calls))
            self.calls.append(self.calls[which])
            self.rows.append(self.rows[which])
        # The rows of ready-made micro-batches, of one call.
        self.ready = [draw.randint(1, 3) for _ in range(draw.randint(1, 5))] if draw.random() < 0.15 else []
        self.returns_output = draw.random() < 0.3
        # The ranks that make the model on "meta", and the replicas that begin with weights of their own.
        self.on_meta = draw.choice([[], [], [*range(self.size)], [rank for rank in range(self.size) if rank % 2]])
        self.strange = draw.random() < 0.3
        self.of_batch = draw.random() < 0.2 and not self.ready
        self.timeout_s = draw.choice([2.0, 8.0, 60.0])
        self.unit_s = min(self.timeout_s, PATIENCE_S) / draw.choice([20_000, 200_000])
        self.keeper = draw.choice([None, 0])
        self.late_s = draw.choice([0.0, self.timeout_s / 3])
        self.lingers = [draw.random() < 0.3 for _ in range(self.size)]
        self.failures = [self._failure(draw) for _ in range(draw.choice([0, 1, 1, 1, 1, 2]))] if self.size > 1 else []
        # Two ranks that differ alike may be all ranks.
        if len({each.name or each for each in self.failures}) < len(self.failures):
            self.failures = self.failures[:1]
        # Whether all ranks make another pipeline after this one, in another topology, whatever became of the first one.
        alone = all(each.harmless or each.kind in ("exception", "interrupt", "difference") for each in self.failures)
        self.again = alone and len(self.failures) < 2 and draw.random() < 0.5
        # The call after which they make a checkpoint, and whether this one loads it into memory without values.
        self.saved_after = draw.randrange(len(self.calls)) if self.again and draw.random() < 0.6 else None
        self.second, self.into_empty = self._second(draw, sum(balance)), draw.random() < 0.5

    def _second(self, draw: random.Random, layers: int) -> Topology:
        """Of as many ranks and layers, if there is one; else the first topology."""
        # The mean of three replicas would not be exact.
        ranks = draw.choice([self.size // replicas for replicas in (1, 2, 4, 8) if self.size % replicas == 0])
        schedule = draw.choice(SCHEDULES)
        per_device = per_device_of(draw, schedule)
        if ranks * per_device > layers:
            return self.first
        ends = [0, *sorted(draw.sample(range(1, layers), ranks * per_device - 1)), layers]
        balance = [end - start for start, end in pairwise(ends)]
        found = Topology.drawn(draw, schedule, per_device, grid_of(draw, self.size // ranks, ranks), balance)
        return found if self.deferred or not self.norms else replace(found, checkpoint="never")

    def _layers(self, draw: random.Random, count: int) -> list[tuple[str, bool, str]]:
        """The form and the frozenness of each layer, and in which pass it draws a random number."""
        forms, passes = ["plain", "plain", "tuple", "none", "dict"], ["", "", "", "", "forward", "backward"]
        quiet = draw.random() < 0.5
        return [
            (
                draw.choice(forms) if i < count - 1 else "plain",
                draw.random() < 0.1,
                "" if quiet else draw.choice(passes),
            )
            for i in range(count)
        ]

    def _ties(self, draw: random.Random, count: int) -> list[list[int]]:
        """Layers that have one weight."""
        places = draw.sample(range(count), min(count, draw.choice([2, 3, 4, 4])))
        return [sorted(part) for part in (places[:2], places[2:]) if len(part) > 1]

    def _skips(self, draw: random.Random, count: int) -> list[list[int]]:
        """For each skip the layers after which it is kept, and before which it is looked at, or taken at last."""
        found = [
            sorted(draw.sample(range(count), min(count, draw.choice([2, 2, 3, 4]))))
            for _ in range(draw.choice([1, 1, 2]))
        ]
        return [skip for skip in found if len(skip) > 1]

    def _failure(self, draw: random.Random) -> Failure:
        kind, rank, name = draw.choice((*KINDS, "kill", "exception", "difference")), draw.randrange(self.size), ""
        number = draw.randint(1, draw.choice([12, 40, 150, 400]))
        if kind == "difference":
            name = draw.choice([*DIFFERENCES, *(OF_REPLICAS if len(self.grid) > 1 else ())])
        elif kind in ("kill", "interrupt") and draw.random() < 0.3:
            name = "layer"
        elif kind == "idle" and draw.random() < 0.4:
            name = "goes"
        if kind == "exception" or name == "layer":
            number = draw.randint(1, draw.choice([4, 20]))
        elif kind in ("difference", "idle"):
            number = draw.randrange(len(self.calls))
        if name == "max_norm":
            self.calls[number] = "clip"
        elif name == "gradients" and len(self.calls) > 1:
            number = max(number, 1)
            self.calls[number - 1 : number + 1] = ["step", "step"]
        elif name in OF_REPLICAS and self.calls[number] not in TRAINING:
            self.calls[number] = "step"
        apart = tuple(draw.sample(range(self.size), draw.randint(1, self.size - 1)))
        return Failure(kind, rank, number, name, apart if kind in ("cut", "hitch") else ())

    def by(self, failure: Failure) -> set[int]:
        """The ranks that do it."""
        whole = len(self.grid) > 1 and failure.name in ("rows", "evaluation", "max_norm")
        return {*self.grid[self.place(failure.rank)[0]]} if whole else {failure.rank}

    def model(self, probe: Probe = lambda what: None, version: int = 0, device: str = "cpu") -> nn.Sequential:
        """Made anew, always alike; other versions have other weights, and those on "meta" have none yet."""
        generator = torch.Generator().manual_seed(self.seed + 100_000 * version)

        def drawn() -> Tensor:
            matrix = torch.randint(-1, 2, (WIDTH, WIDTH), generator=generator).triu(1) + torch.eye(WIDTH)
            return matrix[torch.randperm(WIDTH, generator=generator)].double()

        values = [drawn() for _ in self.layers]
        weights = [
            nn.Parameter(each.to(device, copy=True), not frozen)
            for each, (_, frozen, _) in zip(values, self.layers, strict=True)
        ]
        for first, *others in self.ties:
            for other in others:
                weights[other], values[other] = weights[first], values[first]
        layers: list[nn.Module] = [
            Layer(weight, value, form, draws, probe)
            for weight, value, (form, _, draws) in zip(weights, values, self.layers, strict=True)
        ]
        for index in self.norms:
            layers[index] = nn.Sequential(layers[index], Norm(device))
        for first, *readers in self.skips:
            space = Namespace()
            layers[first] = nn.Sequential(layers[first], Keeps().isolate(space))
            for reader in readers:
                reads = Adds() if reader == readers[-1] else Looks()
                layers[reader] = nn.Sequential(reads.isolate(space), layers[reader])
        return nn.Sequential(*layers)

    def batch(self, number: int, replica: int, more: int = 0) -> tuple[Tensor, Tensor]:
        """Input and target of a call, or some rows more of both."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + number * 10 + replica)
        rows = (sum(self.ready) or self.rows[number]) + more
        x, target = torch.randint(-8, 9, (2, rows, WIDTH), generator=generator).double()
        return x.requires_grad_(self.of_batch), target

    def given(self, batch: Tensor) -> Tensor | MicroBatches:
        """As the pipeline is given it."""
        if not self.ready:
            return batch
        others = self.ready[1:]
        return MicroBatches([*batch.split([len(batch) - sum(others), *others])])

    def cut(self, batch: Tensor, chunks: int) -> list[Tensor]:
        """The micro-batches of what the pipeline is given."""
        given = self.given(batch)
        return given.values if isinstance(given, MicroBatches) else [*batch.chunk(chunks)]

    def __str__(self) -> str:
        parts = {
            "": self.first,
            "calls": [*zip(self.calls, self.rows, strict=True)],
            "ready-made": self.ready,
            "ties": self.ties,
            "skips": f"{self.skips}{'' if self.shared else ', not shared'}" if self.skips else "",
            "norms": f"{self.norms}{', deferred' if self.deferred else ''}" if self.norms else "",
            "on meta": self.on_meta,
            "time-out": f"{self.timeout_s:g} s",
            "then": f"{self.second}, from after call {self.saved_after}" if self.again else "",
            "failures": ", ".join(map(str, self.failures)) or "none",
        }
        return "; ".join(f"{name} {value}".strip() for name, value in parts.items() if value)
