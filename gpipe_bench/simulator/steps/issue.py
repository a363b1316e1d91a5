"""What host threads issue in a training step: passes of tasks, transfers, loss and update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, compress, pairwise

from gpipe_bench.machine.replay import Machine
from gpipe_bench.machine.trace import TracedTask
from gpipe_bench.schedules.actions import MessageEnd
from gpipe_bench.simulator.steps.layout import FIRST_OF_PAIRS, Layout
from gpipe_bench.simulator.steps.settings import Settings
from gpipe_bench.simulator.steps.writer import CALLER, NOWHERE, Stream, TraceWriter
from gpipe_bench.simulator.workloads.workload import Kernels, Workload

OPEN, TIED, CHECKPOINT, CELL = range(4)
"""How a forward pass is run, and what is kept until its backward pass: ``simulator/memory/memory.h``."""


class Issuer:
    """Writes rows of the passes and transfers of one training step after another.

    Args:
        writer: of the rows.
        workload: as :meth:`Workload.chosen` gives it.
        machine: how long copies take.
        settings: of the run.
        layout: of the partitions.

    Attributes:
        incoming: for each partition, skips that its tasks take in.
        outgoing: likewise, skips that they give out.
        riding: likewise, skips that come with their micro-batch.
    """

    def __init__(
        self, writer: TraceWriter, workload: Workload, machine: Machine, settings: Settings, layout: Layout
    ) -> None:
        self.writer, self.work, self.layout, self.settings = writer, workload, layout, settings
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
        self._meetings: dict[MessageEnd, int] = {}
        self._pairs: dict[tuple[int, int], int] = {}
        self._sizes = cache(self._sizes_of)
        self._passes = cache(self._passes_of)
        self._copies = cache(self._copies_of)

    # --- passes -------------------------------------------------------------------------------------------------------

    def run(self, thread: int, kind: str, i: int, j: int, how: int = OPEN) -> None:
        """Issue the kernels of a pass; of a backward pass in two parts, one may have nothing to compute.

        ``how``: of a forward pass, what is kept until its backward pass.
        """
        pattern, nbytes = self._passes(kind, self.work.microbatch_sizes[i], j)
        task = self.writer.task(TracedTask(kind, i, j, self.layout.devices[j], nbytes=nbytes, how=how))
        if pattern is None:
            self.writer.tell(thread, task)
        else:
            self.writer.issue(thread, pattern, task=task)

    def _passes_of(self, kind: str, size: int, j: int) -> tuple[int | None, int]:
        """The pattern of the kernels of a pass, or None, and the bytes of its results."""
        work = self.work.partitions[j][size]
        kernels = work.kernels(kind)
        if self.published:
            # The latencies of the published runs were chosen while launches left queues evenly.
            kernels = replace(kernels, ends_ns=())
        nbytes = sum(work.output_bytes) if kind in ("forward", "recompute") else 0
        if kind in ("backward_inputs", "backward_weights") and not (kernels.duration_ns or kernels.launches):
            return None, nbytes
        gradients = 0 if self.published else 1 + j
        return self.writer.kernels(self.layout.computing[j], kernels, kind, gradients=gradients), nbytes

    def tell(self, thread: int, kind: str, i: int = 0, j: int = 0) -> None:
        """A thread does something that matters to memory alone: one of the kinds of tasks that run on no stream."""
        self.writer.tell(thread, self.writer.task(TracedTask(kind, i, j, self.layout.devices[j])))

    def loss(self, thread: int, i: int | None = None) -> None:
        """Issue the loss of the batch, or the share of a micro-batch, so that all shares are the whole."""
        whole, sizes = self.work.loss, self.work.microbatch_sizes
        length = whole.duration_ns
        if i is not None:
            ends = [share * length // sum(map(abs, sizes)) for share in accumulate(map(abs, sizes), initial=0)]
            length = ends[i + 1] - ends[i]
        if length or whole.launches:
            pattern = self.writer.kernels(self.layout.computing[-1], Kernels(length, whole.launches), "loss")
            self.writer.issue(thread, pattern)

    def update(self) -> None:
        """Issue the update of each partition."""
        for stream, work in zip(self.layout.computing, self.work.optimizer, strict=False):
            if work.host_ns:
                self.writer.update(CALLER, stream, work.host_ns)
            if work.duration_ns or work.launches:
                kernels = Kernels(work.duration_ns, work.launches)
                self.writer.issue(CALLER, self.writer.kernels(stream, kernels, "update"))
        self.tell(CALLER, "update")

    # --- transfers ----------------------------------------------------------------------------------------------------

    def transfer(self, thread: int, i: int, j: int, skip: int | None = None, *, back: bool = False) -> None:
        """Issue the copies of a micro-batch that comes to partition j, or of one skip; or of their gradients back."""
        source = j - 1 if skip is None else self.work.skips[skip].source
        start, end = (j, source) if back else (source, j)
        sender, receiver = self.layout.copying[start][i], self.layout.copying[end][i]
        sizes = self._sizes(self.work.microbatch_sizes[i], j, skip, back)
        nbytes = sum(sizes)
        kind = ("copy" if skip is None else "portal") + ("_grad" if back else "")
        aside = sender != self.layout.computing[start]
        made = TracedTask(kind, i, j, sender[0], aside, nbytes, -1 if skip is None else skip, source)
        task = self.writer.task(made)
        if not self.layout.staged:
            self.writer.issue(thread, self._copies(sender, receiver, sizes), task=task, nbytes=nbytes)
            return
        # Tensor by tensor, all at once; as a direct copy does by itself, the first begins when the receiver is
        # idle. Of no tensors, copies that take no time stand for all.
        self.writer.tell(thread, task, sender, receiver)
        self.writer.order(thread, sender, receiver)
        parts: list[tuple[int, ...]] = [(size,) for size in sizes] or [()]
        for number, part in enumerate(parts, 1):
            later = 2 * (len(parts) - number)
            down = self._copies(sender, NOWHERE, part, 1 + len(part) + later)
            self.writer.issue(thread, down, task=task, nbytes=sum(part))
            self.writer.order(thread, receiver, sender)
            if not later:
                self.writer.tell(thread, task)
            up = self._copies(NOWHERE, receiver, part, 1 + later if later else 0)
            self.writer.issue(thread, up, task=task, nbytes=sum(part))

    def meet(self, thread: int, end: MessageEnd) -> int:
        """Issue one end of a message, which begins after the work that its device has so far; the event of its end.

        As with NCCL and PyTorch's ``isend`` and ``irecv``, messages between two ranks have a stream on either side, and
        begin in order. Nothing, and 0, where no tensor moves.
        """
        back, other = end.way == "B", end.other.j
        own, theirs = self.between(end.j, other), self.between(other, end.j)
        sizes = self._sizes(self.work.microbatch_sizes[end.i], max(end.j, other), None, back)
        if not sizes or not self.layout.moves(end.j, other):
            return 0
        self.writer.order(thread, own, self.layout.computing[end.j])
        sender, receiver = (own, theirs) if end.sends else (theirs, own)
        key = max(end, end.other)
        pattern = self.writer.part(
            own, receiver if end.sends else NOWHERE, meeting=self._meetings.setdefault(key, len(self._meetings) + 1),
            ns=sum(self._machine.copy_ns(sender[0], receiver[0], nbytes) for nbytes in sizes), launches=len(sizes),
        )  # fmt: skip
        task = 0
        if end.sends:
            kind, source = "copy_grad" if back else "copy", max(end.j, other) - 1
            task = self.writer.task(TracedTask(kind, end.i, max(end.j, other), own[0], True, sum(sizes), source=source))
        self.writer.issue(thread, pattern, task=task, nbytes=sum(sizes))
        return self.writer.record(thread, own)

    def between(self, j: int, other: int) -> Stream:
        """The stream of partition j's rank for its messages with the rank of another partition."""
        pair = self.layout.ranks[j], self.layout.ranks[other]
        number = self._pairs.setdefault(pair, len(self._pairs))
        return self.layout.devices[j], FIRST_OF_PAIRS + number

    def _copies_of(self, sender: Stream, receiver: Stream, sizes: tuple[int, ...], joined: int = 0) -> int:
        """The pattern of copies of some sizes; ``joined``: the thread issues more at once, see ``trace_row.h``."""
        ns = sum(self._machine.copy_ns(sender[0], receiver[0], nbytes) for nbytes in sizes)
        return self.writer.copies(sender, receiver, ns=ns, launches=len(sizes), joined=joined)

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
