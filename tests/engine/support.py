"""Layers, steps and recorders that the tests of the engine share. Nothing beyond torch: GPU machines use them too."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench import Components, GPipe, is_checkpointing, is_recomputing
from gpipe_bench.engine.observer import Task
from gpipe_bench.skip import Namespace, peek, pop, skippable, stash

WIDTH = 3
MODES = ("always", "except_last", "never")
FACTORIAL = list(Components.factorial())
# Eight in which every two components are on and off in all four ways.
SOME = [
    Components(*(letter in on for letter in "cfspe")) for on in ("cfspe", "cfs", "cpe", "c", "fp", "fe", "sp", "se")
]
LETTERS = {
    "forward": "F",
    "recompute": "R",
    "backward": "B",
    "backward_inputs": "I",
    "backward_weights": "W",
    "copy": "C",
    "copy_grad": "c",
    "portal": "P",
    "portal_grad": "p",
}


def label(value: Any) -> str | None:
    """How pytest names a parameter."""
    return value.label if isinstance(value, Components) else None


# --- layers that take whatever comes -----------------------------------------------------------------------------


def on_floats(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply to the floating-point tensors among a tensor, or a tuple of whatever."""
    if isinstance(value, tuple):
        return tuple(on_floats(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def first_float(value: Any) -> Tensor:
    values = value if isinstance(value, tuple) else (value,)
    return next(item for item in values if isinstance(item, Tensor) and item.is_floating_point())


class Do(nn.Module):
    """A function of what comes, and of layers and weights."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function, self.names = function, [f"part{index}" for index in range(len(parts))]
        for name, part in zip(self.names, parts, strict=True):
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, value: Any) -> Any:
        return self.function(value, *(getattr(self, name) for name in self.names))


class Mix(nn.Module):
    """(B, 3) -> (B, 3) with parameters, on every floating-point tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        return on_floats(lambda tensor: torch.tanh(self.linear(tensor)), value)


class Affine(nn.Module):
    """(B, 3) -> (B, 3); autograd keeps nothing of the result, so the next layer may write to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        return on_floats(self.linear, value)


class InPlace(nn.Module):
    """Writes to its input."""

    def forward(self, value: Any) -> Any:
        return on_floats(lambda tensor: tensor.mul_(0.5).clamp_(-0.2, 0.8), value)


class Widen(nn.Module):
    """x -> (x, sin x)."""

    def forward(self, value: Any) -> tuple[Any, ...]:
        values = value if isinstance(value, tuple) else (value,)
        return (*values, first_float(value).sin())


class Tag(nn.Module):
    """x -> (integers made of x, x)."""

    def forward(self, value: Any) -> tuple[Any, ...]:
        values = value if isinstance(value, tuple) else (value,)
        return ((first_float(value)[:, 0] > 0).long(), *values)


class Narrow(nn.Module):
    """(x, y, ...) -> the sum of the floating-point tensors."""

    def forward(self, value: Any) -> Tensor:
        values = value if isinstance(value, tuple) else (value,)
        return sum(item for item in values if item.is_floating_point())


class Embed(nn.Module):
    """Integers (B,), first in a tuple or alone -> the same tuple with an embedding (B, 3) at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)

    def forward(self, value: Any) -> tuple[Any, ...]:
        values = value if isinstance(value, tuple) else (value,)
        return (*values, self.embedding(values[0]))


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes cos x, or None."""

    def __init__(self, namespace: Namespace | None = None, *, nothing: bool = False) -> None:
        super().__init__()
        self.nothing = nothing
        if namespace is not None:
            self.isolate(namespace)

    def forward(self, value: Any) -> Any:
        yield stash("skip", None if self.nothing else first_float(value).cos())
        return value


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Adds what was stashed, unless that is None or it is told to leave it."""

    def __init__(self, namespace: Namespace | None = None, *, ignore: bool = False) -> None:
        super().__init__()
        self.ignore = ignore
        if namespace is not None:
            self.isolate(namespace)

    def forward(self, value: Any) -> Any:
        skip = yield pop("skip")
        return value if skip is None or self.ignore else on_floats(lambda tensor: tensor + skip, value)


@skippable(peek=["skip"])
class Peek(Pop):
    """Adds what was stashed, and leaves it for others."""

    def forward(self, value: Any) -> Any:
        skip = yield peek("skip")
        return value if skip is None or self.ignore else on_floats(lambda tensor: tensor + skip, value)


def skip_pair(**options: bool) -> tuple[Stash, Pop]:
    """A stash and its pop, in a namespace of their own."""
    namespace = Namespace()
    return (
        Stash(namespace, nothing=options.get("nothing", False)),
        Pop(namespace, ignore=options.get("ignore", False)),
    )


def crossing_model() -> nn.Sequential:
    """Seven layers; one skip crosses two boundaries of [2, 2, 3], one crosses one, one stays inside."""
    torch.manual_seed(7)
    (outer, outer_end), (inner, inner_end), (near, near_end) = (skip_pair() for _ in range(3))
    layers = (Mix(), outer, nn.Sequential(inner, near, Mix(), near_end), Mix(), outer_end, inner_end, Mix())
    return nn.Sequential(*layers).double()


# --- steps ---------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a training step gives, and the batch as it is then."""

    output: Any
    loss: Tensor
    gradients: dict[str, Tensor | None]
    input_gradients: list[Tensor | None]
    batch: Any


def score(output: Any) -> Tensor:
    """A loss that adds up over the batch and treats every element of the output differently."""
    values = output if isinstance(output, tuple) else (output,)
    floats = [value for value in values if value.is_floating_point()]
    return sum((value.sin() * torch.linspace(0.5, 1.5, value[0].numel()).view_as(value[0]).to(value)).sum()
               for value in floats)  # fmt: skip


def trained(
    model: nn.Module, x: Any, run: Callable[[nn.Module, Any], tuple[Tensor, Any]], *, zero: bool = True
) -> Outcome:
    """A step by ``run``, which gives loss and output, from fresh gradients and with a copy of the batch."""
    if zero:
        model.zero_grad()
    given = copy.deepcopy(x)
    total, output = run(model, given)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    leaves = given if isinstance(given, tuple) else (given,)
    # a layer may have written to the batch, which is no leaf then
    input_gradients = [leaf.grad if leaf.is_leaf else None for leaf in leaves]
    return Outcome(_detached(output), total.detach(), gradients, input_gradients, given)


def _detached(value: Any) -> Any:
    return tuple(map(_detached, value)) if isinstance(value, tuple) else value.detach()


def train_step(model: nn.Module, x: Any, loss: Callable[[Any], Tensor] = score) -> Outcome:
    """A step by a call and ``backward``."""

    def run(model: nn.Module, x: Any) -> tuple[Tensor, Any]:
        output = model(x)
        total = loss(output)
        total.backward()
        return total, output

    return trained(model, x, run)


def assert_same(found: Outcome, expected: Outcome) -> None:
    """The same output, loss and gradients; a gradient that does not exist is as good as zero."""
    torch.testing.assert_close(found.output, expected.output)
    torch.testing.assert_close(found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        _assert_same_gradient(found.gradients[name], gradient, name)
    for index, gradient in enumerate(expected.input_gradients):
        _assert_same_gradient(found.input_gradients[index], gradient, f"input {index}")


def _assert_same_gradient(found: Tensor | None, expected: Tensor | None, name: str) -> None:
    if found is None and expected is None:
        return
    some = expected if found is None else found
    zeros = torch.zeros_like(some)
    torch.testing.assert_close(
        zeros if found is None else found, zeros if expected is None else expected, msg=lambda text: f"{name}: {text}"
    )


def on_cpu(module: nn.Sequential, balance: Sequence[int], **options: Any) -> GPipe:
    """A pipeline with every partition on the CPU."""
    return GPipe(module, list(balance), devices=["cpu"] * len(balance), **options)


def ended() -> None:
    """Wait for the thread of a batch, which hands its result over right before it ends."""
    for thread in threading.enumerate():
        if thread.name == "gpipe-batch" and thread.is_alive():
            thread.join(timeout=30)


# --- recorders -----------------------------------------------------------------------------------------------------


class Identity(torch.autograd.Function):
    """Reports its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, report: Callable[[], None]) -> Tensor:
        ctx.report = report
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.report()
        return grad, None


class Probe(nn.Module):
    """Partition j of a chain whose micro-batch i holds the number i: notes F, R and B by itself, without the engine.

    Args:
        j: its partition.
        log: where it notes ``F0,1`` and the like.
        threads: where it notes in which thread.
        depth: autograd nodes to make besides; if there are any, the end of the backward pass is noted as ``b``.
    """

    def __init__(self, j: int, log: list[str], threads: dict[str, str] | None = None, depth: int = 0) -> None:
        super().__init__()
        self.j = j
        self.depth = depth
        self.log = log
        self.threads = {} if threads is None else threads
        self.weight = nn.Parameter(torch.ones(1))

    def note(self, letter: str, i: int) -> None:
        name = f"{letter}{i},{self.j}"
        self.log.append(name)
        self.threads[name] = threading.current_thread().name

    def forward(self, x: Tensor) -> Tensor:
        i = int(x.detach().flatten()[0])
        self.note("R" if is_recomputing() else "F", i)
        x = x * self.weight
        if self.depth:
            x = Identity.apply(x, lambda: self.note("b", i))
            for _ in range(self.depth):
                x = x + 0
        return Identity.apply(x, lambda: self.note("B", i))


class Flags(nn.Module):
    """Notes (is_checkpointing, is_recomputing) of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Any) -> Any:
        self.seen.append((is_checkpointing(), is_recomputing()))
        return on_floats(lambda tensor: tensor * self.weight, x)


def numbered(m: int, per: int = 1) -> Tensor:
    """A batch of m micro-batches of ``per`` rows: micro-batch i holds i."""
    return torch.arange(m, dtype=torch.get_default_dtype()).repeat_interleave(per).unsqueeze(1)


def probe_pipe(n: int, log: list[str], threads: dict[str, str] | None = None, depth: int = 0, **options: Any) -> GPipe:
    """A chain of n probes, one per partition."""
    return on_cpu(nn.Sequential(*(Probe(j, log, threads, depth) for j in range(n))), [1] * n, **options)


@dataclass
class Seen:
    """A task as an observer saw it."""

    task: Task
    thread: str
    finished: int = 0
    nbytes: int = -1

    @property
    def name(self) -> str:
        return f"{LETTERS[self.task.kind]}{self.task.microbatch},{self.task.partition}"


class Watch:
    """An observer that keeps what it sees, in the order in which tasks began."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._lock = threading.Lock()

    def start(self, task: Task) -> Seen:
        seen = Seen(task, threading.current_thread().name)
        with self._lock:
            self.seen.append(seen)
        return seen

    def finish(self, token: Seen, nbytes: int) -> None:
        token.finished += 1
        token.nbytes = nbytes

    def order(self, letters: str = "FRBCcPp") -> str:
        return " ".join(seen.name for seen in self.seen if seen.name[0] in letters)

    def names(self, letters: str = "FRBCcPp") -> list[str]:
        return sorted(self.order(letters).split())

    def nbytes(self, name: str) -> int:
        (seen,) = (seen for seen in self.seen if seen.name == name)
        return seen.nbytes


def grid(letter: str, microbatches: Iterable[int], partitions: Iterable[int]) -> list[str]:
    """All tasks of a kind: ``grid("F", range(2), range(2))`` is F0,0 F0,1 F1,0 F1,1."""
    partitions = list(partitions)
    return [f"{letter}{i},{j}" for i in microbatches for j in partitions]
