"""Allocators in a replay: what is reserved when, blocks that other streams use, flushes, and too little memory."""

from __future__ import annotations

import pytest

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.machine.replay import replay
from gpipe_bench.machine.trace import Record
from tests.emulator.bed.rows import NS_PER_MS, Bed, traced

MIB = 2**20
FREE = Bed()


def alloc(block, mib, device=0, stream=0, **options):
    return Record("alloc", "", device, stream, nbytes=mib * MIB, writes=(block,), **options)


def free(block, device=0, stream=0, **options):
    return Record("free", "", device, stream, writes=(block,), **options)


def use(block, stream, device=0):
    return Record("record_stream", "", device, stream, writes=(block,))


def kernel(milliseconds, stream=0, **options):
    return Record("kernel", "work", 0, stream, duration=milliseconds, launches=1, **options)


def peaks(*records, machine=FREE):
    """MiB at their peak on device 0: asked for, handed out, reserved."""
    found = replay(traced(*records), machine).memory[0]
    return found.peak_live // MIB, found.peak_allocated // MIB, found.peak_reserved // MIB


def test_a_freed_block_is_used_again():
    assert peaks(alloc(1, 30), free(1), alloc(2, 30), free(2)) == (30, 30, 30)


def test_but_not_by_another_stream():
    assert peaks(alloc(1, 30), free(1), alloc(2, 30, stream=3)) == (30, 30, 60)


def test_a_block_is_freed_on_the_stream_that_allocated_it():
    assert peaks(alloc(1, 30), free(1, stream=3), alloc(2, 30)) == (30, 30, 30)


def test_small_blocks_share_a_segment():
    assert peaks(alloc(1, 1), alloc(2, 1)) == (2, 2, 2)


def test_each_device_has_its_own_memory():
    found = replay(traced(alloc(1, 30), alloc(2, 50, device=1), free(1)), FREE).memory
    assert [(one.live // MIB, one.peak_reserved // MIB) for one in found] == [(0, 30), (50, 50)]


def test_memory_of_the_host_and_blocks_from_before_the_trace_do_not_count():
    assert peaks(Record("alloc", "", -1, 0, nbytes=MIB, writes=(8,)), free(7), free(3), use(2, 1), alloc(9, 30)) == (
        30,
        30,
        30,
    )


@pytest.mark.parametrize(("waits", "reserved"), [(False, 60), (True, 30)])
def test_a_block_that_another_stream_uses_is_free_when_that_has_come_so_far(waits, reserved):
    #   stream 3   5 ms               the second block is the first one again only if the host waits so long
    rows = [alloc(1, 30), kernel(5, 3), use(1, 3), free(1)]
    rows += [Record("sync_stream", "", 0, 3)] * waits
    assert peaks(*rows, alloc(2, 30)) == (30, 30, reserved)


def test_its_own_stream_does_not_count_as_another_one():
    assert peaks(alloc(1, 30), kernel(5), use(1, 0), free(1), alloc(2, 30)) == (30, 30, 30)


def test_a_full_device_gives_cached_memory_back_and_the_host_waits_until_it_is_idle():
    rows = [alloc(1, 30), free(1), kernel(5), alloc(2, 50), kernel(1)]
    found = replay(traced(*rows), Bed(capacity_bytes=64 * MIB))
    assert (found.memory[0].flushes, found.memory[0].peak_reserved // MIB) == (1, 50)
    assert [time // NS_PER_MS for time in found.host_ns] == [0, 0, 0, 0, 5]


def test_a_flush_frees_blocks_that_other_streams_use():
    rows = [alloc(1, 30), kernel(5, 3), use(1, 3), free(1), alloc(2, 50)]
    assert replay(traced(*rows), Bed(capacity_bytes=64 * MIB)).memory[0].peak_reserved == 50 * MIB


def test_a_device_that_is_too_small():
    rows = traced(alloc(1, 30), alloc(2, 50))
    found = replay(rows, Bed(capacity_bytes=64 * MIB))
    assert str(found.shortage) == str(OutOfMemory(0, 50 * MIB, 30 * MIB, 64 * MIB))
    assert found.memory[0].peak_reserved == 80 * MIB
    assert replay(rows, Bed(capacity_bytes=80 * MIB)).shortage is None


def test_a_full_device_that_the_program_was_told_of_is_no_shortage():
    rows = [alloc(1, 30), alloc(2, 50), Record("full", "", 0), free(1), free(2), alloc(3, 64), free(3)]
    found = replay(traced(*rows), Bed(capacity_bytes=64 * MIB))
    assert (found.shortage, found.memory[0].peak_reserved // MIB) == (None, 64)


def test_kernels_on_a_device_beyond_its_capacity_have_no_scratch_memory():
    rows = [alloc(1, 50), alloc(2, 30), free(1), alloc(3, 40, scratch=True), free(3)]
    assert peaks(*rows, machine=Bed(capacity_bytes=64 * MIB)) == (80, 80, 80)


def test_requests_are_made_in_virtual_time():
    #   thread 0   5 ms of launches, then a block        thread 1   a block, freed after 1 ms of launches
    rows = [
        kernel(0, 0)._replace(launches=5),
        alloc(1, 30),
        alloc(2, 30, thread=1),
        kernel(0, 1, thread=1),
        free(2, thread=1),
    ]
    assert peaks(*rows, machine=Bed(launch_ns=NS_PER_MS)) == (30, 30, 30)
    assert peaks(*rows, machine=Bed()) == (60, 60, 60)


def test_kernels_do_without_scratch_memory_where_there_is_none():
    rows = [alloc(1, 40), alloc(2, 50, scratch=True), free(2), alloc(3, 20), free(1)]
    again = [alloc(4, 50, scratch=True), free(4)]
    found = replay(traced(*rows, *again), Bed(capacity_bytes=64 * MIB)).memory[0]
    assert (found.peak_live // MIB, found.live // MIB) == (60, 20)
