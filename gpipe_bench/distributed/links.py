"""The messages between two processes: one channel in each direction.

    a value that is expected     the memory of its tensors
    any other one                the same in size and a byte more, its description, and the memory of its tensors

Batches with the same calls, settings and shapes are of one kind. A receiver expects what the last batch of this kind
has sent. So it can wait for the memory of the tensors before that is sent, and a step like an earlier one sends nothing
else. The memory for the first tensor is larger than needed: in a message that is not the expected one, and only there,
the byte behind the tensor is sent, and is 1.

To send is to begin: the process goes on, and waits for nothing but the values that it needs. It frees what it has sent
once it knows that it was received. Every description counts the messages that have come the other way, so a message
that is as expected says so without a byte more. The last of four messages about which nothing came back asks
for a receipt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ctypes import c_ubyte
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor

from gpipe_bench.distributed import messages
from gpipe_bench.distributed.failures import LostError
from gpipe_bench.distributed.messages import Description, Empty, Parcel
from gpipe_bench.distributed.network import Group, Work

_MESSAGE, _RECEIPT, _NOTHING = 0, 1, 3
"""Tags; nothing is ever sent with the last one."""
_MESSAGES: Final = 4
"""A receipt is asked for by the last of so many messages about which nothing came back."""
_KINDS: Final = 16
"""So many kinds of batches are remembered, the last ones."""


class _Expected:
    """The message that both ends of a channel expect next.

    Attributes:
        next: its description; None for what is not known.
    """

    def __init__(self) -> None:
        self.next: Description | None = None
        self._kinds: dict[str, dict[Any, Description]] = {}
        self.begin("")

    def begin(self, kind: str) -> None:
        """A batch of this kind is next."""
        self._followed = self._kinds.pop(kind, {})
        self._kinds[kind] = self._followed
        if len(self._kinds) > _KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._last: Any = None
        # What the receiver waits for already stays expected.
        self.next = self.next or self._followed.get(None)

    def is_now(self, description: Description) -> None:
        """Remember what has come."""
        self._followed[self._last] = description
        self._last = description.box
        self.next = self._followed.get(self._last)


class Link:
    """The messages to another process and from it. After a LostError it cannot be used any more.

    Args:
        group: of the processes.
        peer: rank of the other one.
        direct: whether tensors are sent from device to device. These are received once they are announced, by a
            byte in host memory; it takes the place of the byte behind the first tensor.
    """

    def __init__(self, group: Group, peer: int, *, direct: bool = False) -> None:
        self._group, self._peer, self._direct = group, peer, direct
        self._to, self._from = _Expected(), _Expected()
        # What is sent and may not have been received; receipts that come, each for the messages up to a number.
        self._sent: deque[list[tuple[Work, Tensor]]] = deque()
        self._receipts: deque[tuple[int, Work, Tensor]] = deque()
        self._count_to, self._count_from = 0, 0
        # At the beginning of the batch; and how many messages are known to be received, or will be by a receipt.
        self._start_to, self._start_from, self._covered = 0, 0, 0
        self._acknowledged: list[Work] = []
        self._parcel: Parcel | None = None
        self._coming: list[Work] = []
        # One byte of the first tensor says whether a description follows. It is read by its address.
        self._differs, self._first = c_ubyte(), torch.empty(0, device="cpu")

    def begin(self, kind: str, empty: Empty) -> None:
        """Expect what the last batch of this kind has sent; both processes must call this between the same messages."""
        self._to.begin(kind)
        self._from.begin(kind)
        self._start_to, self._start_from, self._covered = self._count_to, self._count_from, self._count_to
        self._expect(empty)

    def send(self, description: Description, tensors: Sequence[Tensor]) -> None:
        """Begin to send a value, see :func:`gpipe_bench.distributed.messages.pack`."""
        asks = self._count_to + 1 - self._covered >= _MESSAGES
        description = description._replace(received=self._count_from - self._start_from, asks=asks)
        pieces = [messages.memory(tensor) for tensor in tensors if tensor.numel()]
        expected = self._to.next
        if description == expected:
            pieces = [_bytes(b"\0"), *pieces] if self._direct or not pieces else pieces
        else:
            news = _bytes(messages.encoded(description))
            first, *others = (messages.sizes(expected) if expected and not self._direct else []) or [0]
            instead = [_bytes(b"\0" * first + b"\1"), *(_bytes(b"\0") for _ in others)]
            pieces = [*instead, torch.tensor([len(news)], device="cpu"), news, *pieces]
        self._to.is_now(description)
        # It is filled before the process waits for it.
        while self._receipts and self._receipts[0][2].item():
            self._received()
        self._count_to += 1
        if asks:
            self._covered = self._count_to
            mark = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self._receipts.append((self._count_to, self._begun(self._group.recv, mark, _RECEIPT), mark))
        self._sent.append([(self._begun(self._group.send, piece), piece) for piece in pieces])

    def receive(self, empty: Empty) -> Parcel:
        """Wait for the next value, in memory that ``empty`` gives."""
        self._expect(empty, anything=True)
        announced, *others = self._coming
        self._wait(announced)
        differs = self._parcel is None or bool(self._differs.value)
        if not (differs and self._direct):
            self._wait(*others)
        if differs:
            length = torch.empty(1, dtype=torch.int64, device="cpu")
            self._wait(self._begun(self._group.recv, length))
            news = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            self._wait(self._begun(self._group.recv, news))
            self._parcel = Parcel(messages.decoded(news.numpy().tobytes()), empty, larger=not self._direct)
            self._wait(*[self._begun(self._group.recv, memory) for memory in self._parcel.memory])
        self._count_from += 1
        assert self._parcel is not None  # noqa: S101 - what is not expected is described
        description = self._parcel.description
        received = self._start_to + description.received
        self._covered = max(self._covered, received)
        self._forget(received)
        if description.asks:
            # It may be behind a large message.
            self._acknowledged.append(self._begun(self._group.send, _bytes(b"\1"), _RECEIPT))
        parcel, self._parcel, self._coming = self._parcel, None, []
        self._from.is_now(description)
        # The other process may have ended after its last message.
        with suppress(LostError):
            self._expect(empty)
        return parcel

    def finish(self) -> None:
        """Wait until all is received."""
        while self._receipts:
            self._received()
        self._forget(self._count_to)
        self._wait(*self._acknowledged)
        self._acknowledged.clear()

    # --- parts of messages -------------------------------------------------------------------------------------------

    def _expect(self, empty: Empty, *, anything: bool = False) -> None:
        """Begin to receive the next message, if that is expected, or if ``anything`` is."""
        expected = self._from.next
        if self._coming or not (expected or anything):
            return
        self._parcel = None if expected is None else Parcel(expected, empty, larger=not self._direct)
        memory = self._parcel.memory if self._parcel else []
        if self._direct or not memory:
            memory = [torch.empty(1, dtype=torch.uint8, device="cpu"), *memory]
        self._first = memory[0]
        # The first one of the last element; read by its address, since operations on tensors take longer.
        self._differs = c_ubyte.from_address(self._first.data_ptr() + self._first.nbytes - self._first.itemsize)
        self._differs.value = 0
        self._coming = [self._begun(self._group.recv, each) for each in memory]

    def _received(self) -> None:
        number, work, _ = self._receipts.popleft()
        self._wait(work)
        self._forget(number)

    def _forget(self, number: int) -> None:
        """Free the tensors of all messages up to this number, which the receiver has."""
        while self._count_to - len(self._sent) < number:
            self._wait(*[work for work, _ in self._sent.popleft()])

    def _begun(self, begin: Callable[..., Work], tensor: Tensor, tag: int = _MESSAGE) -> Work:
        try:
            return begin([tensor], self._peer, tag)
        except RuntimeError as error:
            raise LostError(error) from None

    def _wait(self, *works: Work) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise LostError(error) from None


class Links:
    """Those of one process to all others.

    Args:
        group: of the processes.
        ranks: that they have in the whole job.
        direct: as for :class:`Link`.

    Attributes:
        ranks: see above.
        rank: of this process in the group.
        size: how many processes there are.
    """

    def __init__(self, group: Group, ranks: Sequence[int], *, direct: bool) -> None:
        self._group, self.ranks, self.rank, self.size = group, ranks, group.rank(), group.size()
        self._links = {peer: Link(group, peer, direct=direct) for peer in range(self.size) if peer != self.rank}

    def __getitem__(self, peer: int) -> Link:
        return self._links[peer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._links)

    def close(self) -> None:
        """Close all connections of this process, in both directions: a transfer that is given up does so."""
        for begin in (self._group.send, self._group.recv):
            for peer in self._links:
                with suppress(RuntimeError):
                    begin([torch.empty(1, device="cpu")], peer, _NOTHING).wait(timedelta(milliseconds=1))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
