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

from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.table import LOOP, TWO_PER_DEVICE, placement
from gpipe_bench.skip import Namespace, peek, pop, skippable, stash

WIDTH = 4
PATIENCE_S = 5.0
Probe = Callable[[str], None]
"""Called by a layer in each pass, and by the loss."""

# --- models ----------------------------------------------------------------------------------------------------------


class Watched(Function):
    """The identity; calls the probe backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probe: Probe) -> Tensor:
        ctx.probe = probe
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.probe("backward")
        return grad, None


def small(x: Tensor) -> Tensor:
    """x - 16 k, between -8 and 8."""
    return x - (x.detach() / 16).round() * 16


class Layer(nn.Module):
    """(rows, 4), or a tuple or dict that holds it -> the same in a form of its own."""

    def __init__(self, weight: nn.Parameter, form: str, probe: Probe) -> None:
        super().__init__()
        self.weight, self.form, self.probe = weight, form, probe
        self.made: list[Any] = []

    def forward(self, values: Any) -> Any:
        self.probe("forward")
        x = values["x"] if isinstance(values, dict) else values[0] if isinstance(values, tuple) else values
        y = nn.functional.linear(small(x), self.weight)
        if isinstance(values, tuple) and values[1] is not None:
            y = y + values[1][:, None]
        y = Watched.apply(torch.where(y > 0, y, 2 * y), self.probe)
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

DIFFERENCES = ("balance", "schedule", "frozen", "chunks", "checkpoint", "mode", "call")
"""What a rank can have otherwise than the others."""
KINDS = ("kill", "interrupt", "exception", "stall", "pause", "cut", "hitch", "difference", "idle")


@dataclass(frozen=True)
class Failure:
    """Something that goes wrong on a rank.

    Attributes:
        kind: ``kill``; ``interrupt``, a KeyboardInterrupt in whatever it does; ``exception``, in a layer or loss;
            ``stall``, it stands still for longer than the others wait, and ``pause``, for less; ``cut``, it loses the
            link to half of the others, and ``hitch``, for a short time; ``difference``, it does something else; or
            ``idle``, it makes no more calls, and stays.
        rank: in the whole job.
        number: of its use of the network, of its layers' passes, or of its call.
        name: of a difference.
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
        return self.kind in ("stall", "cut", "idle")


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
        self.calls = [
            draw.choice(["step", "step", "step", "add", "evaluate", "clip"]) for _ in range(draw.randint(1, 4))
        ]
        usual = draw.randint(1, 8)
        self.rows = [usual if draw.random() < 0.7 else draw.randint(1, 9) for _ in self.calls]
        self.of_batch = draw.random() < 0.2
        self.timeout_s = draw.choice([2.0, 8.0, 60.0])
        self.unit_s = min(self.timeout_s, PATIENCE_S) / draw.choice([20_000, 200_000])
        self.keeper = draw.choice([None, 0])
        self.late_s = draw.choice([0.0, self.timeout_s / 3])
        self.lingers = [draw.random() < 0.3 for _ in range(self.size)]
        self.failures = [self._failure(draw) for _ in range(draw.choice([0, 1, 1, 1, 1, 2]))] if self.size > 1 else []

    def _layers(self, draw: random.Random, count: int) -> list[tuple[str, bool]]:
        """The form and the frozenness of each layer."""
        forms = ["plain", "plain", "tuple", "none", "dict"]
        return [(draw.choice(forms) if i < count - 1 else "plain", draw.random() < 0.1) for i in range(count)]

    def _ties(self, draw: random.Random, count: int) -> list[list[int]]:
        """Layers that have one weight."""
        places = draw.sample(range(count), min(count, draw.choice([2, 2, 3, 4])))
        return [sorted(part) for part in (places[:2], places[2:]) if len(part) > 1]

    def _skips(self, draw: random.Random, count: int) -> list[list[int]]:
        """For each skip the layers after which it is kept, and before which it is looked at, or taken at last."""
        found = [
            sorted(draw.sample(range(count), min(count, draw.choice([2, 2, 3, 4]))))
            for _ in range(draw.choice([1, 1, 2]))
        ]
        return [skip for skip in found if len(skip) > 1]

    def _failure(self, draw: random.Random) -> Failure:
        kind, rank = draw.choice((*KINDS, "kill", "exception")), draw.randrange(self.size)
        number = draw.randint(1, draw.choice([12, 40, 150, 400]))
        if kind == "exception":
            number = draw.randint(1, draw.choice([4, 20]))
        elif kind in ("difference", "idle"):
            number = draw.randrange(len(self.calls))
        name = draw.choice(DIFFERENCES) if kind == "difference" else ""
        apart = tuple(draw.sample(range(self.size), draw.randint(1, self.size - 1)))
        return Failure(kind, rank, number, name, apart if kind in ("cut", "hitch") else ())

    def place(self, rank: int) -> tuple[int, int]:
        """Its replica, and its rank in the pipeline."""
        return next((number, row.index(rank)) for number, row in enumerate(self.grid) if rank in row)

    def model(self, probe: Probe) -> nn.Sequential:
        """Made anew, always alike."""
        generator = torch.Generator().manual_seed(self.seed)

        def weight(trained: bool) -> nn.Parameter:
            matrix = torch.randint(-1, 2, (WIDTH, WIDTH), generator=generator).triu(1) + torch.eye(WIDTH)
            return nn.Parameter(matrix[torch.randperm(WIDTH, generator=generator)].double(), trained)

        weights = [weight(not frozen) for _, frozen in self.layers]
        for first, *others in self.ties:
            for other in others:
                weights[other] = weights[first]
        layers: list[nn.Module] = [Layer(w, form, probe) for w, (form, _) in zip(weights, self.layers, strict=True)]
        for first, *readers in self.skips:
            space = Namespace()
            layers[first] = nn.Sequential(layers[first], Keeps().isolate(space))
            for reader in readers:
                reads = Adds() if reader == readers[-1] else Looks()
                layers[reader] = nn.Sequential(reads.isolate(space), layers[reader])
        return nn.Sequential(*layers)

    def batch(self, number: int, replica: int) -> tuple[Tensor, Tensor]:
        """Input and target of a call."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + number * 10 + replica)
        x, target = torch.randint(-8, 9, (2, self.rows[number], WIDTH), generator=generator).double()
        return x.requires_grad_(self.of_batch), target

    def __str__(self) -> str:
        shape = f"{len(self.grid)} x {len(self.grid[0])} ranks {self.grid}, {self.partitions} partitions {self.balance}"
        calls = [*zip(self.calls, self.rows, strict=True)]
        how = f"{self.schedule}, chunks {self.chunks}, {self.checkpoint}, calls {calls}"
        what = f"ties {self.ties}, skips {self.skips}, time-out {self.timeout_s:g} s"
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


def expected(case: Case) -> list[list[dict[str, Any]]]:
    """For each replica what each call should give: a loss, an output or a norm, and gradients and weights after it."""
    models = [case.model(lambda what: None) for _ in case.grid]
    found: list[list[dict[str, Any]]] = [[] for _ in models]
    for number, call in enumerate(case.calls):
        for replica, model in enumerate(models):
            result: dict[str, Any] = {}
            x, target = case.batch(number, replica)
            if call == "evaluate":
                with torch.no_grad():
                    result["output"] = model(x)
            elif call == "clip":
                result["norm"] = nn.utils.clip_grad_norm_(model.parameters(), 1e30)
            else:
                if call == "step":
                    model.zero_grad()
                loss = squares(model(x), target)
                if loss.requires_grad:
                    loss.backward()
                result["loss"], result["x"] = loss.detach(), x.grad
            found[replica].append(result)
        if call in ("step", "add"):
            _average(models)
        for model, results in zip(models, found, strict=True):
            if call in ("step", "add"):
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
