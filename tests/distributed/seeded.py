"""What one seed draws: ranks and where they are, a model, a schedule, some calls, and what goes wrong.

All numbers of the model are whole: so float64 holds every sum exactly, and a pipeline equals the plain module bit for
bit in whatever order it adds up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from gpipe_bench import MicroBatches
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.table import LOOP, TWO_PER_DEVICE, placement
from gpipe_bench.skip import Namespace, peek, pop, skippable, stash

WIDTH = 4
PATIENCE_S = 5.0
TRAINING = ("step", "add", "load")
"""Calls that train: after the gradients are cleared, or not, or after other weights are loaded."""
Probe = Callable[[str], None]
"""Called by a layer in each pass, and by the loss."""

# --- models ----------------------------------------------------------------------------------------------------------


class Watched(Function):
    """The identity; calls the probe backward, and may draw a random number there, which it does not use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probe: Probe, draws: bool) -> Tensor:
        ctx.probe, ctx.draws = probe, draws
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.probe("backward")
        if ctx.draws:
            torch.rand(3)
        return grad, None, None


def small(x: Tensor) -> Tensor:
    """x - 16 k, between -8 and 8."""
    return x - (x.detach() / 16).round() * 16


class Layer(nn.Module):
    """(rows, 4), or a tuple or dict that holds it -> the same in a form of its own."""

    def __init__(self, weight: nn.Parameter, form: str, draws: str, probe: Probe) -> None:
        super().__init__()
        self.weight, self.form, self.draws, self.probe = weight, form, draws, probe
        self.made: list[Any] = []

    def forward(self, values: Any) -> Any:
        self.probe("forward")
        if self.draws == "forward":
            torch.rand(2)
        x = values["x"] if isinstance(values, dict) else values[0] if isinstance(values, tuple) else values
        y = nn.functional.linear(small(x), self.weight)
        if isinstance(values, tuple) and values[1] is not None:
            y = y + values[1][:, None]
        y = Watched.apply(torch.where(y > 0, y, 2 * y), self.probe, self.draws == "backward")
        if self.form == "tuple":
            return y, (y.detach()[:, 0] > 0).long(), "text"
        if self.form == "none":
            return y, None, 1
        return {"x": y, "mask": y.detach() > 0} if self.form == "dict" else y


def tensor_of(values: Any) -> Tensor:
    found: Tensor = values["x"] if isinstance(values, dict) else values[0] if isinstance(values, tuple) else values
    return found


@skippable(stash=["skip"])
class Keeps(nn.Module):
    def forward(self, values: Any) -> Any:
        yield stash("skip", tensor_of(values) * 1)
        return values


@skippable(pop=["skip"])
class Adds(nn.Module):
    def forward(self, values: Any) -> Any:
        skip = yield pop("skip")
        return small(tensor_of(values)) + small(skip)


@skippable(peek=["skip"])
class Looks(nn.Module):
    def forward(self, values: Any) -> Any:
        skip = yield peek("skip")
        return small(tensor_of(values)) - small(skip)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


# --- what is drawn ---------------------------------------------------------------------------------------------------

DIFFERENCES = {
    "balance": ("balance", "processes"),
    "schedule": ("schedule", "processes"),
    "frozen": ("parameters",),
    "chunks": ("chunks",),
    "checkpoint": ("checkpoint",),
    "mode": ("training mode",),
    "call": ("the call", "the schedule"),
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
"""What replicas must have alike, too: all ranks of one have other rows or evaluate once more, or one rank differs."""
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


class Case:
    """All that a seed draws."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(f"case {seed}")
        self.seed = seed
        self.schedule = draw.choice(SCHEDULES)
        per_device = (
            1 if self.schedule not in TWO_PER_DEVICE else draw.choice([2, 2, 3]) if self.schedule in LOOP else 2
        )
        replicas = draw.choice([1, 1, 1, 2, 2, 4])
        ranks = draw.choice([1, 2, 2, 3, 4] if replicas == 1 else [1, 2, 2, 3] if replicas == 2 else [1, 2])
        self.size = replicas * ranks
        order = draw.sample(range(self.size), self.size) if draw.random() < 0.5 else [*range(self.size)]
        self.grid = [order[start : start + ranks] for start in range(0, self.size, ranks)]
        self.partitions = ranks * per_device
        # For each partition its rank in the pipeline.
        self.places = placement(self.schedule, self.partitions, ranks)
        self.balance = [draw.choice([1, 1, 1, 2]) for _ in range(self.partitions)]
        self.chunks, self.checkpoint = draw.randint(1, 5), draw.choice(["always", "except_last", "never"])
        self.layers = self._layers(draw, sum(self.balance))
        self.ties = self._ties(draw, sum(self.balance)) if draw.random() < 0.4 else []
        self.skips = self._skips(draw, sum(self.balance)) if draw.random() < 0.5 else []
        kinds = ["step", "step", "step", "add", "load", "evaluate", "clip"]
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
        self.of_batch = draw.random() < 0.2 and not self.ready
        self.timeout_s = draw.choice([2.0, 8.0, 60.0])
        self.unit_s = min(self.timeout_s, PATIENCE_S) / draw.choice([20_000, 200_000])
        self.keeper = draw.choice([None, 0])
        self.late_s = draw.choice([0.0, self.timeout_s / 3])
        self.lingers = [draw.random() < 0.3 for _ in range(self.size)]
        self.failures = [self._failure(draw) for _ in range(draw.choice([0, 1, 1, 1, 1, 2]))] if self.size > 1 else []
        # Whether all ranks make another pipeline after this one, whatever became of it.
        alone = all(each.harmless or each.kind in ("exception", "interrupt", "difference") for each in self.failures)
        self.again = alone and len(self.failures) < 2 and draw.random() < 0.5

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
        apart = tuple(draw.sample(range(self.size), draw.randint(1, self.size - 1)))
        return Failure(kind, rank, number, name, apart if kind in ("cut", "hitch") else ())

    def by(self, failure: Failure) -> set[int]:
        """The ranks that do it."""
        whole = failure.name in ("rows", "evaluation")
        return {*self.grid[self.place(failure.rank)[0]]} if whole else {failure.rank}

    def place(self, rank: int) -> tuple[int, int]:
        """Its replica, and its rank in the pipeline."""
        return next((number, row.index(rank)) for number, row in enumerate(self.grid) if rank in row)

    def model(self, probe: Probe = lambda what: None, version: int = 0) -> nn.Sequential:
        """Made anew, always alike; other versions have other weights."""
        generator = torch.Generator().manual_seed(self.seed + 100_000 * version)

        def weight(trained: bool) -> nn.Parameter:
            matrix = torch.randint(-1, 2, (WIDTH, WIDTH), generator=generator).triu(1) + torch.eye(WIDTH)
            return nn.Parameter(matrix[torch.randperm(WIDTH, generator=generator)].double(), trained)

        weights = [weight(not frozen) for _, frozen, _ in self.layers]
        for first, *others in self.ties:
            for other in others:
                weights[other] = weights[first]
        layers: list[nn.Module] = [
            Layer(w, form, draws, probe) for w, (form, _, draws) in zip(weights, self.layers, strict=True)
        ]
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

    def __str__(self) -> str:
        shape = f"{len(self.grid)} x {len(self.grid[0])} ranks {self.grid}, {self.partitions} partitions {self.balance}"
        calls = [*zip(self.calls, self.rows, strict=True)]
        how = f"{self.schedule}, chunks {self.chunks}, {self.checkpoint}, calls {calls}"
        what = f"ready-made {self.ready}, ties {self.ties}, skips {self.skips}, time-out {self.timeout_s:g} s"
        return f"{shape}; {how}; {what}; {', '.join(map(str, self.failures)) or 'no failure'}"


# --- what a call gives -----------------------------------------------------------------------------------------------


def update(parameters: Sequence[nn.Parameter]) -> None:
    """Whole weights stay whole and small."""
    with torch.no_grad():
        for weight in parameters:
            if weight.grad is not None:
                weight.sub_(weight.grad.sign()).clamp_(-2, 2)


def state_of(module: nn.Module) -> dict[str, Any]:
    """Copies of all gradients and weights."""
    return {
        name: (None if each.grad is None else each.grad.clone(), each.detach().clone())
        for name, each in module.named_parameters(remove_duplicate=False)
    }


def expected(case: Case, calls: Sequence[str] = ()) -> list[list[dict[str, Any]]]:
    """For each replica what each call should give: a loss, an output or a norm, and gradients and weights after it."""
    models = [case.model() for _ in case.grid]
    found: list[list[dict[str, Any]]] = [[] for _ in models]
    for number, call in enumerate(calls or case.calls):
        for replica, model in enumerate(models):
            result: dict[str, Any] = {}
            x, target = case.batch(number, replica)
            if call == "evaluate":
                with torch.no_grad():
                    result["output"] = model(x)
            elif call == "clip":
                result["norm"] = nn.utils.clip_grad_norm_(model.parameters(), 1e30)
            else:
                if call == "load":
                    model.load_state_dict(case.model(version=number + 1).state_dict())
                if call != "add":
                    model.zero_grad()
                loss = squares(model(x), target)
                if loss.requires_grad:
                    loss.backward()
                result["loss"], result["x"] = loss.detach(), x.grad
            found[replica].append(result)
        if call in TRAINING:
            _average(models)
        for model, results in zip(models, found, strict=True):
            if call in TRAINING:
                update([*model.parameters()])
            results[-1]["state"] = state_of(model)
    return found


def _average(models: Sequence[nn.Module]) -> None:
    """Give the gradients of all models their mean; halves and quarters of whole numbers are exact."""
    for weights in zip(*(model.parameters() for model in models), strict=True):
        if weights[0].grad is not None:
            mean = torch.stack([weight.grad for weight in weights]).sum(0) / len(models)
            for weight in weights:
                weight.grad = mean.clone()
