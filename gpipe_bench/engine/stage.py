"""A partition in place: its layers, its device, its streams and the skips that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from gpipe_bench.components import Components
from gpipe_bench.engine.autograd import Made, can_renumber
from gpipe_bench.engine.keeping import Kept, is_dense, kept_by
from gpipe_bench.engine.layers import Layers
from gpipe_bench.engine.microbatch import Values, flatten, unflatten
from gpipe_bench.engine.sequential import run_layers
from gpipe_bench.engine.skip.layout import SkipLayout
from gpipe_bench.engine.skip.namespace import SkipKey
from gpipe_bench.engine.skip.skippable import Skippable
from gpipe_bench.engine.skip.tracker import LocalTracker, use_tracker
from gpipe_bench.engine.spans import Sizes
from gpipe_bench.engine.streams import Stream, current_stream, has_streams, new_stream
from gpipe_bench.engine.transfer import Endpoint

__all__ = ["PartitionTask", "Stage", "looked_at", "place", "with_known_end"]


@dataclass(slots=True)
class Stage:
    """One partition, in place.

    Attributes:
        j: its index.
        layers: its layers.
        device: where they are.
        worker: index of the worker that issues its tasks.
        own_stream: a compute stream of its own, if it shares its device with other partitions and they exchange
            tensors through the host; else None, and it computes on the caller's current stream.
        incoming: skips that a task takes in, in order.
        outgoing: skips that a task gives out, in order.
        skips: whether any skip concerns it, be it within.
        nests: whether a pipeline is among its layers.
        strays: whether the graph of a task has nodes of other threads or of a pipeline in it, whose numbers say nothing
            of the task; None until one was looked at.
        chained: whether the graph of the last task that was looked at hung on one output, with no nodes of others in it
            and none elsewhere: then its backward pass begins at that output, and no other task comes before its end.
        reaches: whether all inputs that can get a gradient got one from it.
        copying: a copy stream per micro-batch, made when first needed and kept.
        writes_inputs: whether its first layers write to their inputs; None until a first pass has shown it.
        whole: by training mode, whether all nodes that a task makes are between its inputs and its outputs, with none
            of others, no tensor is given out twice, and it is known what the nodes keep: then nobody comes to its graph
            but through the pipeline, and no two partitions add up its gradients. Empty until a first pass has shown it.
        sizes: by training mode, what it holds, where it is ``whole``.
    """

    j: int
    layers: nn.Sequential
    device: torch.device
    worker: int
    own_stream: Stream
    incoming: list[SkipKey]
    outgoing: list[SkipKey]
    skips: bool
    nests: bool
    strays: bool | None = None
    chained: bool = False
    reaches: bool = True
    copying: list[Stream] = field(default_factory=list)
    writes_inputs: bool | None = None
    whole: dict[bool, bool] = field(default_factory=dict)
    sizes: dict[bool, Sizes] = field(default_factory=dict)

    def computing(self) -> Stream:
        """The compute stream for a batch that the calling thread is about to issue."""
        return self.own_stream if self.own_stream is not None else current_stream(self.device)

    def endpoints(self, m: int, computing: Stream, *, copy_streams: bool) -> list[Endpoint]:
        """Where copies of each of m micro-batches begin or end; without copy streams on the compute stream."""
        if not (copy_streams and has_streams(self.device)):
            return [Endpoint(self.device, computing, computing)] * m
        while len(self.copying) < m:
            self.copying.append(new_stream(self.device, copying=True))
        return [Endpoint(self.device, copying, computing) for copying in self.copying[:m]]


def looked_at(stage: Stage, training: bool, inputs: Values, job: Callable[[], Values]) -> Values:
    """Run a task with a graph, and note whether this is whole, unless that is known; one without tells nothing."""
    if training in stage.whole or not can_renumber():
        return job()
    made = Made(inputs, job)
    if made.count:
        tensors = [value for value in made.outputs if isinstance(value, Tensor) and value.grad_fn is not None]
        given = {(tensor.grad_fn, tensor.output_nr) for tensor in tensors}
        weights = (*stage.layers.parameters(), *stage.layers.buffers())
        whole = made.alone and len(given) == len(tensors) and is_dense((*inputs, *made.outputs, *weights))
        kept = kept_by((node for node, _ in made.nodes), inputs, made.outputs, weights) if whole else None
        stage.whole[training] = kept is not None
        if kept is not None:
            stage.sizes[training] = _sizes(stage, inputs, made.outputs, kept)
    return made.outputs


def with_known_end(stages: Sequence[Stage]) -> set[int]:
    """The partitions of which batches so far show when a task without checkpoint begins and ends backward.

    That is so where it is :attr:`Stage.chained`, its backward pass is reached and reaches its inputs, where a lane
    would begin, and the node of its output stays the one that it is. (If a partition writes to a view, another takes
    its place.)
    """
    known, reached, written = set(), True, False
    for stage in reversed(stages):
        writes, reached = bool(stage.writes_inputs), reached and stage.reaches
        if stage.chained and reached and not (writes or written):
            known.add(stage.j)
        written = writes
    return known


def _sizes(stage: Stage, inputs: Values, outputs: Values, kept: Kept) -> Sizes:
    trained = _nbytes(parameter for parameter in stage.layers.parameters() if parameter.requires_grad)
    # What comes into the first partition is the caller's.
    coming, needed = (_nbytes(inputs), kept.inputs) if stage.j else (0, 0)
    return Sizes(trained, coming, _nbytes(outputs), kept.inner, needed, kept.outputs)


def _nbytes(values: Iterable[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


class PartitionTask:
    """Computes a partition on flat values: those of the micro-batch, then the incoming skips.

    Args:
        stage: the partition.
        count: how many of the flat values are the micro-batch's.
        structure: how the first layer sees them.

    Attributes:
        output_structure: how the last layer gave its values; known after the first call.
    """

    def __init__(self, stage: Stage, count: int, structure: TreeSpec | None) -> None:
        self._stage = stage
        self._count = count
        self._structure = structure
        self.output_structure: TreeSpec | None = None

    def __call__(self, flat: Values) -> Values:
        """Flat inputs to flat outputs: those of the last layer, then the outgoing skips."""
        stage = self._stage
        if not stage.skips:
            output = run_layers(stage.layers, unflatten(flat, self._structure))
            values, self.output_structure = flatten(output)
            return values
        tracker = LocalTracker(zip(stage.incoming, flat[self._count :], strict=True))
        with use_tracker(tracker):
            output = run_layers(stage.layers, unflatten(flat[: self._count], self._structure))
            values, self.output_structure = flatten(output)
        return (*values, *(tracker.load(key) for key in stage.outgoing))

    def keeping_inputs(self, flat: Values) -> Values:
        """Compute, and leave ``flat`` as it is even if a layer works in place: a recomputation will need it.

        Copies are made for the first task of a partition, which shows whether it needs them, and then only if so.

        Raises:
            RuntimeError: the layers wrote to their inputs for the first time in a later task.
        """
        stage = self._stage
        inputs = flat
        if stage.writes_inputs is not False:
            inputs = tuple(value.clone() if isinstance(value, Tensor) else value for value in flat)
        versions, has_graph = _versions(inputs), torch.is_grad_enabled()
        outputs = self(inputs)
        written = versions != _versions(inputs)
        if written and stage.writes_inputs is False:
            stage.writes_inputs = True
            raise RuntimeError(
                f"layers of partition {stage.j} must write to their input from the first batch on or never, got the "
                "first in-place operation in a later one; run the batch again: from now on the input is kept"
            )
        stage.writes_inputs = stage.writes_inputs or written
        # To compare copies would let the host wait for other devices.
        if written or has_graph or inputs is flat or stage.device.type != "cpu":
            return outputs
        return tuple([_of_originals(output, inputs, flat) for output in outputs])


def _of_originals(output: Any, copies: Values, originals: Values) -> Any:
    """``output``, but where it is a copy or a view of one, the same of the original: no copy stays for its sake."""
    for copy, original in zip(copies, originals, strict=True):
        if is_dense([output, copy, original]) and _same_memory(output, copy):
            # Autograd does not count what is written through .data or NumPy.
            if _reads(output) != _reads(copy) or copy.stride() != original.stride() or not torch.equal(copy, original):
                return output
            offset = output.storage_offset() - copy.storage_offset() + original.storage_offset()
            return original.as_strided(output.shape, output.stride(), offset)
    return output


def _same_memory(one: Any, other: Any) -> bool:
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return tensors and one.untyped_storage()._cdata == other.untyped_storage()._cdata  # noqa: SLF001 - its identity


def _reads(value: Tensor) -> tuple[Any, ...]:
    """What a tensor makes of its memory, beside its shape."""
    return value.dtype, value.is_conj(), value.is_neg()


def _versions(values: Values) -> int | list[int]:
    """Autograd's own count of writes. Inference tensors have none, but nothing is checkpointed in inference mode."""
    if len(values) == 1 and isinstance(values[0], Tensor):
        return values[0]._version  # noqa: SLF001 - see above
    return [value._version for value in values if isinstance(value, Tensor)]  # noqa: SLF001 - see above


def place(
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
    layout: SkipLayout,
    components: Components,
    transfer: str,
) -> list[Stage]:
    """Put partitions on devices.

    With portals a task takes in the skips that arrive at its partition, and gives out those that depart from it.
    Without, skips ride along: it takes in all that are on board before it, and gives out all that are after it.
    """
    stages = []
    workers: dict[torch.device, int] = {}
    for j, (layers, device) in enumerate(zip(partitions, devices, strict=True)):
        shared = transfer == "host" and list(devices).count(device) > 1
        incoming = layout.arrivals(j) if components.portals else layout.passing(j - 1)
        outgoing = layout.departures(j) if components.portals else layout.passing(j)
        # Tasks of one device are issued by one thread; each partition on the CPU is a device of its own.
        worker = j if device.type == "cpu" else workers.setdefault(device, j)
        own_stream = new_stream(device) if shared else None
        skips = bool(incoming or outgoing) or any(isinstance(layer, Skippable) for layer in layers.modules())
        nests = any(isinstance(layer, Layers) for layer in layers.modules())
        stages.append(Stage(j, layers, device, worker, own_stream, incoming, outgoing, skips, nests))
    return stages
