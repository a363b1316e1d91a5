"""What host threads issue in a training step: passes of tasks, transfers, loss and update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, compress, pairwise

from gpipe_bench.machine.replay import Machine
from gpipe_bench.simulator.steps.places import Places
from gpipe_bench.simulator.steps.settings import Settings
from gpipe_bench.simulator.steps.writer import CALLER, TraceWriter
from gpipe_bench.simulator.workloads.workload import HOST, Kernels, Workload

OPEN, TIED, CHECKPOINT, CELL = range(4)
"""How a forward pass is run, and what is kept until its backward pass: ``simulator/memory/memory.h``."""


class Issuer:
    """Writes rows of the passes and transfers of one training step after another.

    Args:
        writer: of the rows.
        workload: as :meth:`Workload.chosen` gives it.
        machine: how long copies take.
        settings: of the run.
        places: of the partitions.

    Attributes:
        incoming: for each partition, skips that its tasks take in.
        outgoing: likewise, skips that they give out.
        riding: likewise, skips that come with their micro-batch.
    """

    def __init__(
        self, writer: TraceWriter, workload: Workload, machine: Machine, settings: Settings, places: Places
    ) -> None:
        self.writer, self.work, self.places, self.settings = writer, workload, places, settings
        self._machine = machine
        self.incoming: list[list[int]] = [[] for _ in range(workload.n)]
        self.outgoing: list[list[int]] = [[] for _ in range(workload.n)]
        for k, skip in enumerate(workload.skips):
            through = range(skip.source, skip.target + 1)
            for one, other in pairwise((skip.source, skip.target) if settings.components.portals else through):
                if one != other:
                    self.outgoing[one].append(k)
                    self.incoming[other].append(k)
        self.riding: Sequence[Sequence[int]] = [[]] * workload.n if settings.components.portals else self.incoming
        self.published = settings.flavour == "published"
        self._sizes = cache(self._sizes_of)
        self._passes = cache(self._passes_of)

    # --- passes -------------------------------------------------------------------------------------------------------

    def run(self, thread: int, kind: str, i: int, j: int, how: int = OPEN) -> None:
        """Issue the kernels of a pass; of a backward pass in two parts, one may have nothing to compute.

        ``how``: of a forward pass, what is kept until its backward pass.
        """
        kernels, nbytes = self._passes(kind, self.work.microbatch_sizes[i], j)
        task = self.writer.task(kind, i, j, self.places.devices[j], False, nbytes, how=how)
        if kind in ("backward_inputs", "backward_weights") and not (kernels.duration_ns or kernels.launches):
            self.writer.tell(thread, task)
            return
        gradients = 0 if self.published else 1 + j
        self.writer.kernels(thread, self.places.computing[j], kernels, kind, task=task, gradients=gradients)

    def _passes_of(self, kind: str, size: int, j: int) -> tuple[Kernels, int]:
        work = self.work.partitions[j][size]
        kernels = work.kernels(kind)
        if self.published:
            # The latencies of the published runs were chosen while launches left queues evenly.
            kernels = replace(kernels, ends_ns=())
        return kernels, sum(work.output_bytes) if kind in ("forward", "recompute") else 0

    def tell(self, thread: int, kind: str, i: int = 0, j: int = 0) -> None:
        """A thread does something that matters to memory alone: one of the kinds of tasks that run on no stream."""
        self.writer.tell(thread, self.writer.task(kind, i, j, self.places.devices[j]))

    def loss(self, thread: int, i: int | None = None) -> None:
        """Issue the loss of the batch, or the share of a micro-batch, so that all shares are the whole."""
        whole, sizes = self.work.loss, self.work.microbatch_sizes
        length = whole.duration_ns
        if i is not None:
            ends = [share * length // sum(map(abs, sizes)) for share in accumulate(map(abs, sizes), initial=0)]
            length = ends[i + 1] - ends[i]
        if length or whole.launches:
            self.writer.kernels(thread, self.places.computing[-1], Kernels(length, whole.launches), "loss")

    def update(self) -> None:
        """Issue the update of each partition."""
        for stream, work in zip(self.places.computing, self.work.optimizer, strict=False):
            if work.host_ns:
                self.writer.update(CALLER, stream, work.host_ns)
            if work.duration_ns or work.launches:
                self.writer.kernels(CALLER, stream, Kernels(work.duration_ns, work.launches), "update")
        self.tell(CALLER, "update")

    # --- transfers ----------------------------------------------------------------------------------------------------

    def transfer(self, thread: int, i: int, j: int, skip: int | None = None, *, back: bool = False) -> None:
        """Issue the copies of a micro-batch that comes to partition j, or of one skip; or of their gradients back."""
        source = j - 1 if skip is None else self.work.skips[skip].source
        ends = (j, source) if back else (source, j)
        sender, receiver = (self.places.copying[end][i] for end in ends)
        devices = [self.places.devices[end] for end in ends]
        sizes = self._sizes(self.work.microbatch_sizes[i], j, skip, back)
        kind = ("copy" if skip is None else "portal") + ("_grad" if back else "")
        aside = sender != self.places.computing[ends[0]]
        task = self.writer.task(
            kind, i, j, devices[0], aside, sum(sizes), skip=-1 if skip is None else skip, source=source
        )
        if not self.places.staged:
            ns = sum(self._machine.copy_ns(devices[0], devices[1], nbytes) for nbytes in sizes)
            self.writer.copy(
                thread, "device_to_device", sender, receiver, ns=ns, launches=len(sizes), nbytes=sum(sizes), task=task
            )
            return
        # Tensor by tensor, all at once; as a direct copy does by itself, the first begins when the receiver is
        # idle. Of no tensors, copies that take no time stand for all.
        self.writer.tell(thread, task, sender, receiver)
        self.writer.order(thread, sender, receiver)
        count = int(bool(sizes))
        for number, nbytes in enumerate(sizes or (0,), 1):
            down, up = self._machine.copy_ns(devices[0], HOST, nbytes), self._machine.copy_ns(HOST, devices[1], nbytes)
            self.writer.copy(
                thread,
                "device_to_host",
                sender,
                ns=down * count,
                launches=count,
                nbytes=nbytes,
                task=task,
                joined=2 + 2 * (len(sizes) - number) if sizes else 1,
            )
            self.writer.order(thread, receiver, sender)
            is_last = number >= len(sizes)
            if is_last:
                self.writer.tell(thread, task)
            self.writer.copy(
                thread, "host_to_device", receiver, ns=up * count, launches=count, nbytes=nbytes, task=task,
                joined=0 if is_last else 1 + 2 * (len(sizes) - number),
            )  # fmt: skip

    def returns(self, i: int, j: int, skip: int | None = None) -> bool:
        """Whether gradients go back for a transfer to partition j."""
        return bool(self._sizes(self.work.microbatch_sizes[i], j, skip, back=True))

    def _sizes_of(self, size: int, j: int, skip: int | None, back: bool) -> tuple[int, ...]:
        """Bytes of each tensor of a transfer."""
        if skip is not None:
            one = self.work.skips[skip]
            return (one.bytes[size],) if one.returns or not back else ()
        work, carried = self.work.partitions[j][size], [self.work.skips[k] for k in self.riding[j]]
        sizes = (*work.input_bytes, *(one.bytes[size] for one in carried))
        own = work.returns or (True,) * len(work.input_bytes)
        return tuple(compress(sizes, (*own, *(one.returns for one in carried)))) if back else sizes
