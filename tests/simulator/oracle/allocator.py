"""The CUDA caching allocator, by its documented rules (c10/cuda/CUDACachingAllocator.cpp, default settings).

size     rounded up to 512 B
pools    up to 1 MiB: segments of 2 MiB; below 10 MiB: segments of 20 MiB; from there on its own size, rounded up to
         2 MiB. Each stream has its own free blocks
choice   the smallest free block that is large enough, then the lowest address
split    when at least 512 B (small pool) or more than 1 MiB (large pool) would be left over
free     merges with free neighbours of its segment; a block that other streams used is free only when what was
         queued on them has run, which the next allocation finds out
full     cached blocks that are whole segments go back to the device, then it tries again
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from gpipe_bench.errors import OutOfMemory
from tests.simulator.oracle.pools import MIB, SMALL, Pool, rounded, segment_length
from tests.simulator.oracle.streams import Event

__all__ = ["MIB", "Allocator", "Block", "OutOfMemory", "Watch", "drop_all"]


class Watch(Protocol):
    """Whoever knows what has run."""

    def record(self, number: int, event: Event) -> None:
        """Let ``event`` pass when everything issued to a stream so far has run."""

    def idle(self, number: int) -> bool:
        """Whether everything issued to a stream so far has run."""


class Block:
    """A piece of a segment, and how many hold it.

    Attributes:
        owner: the allocator that it came from.
        address: unique; of one segment ascending.
        size: bytes.
        requested: bytes that its holder asked for.
        stream: whose pool it belongs to.
        holders: who has it; with the last one it is free.
        users: other streams that used it.
        awaited: streams whose work must end before it is free.
    """

    __slots__ = ("address", "awaited", "holders", "owner", "requested", "size", "stream", "users")

    def __init__(self, owner: Allocator, address: int, size: int, requested: int, stream: int) -> None:
        self.owner = owner
        self.address = address
        self.size = size
        self.requested = requested
        self.stream = stream
        self.holders = 1
        self.users: tuple[int, ...] = ()
        self.awaited = 0

    def hold(self) -> Block:
        """One more holds it."""
        self.holders += 1
        return self

    def drop(self) -> None:
        """One holds it no more; the last one frees it."""
        self.holders -= 1
        if not self.holders:
            self.owner.free(self)


def drop_all(blocks: Iterable[Block]) -> None:
    """Every one of them is held by one less."""
    for block in blocks:
        block.drop()


class _Pools(dict[int, tuple[Pool, Pool]]):
    """By stream the small pool and the large one, made when they are first asked for."""

    def __missing__(self, stream: int) -> tuple[Pool, Pool]:
        self[stream] = made = Pool(small=True), Pool(small=False)
        return made


class Allocator:
    """The memory of one device.

    Args:
        clock: says what has run.
        capacity: bytes; 0 for no limit.
        device: its number, for error messages.

    Attributes:
        live: bytes asked for and not given back.
        allocated: bytes handed out for them.
        reserved: bytes of segments.
        peak_live: the most so far.
        peak_allocated: the most so far.
        peak_reserved: the most so far.
        flushes: how often cached segments were given back for want of memory.
    """

    def __init__(self, clock: Watch, capacity: int = 0, device: int = 0) -> None:
        self.live = self.allocated = self.reserved = self.flushes = 0
        self.peak_live = self.peak_allocated = self.peak_reserved = 0
        self._clock = clock
        self._device = device
        self._capacity = capacity
        self._pools = _Pools()
        # Events that blocks wait for, in the order of frees, and those of them that have passed.
        self._deferred: dict[Event, Block] = {}
        self._passed: list[Event] = []
        self._next_address = 0

    def alloc(self, nbytes: int, stream: int) -> Block:
        """Hand out memory.

        Raises:
            OutOfMemory: the device is full, flushed and still full.
        """
        size = rounded(nbytes)
        if self._passed:
            self._collect(self._passed)
        pool = self._pools[stream][size > SMALL]
        found = pool.take(size)
        if found is None:
            pool.add(*self.segment(size))
            found = pool.take(size)
            assert found is not None
        address, size = found
        self.live = live = self.live + nbytes
        self.allocated = allocated = self.allocated + size
        if live > self.peak_live or allocated > self.peak_allocated:
            self.peak_live, self.peak_allocated = max(self.peak_live, live), max(self.peak_allocated, allocated)
        return Block(self, address, size, nbytes, stream)

    def count(self, live: int, allocated: int, live_peak: int, allocated_peak: int) -> None:
        """Note that bytes in use changed by ``live`` and ``allocated``, and by how much they grew on the way."""
        if self.live + live_peak > self.peak_live or self.allocated + allocated_peak > self.peak_allocated:
            self.peak_live = max(self.peak_live, self.live + live_peak)
            self.peak_allocated = max(self.peak_allocated, self.allocated + allocated_peak)
        self.live += live
        self.allocated += allocated

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that ``stream`` uses a block of another stream."""
        if stream != block.stream and stream not in block.users:
            block.users += (stream,)

    def free(self, block: Block) -> None:
        """Take a block back, at once or when the streams that used it have come that far."""
        self.live -= block.requested
        self.allocated -= block.size
        self.retire(block)

    def retire(self, block: Block) -> None:
        """Take back a block that counts as in use no more."""
        if not block.users:
            # What is given out of the small pool is never larger than what is asked of it; a large block always is.
            self._pools[block.stream][block.size > SMALL].give(block.address, block.size)
            return
        for stream in block.users:
            # An event on each of them, even if it is idle: it is only seen to have passed at the next allocation.
            event = Event(self._passed)
            self._deferred[event] = block
            self._clock.record(stream, event)
            block.awaited += 1
        block.users = ()

    def _collect(self, events: list[Event]) -> None:
        for event in events:
            block = self._deferred.pop(event, None)
            if block is None:
                # A flush was ahead of it.
                continue
            block.awaited -= 1
            if not block.awaited:
                self._release(block)
        events.clear()

    def give(self, address: int, size: int, stream: int) -> None:
        """Make memory free that was handed out and counts as in use no more."""
        self._pools[stream][size > SMALL].give(address, size)

    def _release(self, block: Block) -> None:
        self.give(block.address, block.size, block.stream)

    def fits(self, size: int) -> bool:
        """Whether a segment for ``size`` bytes needs no flush."""
        return not self._capacity or self.reserved + segment_length(size) <= self._capacity

    def segment(self, size: int) -> tuple[int, int]:
        """Address and length of a new segment for a block of ``size`` bytes.

        Raises:
            OutOfMemory: the device is full, flushed and still full.
        """
        length = segment_length(size)
        if not self.fits(size):
            self._flush()
            if not self.fits(size):
                raise OutOfMemory(self._device, length, self.reserved, self._capacity)
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        address = self._next_address
        # A gap: blocks of two segments are never neighbours.
        self._next_address += length + MIB
        return address, length

    def _flush(self) -> None:
        """Give whole segments back, after deferred blocks; whoever runs the host lets it wait for the device."""
        self.flushes += 1
        self._collect(list(self._deferred))
        self.reserved -= sum(pool.shrink() for pools in self._pools.values() for pool in pools)
