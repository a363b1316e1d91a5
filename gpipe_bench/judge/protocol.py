"""What an adapter gives, and what a behaviour is: a few cases, each a model, a setup and a script.

An adapter builds a pipe of a model. The script of a case drives the pipe through a :class:`Session`, which notes what
happens under names: losses, gradients, outputs, numbers. The plain module runs the same script. A script runs unchanged
in one process or in one process per device: each process notes what it has, and notes are merged by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

Notes = dict[str, Any]
"""What happened, by name."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a pipeline is set up.

    Attributes:
        n: devices.
        chunks: m, micro-batches of a batch.
        checkpoint: ``always``, ``except_last`` or ``never``.
        per_device: partitions on each device.
        defaults: whether the adapter leaves every option that the engine has a default for.
        replicas: pipelines that share a batch; each has n processes.
        shards: processes that share each partition, by tensor parallelism.
        cut: layers per partition; empty: see :meth:`balance`.
        devices: a name for each device; empty: all are the CPU.
    """

    n: int
    chunks: int
    checkpoint: str = "never"
    per_device: int = 1
    defaults: bool = False
    replicas: int = 1
    shards: int = 1
    cut: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def copies(self) -> int:
        """How many pipelines of n processes there are: replicas, or shards."""
        return self.replicas * self.shards

    @property
    def places(self) -> list[str]:
        """The name of each device."""
        return [*self.devices] or ["cpu"] * self.n

    @property
    def partitions(self) -> int:
        """How many partitions the model is cut into."""
        return self.n * self.per_device

    def balance(self, layers: int) -> list[int]:
        """Layers per partition: the cut, or one each, and those that are left over in the middle."""
        n = self.partitions
        return [*self.cut] or [1 + (layers - n if j == n // 2 else 0) for j in range(n)]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, and how the losses of micro-batches add up.

    Attributes:
        call: from output and target of some rows to their loss, a scalar.
        reduction: ``mean`` over rows, ``sum``, or a function of a target: the count of which the loss is a mean.
    """

    call: Callable[[Any, Any], Tensor]
    reduction: Any = "mean"

    def shares(self, target: Any) -> Callable[[Any], float]:
        """By what the loss of a micro-batch is multiplied, so that the products add up; for engines without a word."""
        if self.reduction == "sum":
            return lambda _: 1.0
        if self.reduction == "mean":
            return lambda part: len(part) / len(target)
        total = self.reduction(target)
        return lambda part: self.reduction(part) / total


MSE = Loss(functional.mse_loss)


class Pipe(Protocol):
    """A model in an engine, as one process sees it."""

    def own(self) -> Sequence[nn.Module]:
        """The modules whose parameters this process trains."""

    def step(self, x: Any, target: Any, loss: Loss) -> Tensor | None:
        """Train on a batch; the loss where it is known. Gradients are added to ``.grad``."""

    def evaluate(self, x: Any) -> Any:
        """The output for a batch, without gradients, where it is known."""

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients by the norm of all of them, which is returned."""


class Adapter(Protocol):
    """An engine.

    Attributes:
        version: of its package.
        processes: whether it has a process per device; ``torch.distributed`` with gloo is set up before ``build``.
        per_device: partitions on each device.
        limits: what the engine says that it does not do, with the place where it says so; by a need of cases, by a
            behaviour, or by a behaviour and a checkpoint mode, ``spectral norm/always``.

    An adapter may have a function ``fitted``, from the setup of a case to one that its schedule can run.
    """

    version: str
    processes: bool
    per_device: int
    limits: Mapping[str, str]

    def build(self, model: nn.Sequential, setup: Setup) -> Pipe:
        """The pipe of a model, whose layers may be skippable (:mod:`gpipe_bench.skip`)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One setting of a behaviour.

    Attributes:
        setup: of the pipeline.
        make: the model.
        script: what is done with the pipeline.
        needs: what an engine must have for it; see :attr:`Adapter.limits`.
        dtype: of the model.
    """

    setup: Setup
    make: Callable[[], nn.Sequential]
    script: Callable[[Session], None]
    needs: frozenset[str] = frozenset()
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What an engine must do.

    Attributes:
        name: stable; adapters, tables and planted faults use it.
        says: the behaviour as a phrase.
        cases: from a seed and the partitions per device to the cases, smallest first.
        check: from a case, the notes of the plain module and those of the engine to what is wrong, or None.
        raises: whether the script ends in an error of a layer.
    """

    name: str
    says: str
    cases: Callable[[int, int], list[Case]]
    check: Callable[[Case, Notes, Notes], str | None]
    raises: bool = False


class Session:
    """An engine in one case, seen from one process.

    Args:
        adapter: of the engine.
        case: to run.
        rank: of this process among those of all pipelines.

    Attributes:
        copies: pipelines: replicas, or shards of one.
        copy: which one of them this process belongs to.
    """

    def __init__(self, adapter: Adapter, case: Case, rank: int = 0) -> None:
        torch.manual_seed(7)
        self.model = case.make().to(case.dtype)
        self.dtype = case.dtype
        names = {id(p): name for name, p in self.model.named_parameters()}
        self.notes: Notes = {}
        self.case, self.steps = case, 0
        self.copies, self.copy = (case.setup.copies, rank // case.setup.n) if adapter.processes else (1, 0)
        if adapter.processes and case.setup.shards > 1:
            for module in self.model:
                layer: Any = module
                layer.shard(case.setup)
        self.pipe = adapter.build(self.model, case.setup)
        own = [module for each in self.pipe.own() for module in each.modules()]
        ids = {id(p) for module in own for p in module.parameters()}
        # An engine may replace layers, such as those of batch norm; their parameters stay.
        self.parameters = [(name, p) for name, p in self.model.named_parameters() if id(p) in ids]
        self.norms = [(names[id(m.weight)], m) for m in own if isinstance(m, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001
        self.modules = {name: m for name, m in self.model.named_modules() if any(m is each for each in own)}

    def step(self, x: Any, target: Any, loss: Loss = MSE) -> None:
        """Train on a batch, and note its loss."""
        self.note(f"loss {self.steps}", self.pipe.step(x, target, loss))
        self.steps += 1

    def evaluate(self, x: Any) -> None:
        """Note the output for a batch in evaluation."""
        self.train(False)
        self.note(f"out {self.steps}", self.pipe.evaluate(x))
        self.train(True)

    def train(self, mode: bool) -> None:
        """Change between training and evaluation."""
        self.model.train(mode)
        for module in self.pipe.own():
            module.train(mode)

    def zero(self) -> None:
        """Forget gradients."""
        for _, p in self.parameters:
            p.grad = None

    def grads(self) -> None:
        """Note the gradient of each parameter."""
        for name, p in self.parameters:
            self.note(f"grad {name}", "none" if p.grad is None else p.grad)

    def note(self, name: str, value: Any) -> None:
        """Note a value as it is now; None is not noted."""
        if value is not None:
            name = f"copy {self.copy} {name}" if self.copy else name
            self.notes[name] = value.detach().clone() if isinstance(value, Tensor) else value
