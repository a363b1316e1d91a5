"""The caching allocator's documented rules, exactly."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.oracle.allocator import MIB, Allocator, OutOfMemory
from tests.simulator.oracle.clock import Clock

EXAMPLES = settings(max_examples=100)


def allocator(capacity=0):
    return Allocator(Clock(4, 1), capacity)


@pytest.mark.parametrize(
    ("asked", "given", "reserved"),
    [
        (0, 512, 2 * MIB),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # Not split: no more than 1 MiB is left.
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (31 * MIB, 32 * MIB, 32 * MIB),
    ],
)
def test_sizes(asked, given, reserved):
    memory = allocator()
    assert memory.alloc(asked, 0).size == given
    assert (memory.allocated, memory.reserved) == (given, reserved)


def test_segments_are_shared_by_what_fits():
    memory = allocator()
    for _ in range(4):
        memory.alloc(MIB // 2, 0)
    assert memory.reserved == 2 * MIB
    memory.alloc(1, 0)
    assert memory.reserved == 4 * MIB


def test_small_and_large_requests_do_not_share():
    memory = allocator()
    memory.alloc(5 * MIB, 0)
    memory.alloc(MIB, 0)
    assert memory.reserved == 22 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    memory = allocator()
    blocks = [memory.alloc(size * MIB, 0) for size in (50, 30, 40)]
    for block in blocks:
        memory.free(block)
    assert memory.alloc(29 * MIB + 1, 0).address == blocks[1].address
    assert memory.alloc(31 * MIB, 0).address == blocks[2].address
    assert memory.reserved == 120 * MIB


def test_free_neighbours_merge_again():
    memory = allocator()
    blocks = [memory.alloc(6 * MIB, 0) for _ in range(3)]
    assert memory.reserved == 20 * MIB
    for index in (0, 2, 1):
        memory.free(blocks[index])
    assert memory.alloc(18 * MIB, 0).address == blocks[0].address
    assert memory.reserved == 20 * MIB


def test_each_stream_has_its_own_blocks():
    memory = allocator()
    memory.free(memory.alloc(MIB, 0))
    memory.alloc(MIB, 1)
    assert memory.reserved == 4 * MIB


def test_a_block_that_another_stream_used_is_free_when_that_stream_has_come_so_far():
    clock = Clock(2, 1)
    memory = Allocator(clock)
    seen = []

    def host():
        clock.issue((1,), 100, engines=(), launches=1, host_ns=0)
        block = memory.alloc(20 * MIB, 0)
        memory.record_stream(block, 1)
        memory.free(block)
        assert memory.allocated == 0
        memory.free(memory.alloc(20 * MIB, 0))
        seen.append(memory.reserved)
        yield 101
        seen.append([memory.alloc(20 * MIB, 0).address for _ in range(2)])
        seen.append(memory.reserved)

    clock.resume(host())
    clock.run()
    assert seen == [40 * MIB, [0, 21 * MIB], 40 * MIB]


def test_use_on_its_own_stream_defers_nothing():
    memory = allocator()
    block = memory.alloc(MIB, 0)
    memory.record_stream(block, 0)
    memory.free(block)
    assert memory.alloc(MIB, 0).address == block.address


def test_a_full_device_gives_whole_segments_back_and_tries_again():
    memory = allocator(capacity=60 * MIB)
    memory.free(memory.alloc(30 * MIB, 0))
    half = memory.alloc(6 * MIB, 0)
    assert memory.reserved == 30 * MIB
    memory.free(memory.alloc(20 * MIB, 1))
    memory.alloc(28 * MIB, 1)
    # The segment of stream 1 went; that of stream 0 is partly in use.
    assert (memory.flushes, memory.reserved, half.holders) == (1, 58 * MIB, 1)


def test_a_device_that_is_full_after_all_says_what_it_lacks():
    memory = allocator(capacity=60 * MIB)
    memory.alloc(40 * MIB, 0)
    with pytest.raises(
        OutOfMemory, match="memory of device 0 must suffice, got 73400320 B needed of 62914560 B"
    ) as caught:
        memory.alloc(30 * MIB, 0)
    assert (caught.value.needed, caught.value.reserved) == (30 * MIB, 40 * MIB)


def test_a_flush_frees_deferred_blocks_and_their_events_pass_later():
    clock = Clock(2, 1)
    memory = Allocator(clock, 40 * MIB)

    def host():
        clock.issue((1,), 100, engines=(), launches=1, host_ns=0)
        block = memory.alloc(30 * MIB, 0)
        memory.record_stream(block, 1)
        memory.free(block)
        memory.free(memory.alloc(40 * MIB, 0))
        yield 200
        memory.alloc(40 * MIB, 0)

    clock.resume(host())
    clock.run()
    assert (memory.flushes, memory.reserved) == (1, 40 * MIB)


@EXAMPLES
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 40 * MIB), st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=60
    )
)
def test_blocks_never_overlap_and_what_is_free_becomes_whole(requests):
    memory = allocator()
    held = []
    for nbytes, stream, drop in requests:
        held.append(memory.alloc(nbytes, stream))
        if drop < 5:
            memory.free(held.pop(drop % len(held)))
        spans = sorted((block.address, block.address + block.size) for block in held)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        assert memory.allocated == sum(block.size for block in held)
    for block in held:
        memory.free(block)
    assert memory.allocated == 0
    memory._flush()
    assert memory.reserved == 0
