"""From a model, a balance and a batch to the workload that the event simulation runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_bench.collection import no_collection
from gpipe_bench.errors import BalanceError
from gpipe_bench.simulator.hardware.profile import Profile
from gpipe_bench.simulator.tracing.precision import HALVES
from gpipe_bench.simulator.tracing.steps import Kernel, LayerFacts, LayerTrace, Parameter
from gpipe_bench.simulator.workloads.compose import PartitionWork, compose
from gpipe_bench.simulator.workloads.cost import total
from gpipe_bench.simulator.workloads.optimizers import OptimizerTrace, optimizer_kernels, trace_optimizer
from gpipe_bench.simulator.workloads.sources import ModelSource, model_of_suite, module_source
from gpipe_bench.simulator.workloads.workload import Kernels, SkipWork, StaticMemory, Workload

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Model", "build_workload", "microbatch_sizes", "workload_of"]

_Update = Mapping[str, OptimizerTrace]
"""Type of parameters -> the optimizer's step for one of them."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model by name, which is traced once and kept on disk.

    Attributes:
        name: in the table of models, or ``file.py:function``.
        arguments: missing ones take their defaults.
    """

    name: str
    arguments: Mapping[str, Any]


def build_workload(
    model: Model | nn.Sequential,
    *,
    balance: Sequence[int],
    batch_size: int,
    chunks: int = 1,
    profile: Profile,
    optimizer: str | None = "sgd",
    sample: Tensor | tuple[Tensor, ...] | None = None,
    loss: Callable[..., Tensor] | None = None,
    target: Tensor | None = None,
    precision: str = "float32",
    cache: Path | None = None,
    split: bool = False,
) -> Workload:
    """The work of one training step.

    Args:
        model: a model of the suite, or any ``nn.Sequential`` on any device (``meta`` costs no memory), left as it was.
        balance: layers per partition.
        batch_size: samples of a mini-batch.
        chunks: micro-batches asked for.
        profile: the devices.
        optimizer: name of an optimizer, see :mod:`gpipe_bench.simulator.workloads.optimizers`; None for no update.
        sample: with an ``nn.Sequential``, a batch of any size as the model takes it, on any device.
        loss: with an ``nn.Sequential``, (output, target) -> scalar; None for no loss.
        target: with a loss, the targets of a whole mini-batch.
        precision: what to train in, see :mod:`gpipe_bench.simulator.tracing.precision`.
        cache: folder of stored traces; the user's cache folder by default.
        split: whether backward passes are split into I and W; both are traced anew in each process.

    Raises:
        BalanceError: ``balance`` does not fit the model.
        ValueError: batch size, chunks, optimizer or what belongs to the model.
    """
    source = _source(model, (sample, loss, target), precision, cache)
    return workload_of(
        source,
        balance=balance,
        batch_size=batch_size,
        chunks=chunks,
        profile=profile,
        optimizer=optimizer,
        cache=cache,
        split=split,
    )


def workload_of(
    source: ModelSource,
    *,
    balance: Sequence[int],
    batch_size: int,
    chunks: int,
    profile: Profile,
    optimizer: str | None,
    cache: Path | None = None,
    split: bool = False,
) -> Workload:
    """The work of one training step of a model whose traces are at hand; see :func:`build_workload`.

    Raises:
        BalanceError: ``balance`` does not fit the model.
        ValueError: batch size, chunks or optimizer.
    """
    sizes = microbatch_sizes(batch_size, chunks)
    # A trace is many small objects without cycles, which the collector would go through again and again.
    with no_collection():
        facts = source.facts
        _check_balance(balance, len(facts))
        routes = _routes(facts, balance)
        crossing = {number: route for number, route in routes.items() if route[0] != route[1]}
        per_size = {size: _partitions(source, size, balance, crossing, profile, split=split) for size in set(sizes)}
        largest = per_size[sizes[0]]
        dtypes = {parameter.dtype for layer in facts for parameter in layer.parameters}
        masters = source.precision in HALVES
        update = None if optimizer is None else trace_optimizer(optimizer, dtypes, cache, masters=masters)
        static = tuple(_static_of(facts[span], update) for span in _spans(balance))
        return Workload(
            partitions=tuple({size: per_size[size][j].task for size in sorted(per_size)} for j in range(len(balance))),
            microbatch_sizes=sizes,
            skips=tuple(
                SkipWork(
                    f"skip{number}",
                    *route,
                    {size: per_size[size][route[0]].departing[number] for size in sorted(per_size)},
                    number in largest[route[1]].returning,
                )
                for number, route in crossing.items()
                if number in largest[route[0]].departing
            ),
            loss=_loss_kernels(source.loss(batch_size), source.layers(sizes[0])[-1], batch_size, sizes[0], profile),
            optimizer=_update(facts, balance, update, profile),
            static_bytes=tuple(part.total for part in static),
            static=static,
        )


def microbatch_sizes(batch_size: int, chunks: int) -> tuple[int, ...]:
    """Sizes of the micro-batches, as ``Tensor.chunk`` makes them: equal but the last, and maybe fewer than asked.

    Raises:
        ValueError: either is not positive.
    """
    for name, value in (("batch_size", batch_size), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}; use 1 or more")
    size = -(-batch_size // chunks)
    full, rest = divmod(batch_size, size)
    return (size,) * full + ((rest,) if rest else ())


def _source(
    model: Model | nn.Sequential,
    given: tuple[Tensor | tuple[Tensor, ...] | None, Callable[..., Tensor] | None, Tensor | None],
    precision: str,
    cache: Path | None,
) -> ModelSource:
    """Traces of a model; ``given``: sample, loss and target."""
    if isinstance(model, Model):
        return model_of_suite(model.name, model.arguments, cache, precision=precision)
    sample, loss, target = given
    if sample is None:
        raise ValueError("sample must be given with an nn.Sequential, got None; pass a batch as the model takes it")
    if loss is not None and target is None:
        raise ValueError("target must be given with a loss, got None; pass the targets of a mini-batch")
    targets = None if target is None else (lambda _: target)
    return module_source(model, sample, loss, targets, precision=precision)


def _check_balance(balance: Sequence[int], layers: int) -> None:
    if not balance or min(balance) < 1 or sum(balance) != layers:
        raise BalanceError(
            f"balance must be positive numbers that sum to the model's {layers} layers, got {list(balance)} with sum "
            f"{sum(balance)}; correct it"
        )


def _spans(balance: Sequence[int]) -> list[slice]:
    starts = [sum(balance[:j]) for j in range(len(balance) + 1)]
    return [slice(start, stop) for start, stop in pairwise(starts)]


def _routes(facts: Sequence[LayerFacts], balance: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Source and target partition of each skip, in the order of the stashes."""
    sources: dict[int, int] = {}
    targets: dict[int, int] = {}
    for j, span in enumerate(_spans(balance)):
        for layer in facts[span]:
            sources.update(dict.fromkeys(layer.stashes, j))
            targets.update(dict.fromkeys(layer.pops, j))
    return {number: (source, targets[number]) for number, source in sources.items()}


def _partitions(
    source: ModelSource,
    size: int,
    balance: Sequence[int],
    crossing: Mapping[int, tuple[int, int]],
    profile: Profile,
    *,
    split: bool,
) -> list[PartitionWork]:
    """The work of each partition for micro-batches of ``size`` samples; ``crossing``: routes of the skips by number."""
    facts, costs = source.facts, source.composed.costs(profile)
    works: list[PartitionWork] = []
    entering = source.input_bytes(size)
    for j, span in enumerate(_spans(balance)):
        # A skip may be None.
        arriving = {
            number: works[begin].departing[number]
            for number, (begin, end) in crossing.items()
            if end == j and number in works[begin].departing
        }
        departing = tuple(number for number, route in crossing.items() if route[0] == j)
        make = partial(
            compose,
            source.partition(size, span),
            facts[span],
            input_bytes=entering,
            arriving=arriving,
            departing=departing,
            first=j == 0,
            costs=costs,
            split=source.splits(size, span) if split else None,
        )
        key = size, span.start, span.stop, entering, tuple(arriving), departing, split
        works.append(source.composed.partition(costs, key, make))
        entering = works[-1].task.output_bytes
    return works


def _loss_kernels(loss: LayerTrace | None, last: LayerTrace, batch: int, size: int, profile: Profile) -> Kernels:
    """The loss on the whole mini-batch, after the outputs of the micro-batches were put together."""
    moved = sum(port.bytes for port in last.outputs) // size * batch
    gather = Kernel("cat", "memory_bound", "elementwise", "float32", 1, 0, moved, moved)
    steps = () if loss is None else (*loss.kernels("forward"), *loss.kernels("backward"))
    return total((*((gather,) if size < batch else ()), *steps), profile)


def _update(
    facts: Sequence[LayerFacts], balance: Sequence[int], traces: _Update | None, profile: Profile
) -> tuple[Kernels, ...]:
    if traces is None:
        return ()
    return tuple(
        optimizer_kernels(traces, (parameter for layer in facts[span] for parameter in layer.parameters), profile)
        for span in _spans(balance)
    )


def _static_of(facts: Sequence[LayerFacts], traces: _Update | None) -> StaticMemory:
    """Parameters, gradients, optimizer state and buffers."""
    resident: list[int] = []
    parameters: list[Parameter] = []
    for layer in facts:
        resident += [parameter.bytes for parameter in layer.parameters] + list(layer.others)
        parameters += layer.parameters
    gradients = sum(parameter.bytes for parameter in parameters)
    if traces is None:
        return StaticMemory(tuple(resident), gradients)
    # An optimizer makes its master copies when it is made.
    masters = [item.elements * traces[item.dtype].master_per_element for item in parameters]
    resident += [nbytes for nbytes in masters if nbytes]
    return StaticMemory(
        tuple(resident),
        gradients,
        tuple(item.elements * size for item in parameters for size in traces[item.dtype].state_per_element),
        max((item.elements * traces[item.dtype].temporary_per_element for item in parameters), default=0),
    )
