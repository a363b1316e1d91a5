"""What one batch sends between processes: mailboxes whose boxes may belong to another process.

    process 0   put ──────────── link ────────────► take    process 1
                            (in the order of put)

``put`` begins to send, and does not wait; what is copied from a device first is sent at the next ``take``. ``take``
receives what the other process has sent, in its order, until the box is filled. So no action waits for anything but
the values that it needs, and :func:`gpipe_bench.schedules.check` has proven that these come. There are no threads, so
an interrupt is noticed when what a process waits for has come.

A process that fails tells all others the reason and closes its connections, those to replicas too. One that notices
this does the same. One that is silent is given up after the group's timeout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from gpipe_bench.distributed import messages
from gpipe_bench.distributed.agreement import Begin
from gpipe_bench.distributed.connections import Connections
from gpipe_bench.distributed.data_parallel import Replicas
from gpipe_bench.distributed.failures import LostError
from gpipe_bench.distributed.messages import Description
from gpipe_bench.distributed.staging import Staging
from gpipe_bench.distributed.tied import summed
from gpipe_bench.engine.randomness import BatchRandomness
from gpipe_bench.engine.runtime.mailboxes import Key, Mailboxes, Stopped
from gpipe_bench.engine.tied import Copies
from gpipe_bench.errors import PeerError, text_of
from gpipe_bench.schedules import Action
from gpipe_bench.schedules.messages import holder

T = TypeVar("T")

_BETWEEN_PROCESSES: Final = ("begin", "end", "tied")
"""Ways of boxes that belong to processes and not to partitions."""


class Exchange(Mailboxes):
    """The mailboxes of one process for one batch.

    Beside activations and gradients, which go to the process of a partition, there are boxes with the ways ``begin``,
    ``end`` and ``tied``: what processes tell each other about the batch, and about tied weights. For these ``j`` is the
    rank of the receiver, ``i`` that of the sender.

    Args:
        connections: to the other processes.
        ranks: for each partition the rank of its process.
        chains: of each skip the partition that stashes it, then those that read it, in an order that is the same in all
            processes.
        device: of this process.

    Attributes:
        failure: why this process, or another one, has failed; None as long as none has.
    """

    def __init__(
        self,
        connections: Connections,
        ranks: tuple[int, ...],
        chains: Mapping[Any, tuple[int, ...]],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.failure: str | None = None
        self._seed = b""
        self._links, self._failures, self._replicas = connections.links, connections.failures, connections.replicas
        self._nccl, self._ranks, self._rank = connections.over_nccl, ranks, connections.links.rank
        self._staging = Staging(device, direct=self._nccl is not None)
        self._chains = chains
        self._skips: list[Any] = [None, *chains]
        self._values: dict[Key, Any] = {}
        self._leaving: deque[tuple[int, Description, Callable[[], Sequence[Tensor]]]] = deque()

    def put(self, key: Key, value: Any) -> None:
        """Fill a box, here or in another process."""
        way, i, j, skip = key
        target = j if way in _BETWEEN_PROCESSES else self._ranks[j]
        if target == self._rank:
            self._values[key] = value
            return
        description, tensors = messages.pack((way, i, j, self._skips.index(skip)), value)
        self._leaving.append((target, description, self._staging.outgoing(tensors)))
        # An action that is next on a device must not wait for the copy.
        if not self._staging.copies:
            self._send()

    def take(self, key: Key, position: int) -> Any:  # noqa: ARG002 - one thread: none that waits is stopped
        """Receive until a box is filled, and empty it; raises Stopped if a process has failed."""
        while key not in self._values:
            self._send()
            source = self._source(*key)
            with self._staging.stream(self._links.size + source):
                parcel = self._linked(source, partial(self._links[source].receive, self._staging.empty))
                way, i, j, skip = parcel.description.box
                self._values[way, i, j, self._skips[skip]] = parcel.value(self._staging.incoming)
        return self._values.pop(key)

    def done(self, action: Action) -> None:
        """Let gradients that are complete be averaged."""
        self.replicated(lambda replicas: replicas.done(action))

    def fail(self, action: Action, position: int, error: BaseException) -> None:
        """Tell all processes that an action of this one has failed."""
        super().fail(action, position, error)
        self.give_up(f"rank {self._failures.rank} failed at {action}: {text_of(error)}")

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()

    def give_up(self, reason: str) -> None:
        """Let nothing run any more, here and in all other processes."""
        self.stop()
        if self.failure is None:
            self.failure = reason
            try:
                self._failures.tell(reason)
            finally:
                # The others notice the end of a connection, and then find the reason.
                self._links.close()
                if self._replicas is not None:
                    self._replicas.close()
                if self._nccl is not None:
                    self._nccl.abort()

    def begin(self, begin: Begin) -> None:
        """Begin what the first process has told all others."""
        self._seed = begin.seed
        with self._checked():
            self._send()
            for peer in self._links:
                with self._staging.stream(self._links.size + peer):
                    self._linked(peer, partial(self._links[peer].begin, begin.kind, self._staging.empty))

    def enter(self, randomness: BatchRandomness, order: Sequence[Action]) -> Sequence[Action]:
        """Let the tasks of all processes draw from one seed; gives the actions of the own partitions."""
        randomness.share(self._seed)
        return [action for action in order if self._ranks[action.j] == self._rank]

    def tied_grads(self, copies: Copies) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Sum up the gradients of tied weights over all processes that have them; see :mod:`.tied`."""
        self.check()
        return summed(self, copies, self._ranks, self._rank)

    def leave(self, randomness: BatchRandomness, total: Callable[[], Tensor] | None = None) -> Any:
        """End the averages of a batch; all processes get the loss of the last one, and generators that stand alike."""
        self.check()
        self.replicated(Replicas.finish)
        loss: Any = total() if total is not None and self._rank == self._ranks[-1] else None
        # That of a parallel loss belongs to the mesh of the last stage.
        loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        told = self.gather((loss, randomness.found()))
        randomness.settle([found for _, found in told])
        return told[self._ranks[-1]][0]

    def finish(self) -> None:
        """End the batch: all that was sent is received.

        Raises:
            PeerError: another process has failed.
        """
        with self._checked():
            self._send()
            for peer in self._links:
                with self._staging.stream(peer):
                    self._linked(peer, self._links[peer].finish)

    def check(self) -> None:
        """Raise a PeerError if a process has failed."""
        if self.failure is not None:
            raise PeerError(f"rank {self._failures.rank} must stop, since another one did: {self.failure}")

    def tell(self, way: str, ranks: Iterable[int], value: Any) -> None:
        """Send a value about the batch to some other processes."""
        with self._checked():
            for rank in ranks:
                self.put((way, self._rank, rank, None), value)

    def hear(self, way: str, rank: int) -> Any:
        """Wait for what another process tells; raises a PeerError if one has failed."""
        with self._checked():
            return self.take((way, rank, self._rank, None), 0)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in all of them; rank 0 collects."""
        others = [*self._links]
        if self._rank:
            self.tell("end", [0], value)
            found: list[Any] = self.hear("end", 0)
            return found
        values = [value, *(self.hear("end", rank) for rank in others)]
        self.tell("end", others, values)
        return values

    def replicated(self, job: Callable[[Replicas], None]) -> None:
        """Do something with the replicas, if there are any; raises a PeerError if one of them has failed."""
        if self._replicas is None:
            return
        try:
            job(self._replicas)
        except LostError as error:
            # Replicas may wait for one another: only those beside the failed one notice it.
            self._replicas.close()
            self._lost(self._replicas.others, error)
            self.check()

    def _source(self, way: str, i: int, j: int, skip: Any) -> int:
        if way in _BETWEEN_PROCESSES:
            return i
        forward = way == "F"
        if skip is None:
            return self._ranks[j - 1 if forward else j + 1]
        chain = self._chains[skip]
        return self._ranks[holder(chain, j, self._ranks) if forward else chain[chain.index(j) + 1]]

    def _send(self) -> None:
        """Begin to send the values that were put, once they are copied from the device."""
        while self._leaving:
            target, description, ready = self._leaving.popleft()
            with self._staging.stream(target):
                self._linked(target, partial(self._links[target].send, description, ready()))

    def _linked(self, peer: int, job: Callable[[], T]) -> T:
        """What a job on a link gives; raises Stopped if the other process has failed."""
        try:
            return job()
        except LostError as error:
            self._lost([self._links.ranks[peer]], error)
            raise Stopped from None

    def _lost(self, ranks: Sequence[int], error: LostError) -> None:
        if self.failure is None:
            self.give_up(self._failures.cause(ranks, error))

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Raise a PeerError in the place of Stopped."""
        try:
            yield
        except Stopped:
            self.check()
            raise
