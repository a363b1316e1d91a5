"""What one batch sends between processes: mailboxes whose boxes may belong to another process.

    thread that runs actions ── put ──► queue ── Sender ──► process 2        a thread for each process that is sent to
                             ◄─ take ── boxes ◄─ Receiver ── process 0       and for each one that is received from

There is one channel in each direction between two processes. A sender sends in the order of ``put``, and waits for each
message beside the thread that runs actions. A receiver takes each message as soon as it comes. So no action waits for
anything but the values that it needs, and :func:`gpipe_bench.schedules.check` has proven that these come.

A process that fails sends the reason on all its channels, and a process that receives it does the same. One that is
gone closes its connections, and one that is silent is given up after the group's timeout: a failure, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

import torch

from gpipe_bench.distributed import channel, wire
from gpipe_bench.distributed.channel import Group
from gpipe_bench.distributed.data_parallel import Replicas
from gpipe_bench.distributed.staging import Staging
from gpipe_bench.engine.runtime.mailboxes import Key, Mailboxes, Stopped
from gpipe_bench.engine.worker import new_thread
from gpipe_bench.errors import PeerError
from gpipe_bench.schedules import Action

_VALUE, _LAST, _FAILURE = 0, 1, 2
_HEADER: Final = 6
"""Numbers of a header: kind of message, four for its box, length of the description."""
_WAYS: Final = ("F", "B", "begin", "end")
_AT_MOST_S: Final = 5.0
"""How long a process that fails takes to tell the others."""

Message = tuple[Key, bytes, Callable[[], Sequence[torch.Tensor]]]


class Exchange(Mailboxes):
    """The mailboxes of one process for one batch.

    Beside activations and gradients, which go to the process of a partition, there are boxes with the ways ``begin``
    and ``end``: what processes tell each other about the batch. For these ``j`` is the rank of the receiver, ``i`` that
    of the sender.

    Args:
        group: of the processes.
        rows: for each partition the rank of its process.
        skips: all skips, in an order that is the same in all processes.
        edges: (sender, receiver) of each channel.
        staging: where tensors are sent from and received into.
        replicas: told of each action that has ended, if there are any.

    Attributes:
        failure: why this process, or another one, has failed; None as long as none has.
    """

    def __init__(
        self,
        group: Group,
        rows: tuple[int, ...],
        skips: Iterable[Any],
        edges: Collection[tuple[int, int]],
        staging: Staging,
        *,
        replicas: Replicas | None = None,
    ) -> None:
        super().__init__()
        self.failure: str | None = None
        self._group, self._rows, self._rank, self._staging = group, rows, group.rank(), staging
        self._replicas = replicas
        self._skips: list[Any] = [None, *skips]
        self._queues: dict[int, SimpleQueue[Message | str | None]] = {}
        self._threads: list[threading.Thread] = []
        for source, target in sorted(edges):
            if source == self._rank:
                self._queues[target] = SimpleQueue()
                self._threads.append(new_thread(f"gpipe-to-{target}", partial(self._send_all, target)))
            elif target == self._rank:
                self._threads.append(new_thread(f"gpipe-from-{source}", partial(self._receive_all, source)))
        for thread in self._threads:
            thread.start()

    def put(self, key: Key, value: Any) -> None:
        """Fill a box, here or in another process."""
        target = key[2] if key[0] in ("begin", "end") else self._rows[key[2]]
        if target == self._rank:
            super().put(key, value)
        else:
            description, tensors = wire.pack(value)
            self._queues[target].put((key, description, self._staging.outgoing(tensors)))

    def done(self, action: Action) -> None:
        """Let gradients that are complete be averaged."""
        if self._replicas is not None:
            self._replicas.done(action)

    def fail(self, action: Action, place: int, error: BaseException) -> None:
        """Tell all processes that an action of this one has failed."""
        super().fail(action, place, error)
        self.give_up(f"rank {self._rank} failed at {action}: {type(error).__name__}: {error}")

    def give_up(self, reason: str) -> None:
        """Let nothing run any more, here and in all other processes."""
        with self._lock:
            first, self.failure = self.failure is None, self.failure or reason
        if first:
            for queue in self._queues.values():
                queue.put(reason)
        self.stop()

    def finish(self) -> None:
        """End the batch: everything is sent and received.

        Raises:
            PeerError: another process has failed.
        """
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
        self.check()

    def check(self) -> None:
        """Raise a PeerError if a process has failed."""
        if self.failure is not None:
            raise PeerError(f"rank {self._rank} must stop, since another one did: {self.failure}")

    def leave(self) -> None:
        """After a failure: give the reason some time to reach the other processes."""
        for thread in self._threads:
            thread.join(_AT_MOST_S)

    def tell(self, way: str, ranks: Iterable[int], value: Any) -> None:
        """Send a value about the batch to some other processes."""
        for rank in ranks:
            self.put((way, self._rank, rank, None), value)

    def hear(self, way: str, rank: int) -> Any:
        """Wait for what another process tells; raises a PeerError if one has failed."""
        try:
            return self.take((way, rank, self._rank, None), 0)
        except Stopped:
            self.check()
            raise

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in all of them; rank 0 collects."""
        others = [rank for rank in range(self._group.size()) if rank]
        if self._rank:
            self.tell("end", [0], value)
            found: list[Any] = self.hear("end", 0)
            return found
        values = [value, *(self.hear("end", rank) for rank in others)]
        self.tell("end", others, values)
        return values

    # --- threads -----------------------------------------------------------------------------------------------------

    def _send_all(self, target: int) -> None:
        known: dict[Any, bytes] = {}
        queue = self._queues[target]
        self._staging.own_stream(target)
        try:
            while not isinstance(message := queue.get(), str | None):
                key, description, ready = message
                kind = key[0], key[2], key[3]
                news = b"" if known.get(kind) == description else description
                known[kind] = description
                skip = self._skips.index(key[3])
                self._send(target, [_VALUE, _WAYS.index(key[0]), key[1], key[2], skip], news, ready())
            self._send(target, [_LAST if message is None else _FAILURE, 0, 0, 0, 0], (message or "").encode())
        except Exception as error:  # noqa: BLE001 - whatever it is ends this process's part
            self.give_up(self._lost(target, error))

    def _send(self, target: int, header: list[int], description: bytes, tensors: Sequence[torch.Tensor] = ()) -> None:
        begin = torch.tensor([*header, len(description)]).view(torch.uint8)
        pieces = [begin, channel.bytes_of(description), *map(wire.memory, tensors)]
        channel.send(self._group, pieces, target)

    def _receive_all(self, source: int) -> None:
        known: dict[Any, bytes] = {}
        self._staging.own_stream(self._group.size() + source)
        try:
            while True:
                header = torch.empty(_HEADER, dtype=torch.int64)
                channel.receive(self._group, [header.view(torch.uint8)], source)
                what, way, i, j, skip, length = header.tolist()
                data = torch.empty(length, dtype=torch.uint8)
                channel.receive(self._group, [data], source)
                news = data.numpy().tobytes()
                if what != _VALUE:
                    break
                kind = way, j, skip
                known[kind] = news or known[kind]
                parcel = wire.Parcel(known[kind], self._staging.empty)
                channel.receive(self._group, [*map(wire.memory, parcel.tensors)], source)
                super().put((_WAYS[way], i, j, self._skips[skip]), parcel.value(self._staging.incoming))
            if what == _FAILURE:
                self.give_up(news.decode())
        except Exception as error:  # noqa: BLE001 - whatever it is ends this process's part
            self.give_up(self._lost(source, error))

    def _lost(self, rank: int, error: Exception) -> str:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return f"rank {rank} is gone or silent, said rank {self._rank}: {first_line}"
