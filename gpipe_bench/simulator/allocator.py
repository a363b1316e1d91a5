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

from bisect import bisect_left, insort
from typing import Final

from gpipe_bench.simulator.clock import Clock
from gpipe_bench.simulator.streams import Event

__all__ = ["Allocator", "Block", "OutOfMemory"]

MIB: Final = 2**20
MIN_BLOCK: Final = 512
SMALL: Final = MIB
SMALL_SEGMENT: Final = 2 * MIB
LARGE_SEGMENT: Final = 20 * MIB
OWN_SEGMENT: Final = 10 * MIB
ROUND_LARGE: Final = 2 * MIB


class OutOfMemory(Exception):  # noqa: N818 - the name of torch.OutOfMemoryError, without its suffix
    """A device was asked for more than it has.

    Attributes:
        device: its number.
        needed: bytes of the segment that did not fit.
        reserved: bytes of the segments that the device holds.
        capacity: bytes of the device.
    """

    def __init__(self, device: int, needed: int, reserved: int, capacity: int) -> None:
        self.device, self.needed, self.reserved, self.capacity = device, needed, reserved, capacity
        super().__init__(
            f"memory of device {device} must suffice, got {reserved + needed} B needed of {capacity} B; use smaller "
            "micro-batches, more partitions or more checkpoints"
        )


class Block:
    """A piece of a segment.

    Attributes:
        size: bytes.
        requested: bytes that its holder asked for.
        address: unique; of one segment ascending.
        stream: whose pool it belongs to.
        small: which pool.
        allocated: whether somebody has it.
        users: other streams that used it.
        awaited: streams whose work must end before it is free.
        before: neighbour in the segment.
        after: neighbour in the segment.
    """

    __slots__ = ("address", "after", "allocated", "awaited", "before", "requested", "size", "small", "stream", "users")

    def __init__(self, size: int, address: int, stream: int, *, small: bool) -> None:
        self.size = size
        self.requested = 0
        self.address = address
        self.stream = stream
        self.small = small
        self.allocated = False
        self.users: list[int] = []
        self.awaited = 0
        self.before: Block | None = None
        self.after: Block | None = None

    def __lt__(self, other: Block) -> bool:
        return (self.size, self.address) < (other.size, other.address)


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

    def __init__(self, clock: Clock, capacity: int = 0, device: int = 0) -> None:
        self.live = self.allocated = self.reserved = self.flushes = 0
        self.peak_live = self.peak_allocated = self.peak_reserved = 0
        self._clock = clock
        self._device = device
        self._capacity = capacity
        self._free: dict[tuple[bool, int], list[Block]] = {}
        # Events that blocks wait for, in the order of frees, and those of them that have passed.
        self._deferred: dict[Event, Block] = {}
        self._passed: list[Event] = []
        self._next_address = 0

    def alloc(self, nbytes: int, stream: int) -> Block:
        """Hand out memory.

        Raises:
            OutOfMemory: the device is full, flushed and still full.
        """
        size = max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)
        if self._passed:
            self._collect(self._passed)
        block = self._cached(size, stream) or self._segment(size, stream)
        remaining = block.size - size
        if (remaining >= MIN_BLOCK) if block.small else (remaining > SMALL):
            self._split(block, size)
        block.allocated = True
        block.requested = nbytes
        self.live += nbytes
        self.allocated += block.size
        self.peak_live = max(self.peak_live, self.live)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that ``stream`` uses a block of another stream."""
        if stream != block.stream and stream not in block.users:
            block.users.append(stream)

    def free(self, block: Block) -> None:
        """Take a block back, at once or when the streams that used it have come that far."""
        self.live -= block.requested
        self.allocated -= block.size
        block.allocated = False
        for stream in block.users:
            # An event on each of them, even if it is idle: it is only seen to have passed at the next allocation.
            event = Event(self._passed)
            self._deferred[event] = block
            self._clock.record(stream, event)
            block.awaited += 1
        block.users = []
        if not block.awaited:
            self._release(block)

    def _collect(self, events: list[Event]) -> None:
        """Free deferred blocks whose last event is among ``events``, which becomes empty."""
        for event in events:
            block = self._deferred.pop(event, None)
            if block is None:
                # A flush was ahead of it.
                continue
            block.awaited -= 1
            if not block.awaited:
                self._release(block)
        events.clear()

    def _cached(self, size: int, stream: int) -> Block | None:
        free = self._free.get((size <= SMALL, stream))
        if not free:
            return None
        index = bisect_left(free, (size, -1), key=_place)
        return free.pop(index) if index < len(free) else None

    def _segment(self, size: int, stream: int) -> Block:
        small = size <= SMALL
        if small:
            length = SMALL_SEGMENT
        else:
            length = LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUND_LARGE) * ROUND_LARGE
        if self._capacity and self.reserved + length > self._capacity:
            self._flush()
            if self.reserved + length > self._capacity:
                raise OutOfMemory(self._device, length, self.reserved, self._capacity)
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._next_address += length
        return Block(length, self._next_address - length, stream, small=small)

    def _flush(self) -> None:
        """Give whole segments back, after deferred blocks; whoever runs the host lets it wait for the device."""
        self.flushes += 1
        self._collect(list(self._deferred))
        for free in self._free.values():
            self.reserved -= sum(block.size for block in free if block.before is None and block.after is None)
            free[:] = [block for block in free if block.before is not None or block.after is not None]

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.address + size, block.stream, small=block.small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        insort(self._free.setdefault((block.small, block.stream), []), rest)

    def _release(self, block: Block) -> None:
        free = self._free.setdefault((block.small, block.stream), [])
        before, after = block.before, block.after
        if before is not None and not before.allocated and not before.awaited:
            del free[bisect_left(free, before)]
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and not after.allocated and not after.awaited:
            del free[bisect_left(free, after)]
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        insort(free, block)


def _place(block: Block) -> tuple[int, int]:
    return block.size, block.address
