"""From a model, a balance and a batch to the workload that the event simulation runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_bench.errors import BalanceError
from gpipe_bench.kernels.cost import workspace_bytes
from gpipe_bench.kernels.kernel import NO_BLOCK, Free, Kernel, LayerFacts, LayerTrace, Parameter
from gpipe_bench.machine.profile import Profile
from gpipe_bench.models.measured import MeasuredLayer, checked_layers, is_layers, is_layers_file, read_layers
from gpipe_bench.settings import HALVES
from gpipe_bench.simulator.workloads.blocks import Blocks, Costs, total
from gpipe_bench.simulator.workloads.compose import PartitionWork, compose
from gpipe_bench.simulator.workloads.layer_passes import LayerPasses, SkipCopy
from gpipe_bench.simulator.workloads.measured import MeasuredSource
from gpipe_bench.simulator.workloads.optimizers import (
    OptimizerTrace,
    optimizer_kernels,
    sizes_by_type,
    trace_optimizer,
)
from gpipe_bench.simulator.workloads.sources import ModelSource, model_of_suite, module_source
from gpipe_bench.simulator.workloads.workload import (
    Kernels,
    MemoryOp,
    SkipWork,
    StaticMemory,
    Workload,
    gradient_name,
    input_name,
)
from gpipe_bench.step.request import AnyModel, Model, microbatch_sizes
from gpipe_bench.util.garbage import no_collection

if TYPE_CHECKING:
    from torch import Tensor

_Update = Mapping[str, OptimizerTrace]
"""Type of parameters -> the optimizer's step for one of them."""


def layers_of(model: AnyModel) -> tuple[MeasuredLayer, ...]:
    """The layers of a model whose times were measured; none of any other.

    Raises:
        ConfigError: their values, or the file, are wrong.
    """
    if isinstance(model, Model):
        return read_layers(model.name) if is_layers_file(model.name) else ()
    return checked_layers(model) if isinstance(model, Sequence) and is_layers(model) else ()


def source_of(
    model: AnyModel,
    *,
    sample: Tensor | tuple[Tensor, ...] | None = None,
    loss: Callable[..., Tensor] | None = None,
    target: Tensor | None = None,
    precision: str = "float32",
    cache: Path | None = None,
) -> ModelSource:
    """Where the traces of a model come from; all as in :func:`.api.simulate`.

    Raises:
        ConfigError: there is no such model.
    """
    if layers := layers_of(model):
        return MeasuredSource(layers, precision=precision)
    if isinstance(model, Model):
        return model_of_suite(model.name, model.arguments, cache, precision=precision)
    assert sample is not None and not isinstance(model, Sequence)  # noqa: S101, PT018 - arguments are checked before
    return module_source(model, sample, loss, target, precision=precision)


def build_workload(
    model: AnyModel,
    *,
    sample: Tensor | tuple[Tensor, ...] | None = None,
    loss: Callable[..., Tensor] | None = None,
    target: Tensor | None = None,
    precision: str = "float32",
    cache: Path | None = None,
    **options: Any,
) -> Workload:
    """The work of one training step; ``options``: those of :func:`workload_of`, all else as in :func:`.api.simulate`.

    Raises:
        BalanceError, ValueError: as there.
    """
    source = source_of(model, sample=sample, loss=loss, target=target, precision=precision, cache=cache)
    return workload_of(source, cache=cache, **options)


# A trace is many small objects without cycles, which the collector would go through again and again.
@no_collection()
def workload_of(
    source: ModelSource,
    *,
    balance: Sequence[int],
    batch_size: int,
    chunks: int = 1,
    profile: Profile,
    optimizer: str | None = "sgd",
    masters: bool = True,
    cache: Path | None = None,
    split: bool = False,
    scheduled: bool = False,
    published: bool = False,
    shared: bool = True,
) -> Workload:
    """The work of one training step of a model whose traces are at hand.

    Args:
        source: traces of the model.
        balance: layers per partition.
        batch_size: samples of a mini-batch.
        chunks: micro-batches asked for.
        profile: the devices.
        optimizer: one of :data:`gpipe_bench.settings.OPTIMIZERS`; None for no update.
        masters: whether it updates copies in float32 of weights in a half.
        cache: folder of stored traces; the user's cache folder by default.
        split: whether backward passes are split into I and W; both are traced anew in each process.
        scheduled: whether a schedule runs it: then inputs of a checkpoint are no leaves of autograd, and each
            micro-batch has a loss.
        published: whether autograd and the optimizer are those of the published runs.
        shared: whether layers that read one skip share its copies.

    Raises:
        BalanceError: ``balance`` does not fit the model.
        ValueError: batch size, chunks or optimizer.
    """
    sizes, facts = microbatch_sizes(batch_size, chunks), source.facts
    _check_balance(balance, len(facts))
    spans = [slice(stop - layers, stop) for layers, stop in zip(balance, accumulate(balance), strict=True)]
    legs = _legs(facts, spans, shared=shared)
    costs = Costs(profile, sums_in_place=not published)
    works_of = partial(_partitions, source, spans, legs, costs, split=split, leaves=not scheduled)
    per_size = {size: works_of(size) for size in sorted(set(sizes))}
    dtypes = {parameter.dtype for layer in facts for parameter in layer.parameters}
    masters = masters and source.precision in HALVES
    update = (
        None if optimizer is None else trace_optimizer(optimizer, dtypes, cache, masters=masters, published=published)
    )
    updates = () if update is None else tuple(_update(update, facts[span], profile) for span in spans)
    layers = source.layers(sizes[0])
    static = tuple(
        replace(_static_of(facts, span, update), workspaces=_workspaces(layers[span], profile)) for span in spans
    )
    loss, last = source.loss(batch_size), layers[-1]
    return Workload(
        partitions=tuple({size: works[j].task for size, works in per_size.items()} for j in range(len(balance))),
        microbatch_sizes=sizes,
        skips=_skips(legs, per_size, per_size[sizes[0]]),
        loss=_loss_kernels(loss, last, batch_size, batch_size if scheduled else sizes[0], profile),
        optimizer=updates,
        static_bytes=tuple(part.total for part in static),
        static=static,
        # Profiles without constants of kernels were fitted to published memory, with a loss that holds no memory.
        loss_memory=() if profile.kernels is None else _loss_memory(loss, last, costs),
    )


class _Leg(NamedTuple):
    """The way of a copy of a skip from one partition to the next one that reads it."""

    copy: SkipCopy
    source: int
    target: int


def _skips(
    legs: Sequence[_Leg], per_size: Mapping[int, list[PartitionWork]], largest: list[PartitionWork]
) -> tuple[SkipWork, ...]:
    """The skips that cross a boundary; ``largest``: the work of the largest micro-batches."""
    return tuple(
        SkipWork(
            "skip" + "-".join(str(number) for number in copy[: 1 + bool(copy[1])]),
            source,
            target,
            {size: works[source].departing[copy] for size, works in per_size.items()},
            copy in largest[target].returning,
        )
        for copy, source, target in legs
        if copy in largest[source].departing
    )


def _check_balance(balance: Sequence[int], layers: int) -> None:
    if not balance or min(balance) < 1 or sum(balance) != layers:
        raise BalanceError(
            f"balance must be positive numbers that sum to the model's {layers} layers, got {list(balance)} with sum "
            f"{sum(balance)}; correct it"
        )


def _legs(facts: Sequence[LayerFacts], spans: Sequence[slice], *, shared: bool) -> list[_Leg]:
    """The ways of skips that cross boundaries, in the order of the stashes, then in that of the readers."""
    routes: dict[int, list[int]] = {}
    for j, span in enumerate(spans):
        for layer in facts[span]:
            for number in layer.reads:
                routes[number].append(j)
            routes |= {number: [j] for number in layer.stashes}
    legs = []
    for number, (source, *readers) in routes.items():
        for reader, group in enumerate([readers] if shared else [[one] for one in readers]):
            legs += [_Leg((number, reader), *ends) for ends in pairwise(dict.fromkeys((source, *group)))]
    return legs


def _partitions(
    source: ModelSource,
    spans: Sequence[slice],
    legs: Sequence[_Leg],
    costs: Costs,
    size: int,
    *,
    split: bool,
    leaves: bool,
) -> list[PartitionWork]:
    """The work of each partition for micro-batches of ``size`` samples."""
    works: list[PartitionWork] = []
    entering = source.input_bytes(size)
    for j, span in enumerate(spans):
        # A skip may be None.
        arriving = {
            copy: works[begin].departing[copy]
            for copy, begin, end in legs
            if end == j and copy in works[begin].departing
        }
        departing = tuple(copy for copy, begin, _ in legs if begin == j)
        layers, facts = source.partition(size, span), source.facts[span]
        passes = partial(LayerPasses, layers, facts, input_bytes=entering, arriving=arriving, departing=departing)
        halves = source.splits(size, span) if split else None
        works.append(compose(passes, costs, halves, first=j == 0, leaves=leaves))
        entering = works[-1].task.output_bytes
    return works


def _loss_kernels(loss: LayerTrace | None, last: LayerTrace, batch: int, size: int, profile: Profile) -> Kernels:
    """The loss on the whole mini-batch, after outputs of ``size`` samples were put together."""
    moved = sum(port.bytes for port in last.outputs) // size * batch
    gather = Kernel.copy("cat", moved)
    steps = () if loss is None else (*loss.kernels("forward"), *loss.kernels("backward"))
    return total((*((gather,) if size < batch and moved else ()), *steps), profile)


def _loss_memory(loss: LayerTrace | None, last: LayerTrace, costs: Costs) -> tuple[MemoryOp, ...]:
    """Requests of a loss of one tensor; none for other losses, and without a gradient."""
    if loss is None or len(last.outputs) != 1 or loss.input_gradients[:1] in ((), (NO_BLOCK,)):
        return ()
    blocks, names = Blocks(costs), {0: input_name(0)}
    blocks.hold(input_name(0))
    early = () if 0 in loss.kept else (Free(0),)
    blocks.run((*loss.forward, *early, *loss.backward), names)
    gradient = names.pop(loss.input_gradients[0])
    for _, block in sorted(names.items()):
        blocks.drop(block)
    asked = [op for op in blocks.take() if op.kind != "scratch"]
    return tuple(op._replace(block=gradient_name(0)) if op.block == gradient else op for op in asked)


def _update(traces: _Update, facts: Sequence[LayerFacts], profile: Profile) -> Kernels:
    """The update of some layers."""
    parameters = sum(len(layer.parameters) for layer in facts)
    kernels = total(optimizer_kernels(traces, facts), profile)
    return replace(kernels, host_ns=round(1000 * profile.constants.get("parameter_us", 0) * parameters))


def _workspaces(layers: Sequence[LayerTrace], profile: Profile) -> tuple[int, ...]:
    """Those of cuBLAS: each thread has a handle, one thread runs forward passes, and autograd's backward passes."""
    passes = ([kernel for layer in layers for kernel in layer.kernels(way)] for way in ("forward", "backward"))
    sizes = (max((workspace_bytes(kernel, profile) for kernel in kernels), default=0) for kernels in passes)
    return tuple(nbytes for nbytes in sizes if nbytes)


def _static_of(facts: Sequence[LayerFacts], span: slice, traces: _Update | None) -> StaticMemory:
    """Parameters, gradients, optimizer state and buffers; of a tied weight of an earlier partition a copy."""
    resident: list[int] = []
    parameters: list[Parameter] = []
    for layer in facts[span]:
        resident += [parameter.bytes for parameter in layer.parameters] + list(layer.others)
        parameters += layer.parameters
    copies = dict.fromkeys(each for layer in facts[span] for each in layer.tied if each.first < span.start)
    resident += [each.bytes for each in copies]
    gradients = sum(each.bytes for each in parameters) + sum(each.bytes for each in copies if each.trained)
    if traces is None:
        return StaticMemory(tuple(resident), gradients)
    # An optimizer makes its master copies when it is made.
    masters = [item.elements * traces[item.dtype].master_per_element for item in parameters]
    resident += [nbytes for nbytes in masters if nbytes]
    return StaticMemory(
        tuple(resident),
        gradients,
        tuple(item.elements * size for item in parameters for size in traces[item.dtype].state_per_element),
        max(
            (traces[dtype].temporary(sizes) for dtype, sizes in sizes_by_type(facts[span]).items()), key=sum, default=()
        ),
    )
