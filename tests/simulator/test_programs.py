"""Passes run at once do to the allocator what their requests do one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.simulator.memory.allocator import MIB, Allocator
from gpipe_bench.simulator.memory.programs import Program
from gpipe_bench.simulator.virtual_time.clock import Clock
from gpipe_bench.simulator.workloads.workload import MemoryOp

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=100)
SIZES = st.sampled_from([1, 512, 700_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 11 * MIB, 30 * MIB])


def facts(memory):
    return memory.live, memory.allocated, memory.reserved, memory.peak_live, memory.peak_allocated, memory.peak_reserved


def one_by_one(memory, ops):
    blocks = {}
    for op in ops:
        if op.kind == "alloc":
            blocks[op.block] = memory.alloc(op.bytes, 0)
        elif op.kind == "scratch":
            memory.free(memory.alloc(op.bytes, 0))
        else:
            memory.free(blocks.pop(op.block))
    for block in blocks.values():
        memory.free(block)


@EXAMPLES
@given(requests=st.lists(st.tuples(SIZES, st.integers(0, 9), st.booleans()), min_size=1, max_size=30))
def test_programs_do_what_their_requests_do(requests):
    ops, alive = [], []
    for number, (nbytes, drop, scratch) in enumerate(requests):
        if scratch:
            ops.append(MemoryOp("scratch", 1000 + number, nbytes))
            continue
        ops.append(MemoryOp("alloc", number, nbytes))
        alive.append(number)
        if drop < 4:
            ops.append(MemoryOp("free", alive.pop(drop % len(alive))))
    program = Program(ops, kept=())
    at_once, slowly = Allocator(Clock(1, 1)), Allocator(Clock(1, 1))
    for _ in range(3):
        assert program.run(at_once, 0) is not None
        one_by_one(slowly, ops)
        assert facts(at_once) == facts(slowly)


def test_a_program_that_finds_no_room_does_nothing():
    memory = Allocator(Clock(1, 1), 30 * MIB)
    before = facts(memory)
    assert Program([MemoryOp("alloc", 0, 20 * MIB), MemoryOp("alloc", 1, 20 * MIB)], kept=()).run(memory, 0) is None
    assert facts(memory) == before
