"""Which partition owns how many bytes of live storage, and the most it ever owned.

A storage is entered once, however many tensors look at it, and leaves when it is freed: a weak reference to it says
so. Such a call may come in any thread and in the middle of anything, garbage collection included. So it only puts the
reference on a queue; the books are settled before the next entry. Nothing is lost, since only an entry can make a peak.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A live storage, its size when last seen, and its owner."""

    __slots__ = ("in_transit", "key", "nbytes", "owner")

    def __init__(self, storage: torch.UntypedStorage, freed: Callable[[_Entry], None]) -> None:
        super().__init__(storage, freed)  # type: ignore[call-arg]  # typeshed hides the callback from subclasses
        self.key = id(storage)
        self.nbytes = 0
        self.owner = -1
        self.in_transit = False


class Ledger:
    """Live bytes and peaks of ``n`` owners; any thread may call it.

    Args:
        n: owners, numbered from 0.
    """

    def __init__(self, n: int) -> None:
        self._live = [0] * n
        self._peak = [0] * n
        self._peak_total = 0
        self._entries: dict[int, _Entry] = {}
        self._freed: deque[_Entry] = deque()
        # Re-entrant: a garbage collection under the lock may run code that runs tensor operations.
        self._lock = threading.RLock()

    @property
    def live_bytes(self) -> list[int]:
        """Bytes alive now, by owner."""
        with self._lock:
            self._settle()
            return list(self._live)

    @property
    def peak_bytes(self) -> list[int]:
        """The most bytes alive at once, by owner; the peaks of two owners need not coincide."""
        with self._lock:
            return list(self._peak)

    @property
    def peak_total_bytes(self) -> int:
        """The most bytes alive at once, of all owners together."""
        with self._lock:
            return self._peak_total

    def enter(self, tensors: Iterable[Tensor], owner: int, *, in_transit: bool = False) -> None:
        """Count the storages of ``tensors`` to ``owner``, unless they are counted already.

        A storage that was resized since it was last seen gets its new size. One in transit moves to the next owner
        that enters it for good.

        Args:
            tensors: those that share a storage count once; those without one (sparse, opaque) do not count.
            owner: who pays for what is new.
            in_transit: whether what is new belongs to ``owner`` only until another one enters it.
        """
        with self._lock:
            self._settle()
            for tensor in tensors:
                storage = _storage(tensor)
                if storage is not None:
                    self._enter(storage, owner, in_transit)

    def refresh(self, tensors: Iterable[Tensor]) -> None:
        """Note the present sizes of those storages of ``tensors`` that are counted."""
        with self._lock:
            self._settle()
            for tensor in tensors:
                storage = _storage(tensor)
                entry = None if storage is None else self._entry(storage)
                if storage is not None and entry is not None:
                    self._resize(entry, storage.nbytes())

    def owner(self, tensors: Iterable[Tensor]) -> int | None:
        """Who owns the first of ``tensors`` that is counted; None when none is."""
        with self._lock:
            self._settle()
            for tensor in tensors:
                storage = _storage(tensor)
                entry = None if storage is None else self._entry(storage)
                if entry is not None:
                    return entry.owner
        return None

    def _enter(self, storage: torch.UntypedStorage, owner: int, in_transit: bool) -> None:
        entry = self._entry(storage)
        if entry is None:
            entry = self._entries[id(storage)] = _Entry(storage, self._freed.append)
            entry.owner, entry.in_transit = owner, in_transit
        elif entry.in_transit and not in_transit and entry.owner != owner:
            nbytes = entry.nbytes
            self._resize(entry, 0)
            entry.owner, entry.in_transit = owner, False
            self._resize(entry, nbytes)
        self._resize(entry, storage.nbytes())

    def _entry(self, storage: torch.UntypedStorage) -> _Entry | None:
        entry = self._entries.get(id(storage))
        return entry if entry is not None and entry() is storage else None

    def _resize(self, entry: _Entry, nbytes: int) -> None:
        self._live[entry.owner] += nbytes - entry.nbytes
        entry.nbytes = nbytes
        self._peak[entry.owner] = max(self._peak[entry.owner], self._live[entry.owner])
        self._peak_total = max(self._peak_total, sum(self._live))

    def _settle(self) -> None:
        while self._freed:
            entry = self._freed.popleft()
            self._resize(entry, 0)
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and opaque tensors have none; PyTorch raises either
        return None
