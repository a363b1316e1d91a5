"""The caching allocator's documented rules, on requests that can be followed by hand."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.machine.replay import replay
from gpipe_bench.machine.trace import Record
from tests.emulator.bed.rows import Bed, traced

MIB = 2**20


def alloc(block, nbytes, stream=0, device=0):
    return Record("alloc", "", device, stream, nbytes=round(nbytes), writes=(block,))


def free(*blocks, device=0):
    return [Record("free", "", device, 0, writes=(block,)) for block in blocks]


def use(block, stream, device=0):
    return Record("record_stream", "", device, stream, writes=(block,))


def busy(milliseconds, stream, device=0):
    return Record("kernel", "work", device, stream, duration=milliseconds)


def until_idle(stream):
    return Record("sync_stream", "", 0, stream)


def memory(*rows, capacity=0, device=0):
    flat = [row for given in rows for row in (given if isinstance(given, list) else [given])]
    found = replay(traced(*flat), Bed(capacity_bytes=capacity))
    assert found.shortage is None
    return found.memory[device]


def reserved(*rows, **options):
    """The most bytes of segments."""
    return memory(*rows, **options).peak_reserved


@pytest.mark.parametrize(
    ("asked", "given", "segment"),
    [
        (0, 512, 2 * MIB),
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
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
def test_sizes(asked, given, segment):
    found = memory(alloc(1, asked))
    assert (found.peak_live, found.peak_allocated, found.peak_reserved) == (asked, given, segment)


def test_segments_are_shared_by_what_fits():
    rows = [alloc(block, MIB // 2) for block in range(4)]
    assert reserved(rows) == 2 * MIB
    assert reserved(rows, alloc(4, 1)) == 4 * MIB


def test_of_a_small_segment_the_last_512_bytes_are_of_use():
    assert reserved(alloc(1, MIB), alloc(2, MIB - 512), alloc(3, 512)) == 2 * MIB


def test_small_and_large_requests_do_not_share():
    assert reserved(alloc(1, 5 * MIB), alloc(2, MIB)) == 22 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    rows = [alloc(1, 50 * MIB), alloc(2, 30 * MIB), alloc(3, 40 * MIB), *free(1, 2, 3)]
    # Into the segments of 30, 40 and 50 MiB.
    assert reserved(rows, alloc(4, 29 * MIB), alloc(5, 31 * MIB), alloc(6, 45 * MIB)) == 120 * MIB


def test_of_equal_blocks_that_of_the_lowest_address_is_taken():
    #   segments of 20 MiB   1 2 3   4 5 6         7 goes to where 1 was, so that the second segment can become whole
    rows = [*(alloc(block, 6 * MIB) for block in range(1, 7)), *free(1, 4), alloc(7, 6 * MIB), *free(5, 6)]
    assert reserved(rows, alloc(8, 18 * MIB)) == 40 * MIB
    rows = [*(alloc(block, 6 * MIB) for block in range(1, 7)), *free(4, 1), alloc(7, 6 * MIB), *free(5, 6)]
    assert reserved(rows, alloc(8, 18 * MIB)) == 40 * MIB


@pytest.mark.parametrize("order", [*permutations((1, 2, 3))])
def test_free_neighbours_merge_in_any_order(order):
    rows = [alloc(block, 6 * MIB) for block in (1, 2, 3)]
    assert reserved(rows, free(*order), alloc(4, 18 * MIB)) == 20 * MIB


def test_neighbours_know_each_other_after_a_merge():
    # 2 merges with 3, into which 4 and 5 are cut; then all merge from the front.
    rows = [*(alloc(block, 4 * MIB) for block in (1, 2, 3, 6)), *free(3, 2)]
    rows += [alloc(4, 3 * MIB), alloc(5, 3 * MIB), *free(1, 5, 4, 6)]
    assert reserved(rows, alloc(7, 18 * MIB)) == 20 * MIB


@settings(max_examples=50)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 40 * MIB), st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=60
    )
)
def test_what_is_free_becomes_whole_and_goes_back(requests):
    rows, held = [], []
    for block, (nbytes, stream, drop) in enumerate(requests, 1):
        rows.append(alloc(block, nbytes, stream))
        held.append(block)
        if drop < 5:
            rows += free(held.pop(drop % len(held)))
    whole = memory(rows, free(*held), alloc(1000, 4096 * MIB), capacity=4096 * MIB)
    assert (whole.flushes, whole.reserved, whole.allocated) == (1, 4096 * MIB, 4096 * MIB)


def test_each_stream_has_its_own_blocks():
    assert reserved(alloc(1, MIB), free(1), alloc(2, MIB, stream=1)) == 4 * MIB


@pytest.mark.parametrize(("until", "expected"), [((), 60), ((1,), 60), ((1, 2), 30)])
def test_a_block_is_free_when_all_streams_that_used_it_have_come_so_far(until, expected):
    rows = [alloc(1, 30 * MIB), busy(3, 1), busy(5, 2), use(1, 1), use(1, 2), *free(1), *map(until_idle, until)]
    # The compute engine is one for all streams: stream 2 is done after 8 ms, stream 1 after 3.
    assert reserved(rows, alloc(2, 30 * MIB)) == expected * MIB


def test_use_on_its_own_stream_or_on_an_idle_one_defers_nothing():
    assert reserved(alloc(1, 30 * MIB), busy(5, 0), use(1, 0), use(1, 3), free(1), alloc(2, 30 * MIB)) == 30 * MIB


def test_a_block_that_waits_is_in_use_no_longer():
    found = memory(alloc(1, 30 * MIB), busy(5, 1), use(1, 1), free(1), alloc(2, 20 * MIB))
    assert (found.peak_live, found.peak_allocated, found.peak_reserved) == (30 * MIB, 30 * MIB, 50 * MIB)


def test_a_full_device_gives_whole_segments_back_and_tries_again():
    # The segment of stream 1 goes; that of stream 0 is partly in use, that of 10 MiB is not large enough.
    rows = [alloc(1, 30 * MIB), *free(1), alloc(2, 6 * MIB), alloc(3, 20 * MIB, 1), *free(3)]
    found = memory(rows, alloc(4, 28 * MIB, 1), capacity=60 * MIB)
    assert (found.flushes, found.peak_reserved, found.reserved) == (1, 58 * MIB, 58 * MIB)


def test_a_segment_goes_back_only_if_all_of_it_is_free():
    # Of the segment of 20 MiB the first, then the last 12 MiB are free.
    for gone in (1, 2):
        rows = [alloc(1, 8 * MIB), alloc(2, 8 * MIB), *free(gone), alloc(3, 20 * MIB, 1), *free(3)]
        found = memory(rows, alloc(4, 22 * MIB, 1), capacity=42 * MIB)
        assert (found.flushes, found.reserved) == (1, 42 * MIB)


def test_a_device_may_be_full_to_the_last_byte():
    found = memory(alloc(1, 20 * MIB), free(1), alloc(2, 40 * MIB), capacity=60 * MIB)
    assert (found.flushes, found.reserved) == (0, 60 * MIB)


def test_a_flush_is_of_one_device_alone():
    # Of device 1 one block waits and one is cached; then device 0 is flushed; device 1 still has the cached one alone.
    rows = [alloc(1, 30 * MIB, 0, 1), busy(9, 1, 1), use(1, 1, 1), *free(1, device=1), alloc(2, 20 * MIB, 0, 1)]
    rows += [*free(2, device=1), alloc(3, 60 * MIB), *free(3), alloc(4, 80 * MIB)]
    rows += [alloc(5, 20 * MIB, 0, 1), alloc(6, 30 * MIB, 0, 1)]
    found = [memory(rows, capacity=90 * MIB, device=device) for device in (0, 1)]
    assert [(one.flushes, one.reserved) for one in found] == [(1, 80 * MIB), (0, (30 + 20 + 30) * MIB)]


def test_events_of_a_block_that_a_flush_has_freed_pass_later():
    rows = [alloc(1, 30 * MIB), busy(5, 1), use(1, 1), *free(1), alloc(2, 40 * MIB), *free(2), until_idle(1)]
    found = memory(rows, alloc(3, 40 * MIB), capacity=40 * MIB)
    assert (found.flushes, found.reserved) == (1, 40 * MIB)
