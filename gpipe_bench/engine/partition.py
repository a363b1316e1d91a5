"""A partition in place: its layers, its device, its streams, and the skips that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from gpipe_bench.autograd.microbatch import MicroBatch, Values, check_open, flatten
from gpipe_bench.autograd.sequential import Arguments, PipeSequential
from gpipe_bench.components import Components
from gpipe_bench.engine.transfer import Endpoint, Stream, has_streams, shared_stream
from gpipe_bench.skip.layout import PartitionSkips, SkipLayout
from gpipe_bench.skip.skippable import Skippable
from gpipe_bench.skip.tracker import CountingTracker, use_tracker
from gpipe_bench.skip.trees import TreeSpec


@dataclass(slots=True)
class Partition:
    """One partition, in place.

    Attributes:
        j: its index.
        layers: its layers.
        device: where they are.
        rank: the device of the schedule that it belongs to. Partitions of one rank take turns, so they share a compute
            stream, and hand tensors on as they are.
        worker: the thread that issues its tasks: one per device, on the CPU one per partition.
        own_stream: a compute stream of its rank's own, if other ranks share the device and they exchange tensors
            through the host; else None, and it computes on the caller's current stream.
        skips: the skips that come and go.
        has_skips: whether any layer stashes, pops or peeks, or a skip rides through.
        index_on_device: the number of partitions before it on its device.
        writes_inputs: whether its layers write to their inputs; None until a first task has shown it.
        kept: where memory begins that its layers keep and may write to: buffers, frozen parameters, and tensors that
            are attributes; looked up after each first micro-batch.
    """

    j: int
    layers: nn.Sequential
    device: torch.device
    rank: int
    worker: int
    own_stream: Stream
    skips: PartitionSkips
    has_skips: bool
    index_on_device: int
    writes_inputs: bool | None = None
    kept: AbstractSet[int] = frozenset()

    def endpoints(self, m: int, computing: Stream, *, copy_streams: bool) -> list[Endpoint]:
        """Where copies of each of m micro-batches begin or end; without copy streams on the compute stream."""
        if not (copy_streams and has_streams(self.device)):
            return [Endpoint(self.device, computing, computing)] * m
        numbers = range(self.index_on_device * m, self.index_on_device * m + m)
        streams = [shared_stream(self.device, number, copying=True) for number in numbers]
        return [Endpoint(self.device, copying, computing) for copying in streams]

    def compute(self, flat: Values, count: int, structure: TreeSpec | None) -> tuple[Values, TreeSpec | None]:
        """Run the layers on ``count`` values of a micro-batch, which the first layer sees so, and the incoming skips.

        Returns:
            The values of the last layer, then the outgoing skips; and the structure of the former.
        """
        tracker = self._tracker(flat[count:]) if self.has_skips else None
        with nullcontext() if tracker is None else use_tracker(tracker):
            given = MicroBatch(flat[:count], structure).unwrap()
            if isinstance(self.layers, PipeSequential) and isinstance(given, Arguments):
                result = self.layers(*given.args, **given.kwargs)
            elif isinstance(self.layers, PipeSequential) and isinstance(given, tuple):
                result = self.layers(*given)
            else:
                result = self.layers(given)
        values, structure = flatten(result)
        if tracker is None:
            return values, structure
        skips = [tracker.load(copy.key) for copy in self.skips.outgoing]
        check_open(skips)
        return (*values, *skips), structure

    def _tracker(self, arrived: Values) -> CountingTracker:
        """Keeps skips, of which these have come, until the last layer here has read them and they leave."""
        uses, copies = self.skips.uses, zip(self.skips.incoming, arrived, strict=True)
        here = [(copy.key, value) for copy, value in copies for _ in range(uses[copy])]
        return CountingTracker(here, self.skips.stashed)


TASK: Final = Partition.compute.__code__
"""The code of a frame in which a partition computes."""


def put_in_place(
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
    ranks: Sequence[int],
    layout: SkipLayout,
    components: Components,
    *,
    transfer: str,
    processes: bool,
) -> list[Partition]:
    """Put partitions on devices.

    Args:
        partitions: the layers.
        devices: of each partition.
        ranks: likewise its device of the schedule.
        layout: where skips begin and end.
        components: which components are on.
        transfer: ``direct`` or ``host``.
        processes: whether each rank is a process.
    """
    found = []
    # Between partitions of one place nothing is copied.
    places = [*zip(devices, ranks, strict=True)] if transfer == "host" or processes else devices
    own: dict[int, Stream] = {}
    for j, (layers, device) in enumerate(zip(partitions, devices, strict=True)):
        sharing = {rank for rank, other in zip(ranks, devices, strict=True) if other == device}
        if transfer == "host" and len(sharing) > 1 and ranks[j] not in own:
            own[ranks[j]] = shared_stream(device, sorted(sharing).index(ranks[j]))
        skips = layout.at(j, places, portals=components.portals, shared=components.shared)
        found.append(
            Partition(
                j,
                layers,
                device,
                ranks[j],
                worker=j if device.type == "cpu" else list(devices).index(device),
                own_stream=own.get(ranks[j]),
                skips=skips,
                has_skips=bool(skips.incoming or skips.outgoing)
                or any(isinstance(layer, Skippable) for layer in layers.modules()),
                index_on_device=list(devices[:j]).count(device),
            )
        )
    return found
