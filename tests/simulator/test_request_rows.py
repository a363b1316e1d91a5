"""Rows of requests are cut into parts that have nothing to do with each other, and do what the requests do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.simulator.memory import request_rows
from gpipe_bench.simulator.memory.allocator import Allocator
from gpipe_bench.simulator.memory.pools import MIB, SHIFT, Pool
from gpipe_bench.simulator.memory.request_rows import Row, cut
from gpipe_bench.simulator.virtual_time.clock import Clock

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=100)
SIZES = [MIB + 512, 2 * MIB, 3 * MIB, 7 * MIB]
SMALL_SIZES = [512, 1024, 5 * 512, MIB // 4, MIB - 512, MIB]
SHORTEST = 4


def row_of(steps):
    """Requests: some blocks are given back at once, some later, some never."""
    requests, open_blocks = [], []
    for number, (size, way, which) in enumerate(steps):
        if way == 0:
            requests.append((number, -size << SHIFT))
            continue
        requests.append((number, size << SHIFT))
        if way > 1:
            open_blocks.append(number)
        if open_blocks and which > 3:
            requests.append((open_blocks.pop(which % len(open_blocks)), 0))
    return [*requests, *((block, 0) for block in open_blocks)]


def steps_of(sizes):
    return st.lists(st.tuples(st.sampled_from(sizes), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=25)


def columns(requests):
    return [block for block, _ in requests], [wanted for _, wanted in requests]


def row_in_parts(requests, shortest, *, small=False):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_rows, "cut", lambda requests: cut(requests, shortest))
        return Row(columns(requests), small=small)


def a_pool(segments=(), *, small=False):
    memory = Allocator(Clock(1, 1))
    pool = memory.pools(0)[not small]
    for size in segments:
        pool.add(*memory.segment(size))
    return memory, pool


def one_by_one(memory, pool, requests, blocks, asked):
    """Make requests by taking and giving; gives those that took more than they asked for, and by how much.

    Blocks in use come into ``blocks``, what was asked for into ``asked``.
    """
    larger, takes = [], 0
    for block, wanted in requests:
        if not wanted:
            pool.give(*blocks.pop(block))
            continue
        size = abs(wanted) >> SHIFT
        taken = pool.take(size)
        if taken is None:
            pool.add(*memory.segment(size))
            taken = pool.take(size)
        if taken[1] > size:
            larger.append((takes, taken[1] - size))
        takes += 1
        if wanted > 0:
            blocks[block], asked[block] = taken, size
        else:
            pool.give(*taken)
    return larger


def assert_done(done, larger, blocks, asked):
    assert list(done.larger) == larger
    assert done.blocks == {block: size << SHIFT | address for block, (address, size) in blocks.items()}
    assert done.extra == {block: size - asked[block] for block, (_, size) in blocks.items() if size > asked[block]}


@pytest.mark.parametrize("small", [False, True])
@EXAMPLES
@given(data=st.data())
def test_a_row_does_what_its_requests_do_one_by_one(small, data):
    sizes = SMALL_SIZES if small else SIZES
    requests = row_of(data.draw(steps_of(sizes)))
    if small and data.draw(st.booleans()):
        # Nothing stays in use.
        requests = [request for request in requests if request[1] <= 0 or (request[0], 0) in requests]
    lengths = st.just(MIB) if small else st.sampled_from([8 * size for size in sizes])
    segments = data.draw(st.lists(lengths, max_size=3))
    (memory, pool), (other, simple) = a_pool(segments, small=small), a_pool(segments, small=small)
    row = row_in_parts(requests, SHORTEST, small=small)
    for _ in range(6):
        # What stays in use makes each run find less.
        done, blocks, asked = row.run(memory, pool, None), {}, {}
        assert_done(done, one_by_one(other, simple, requests, blocks, asked), blocks, asked)
        assert done.state.free == pool.save().free == simple.save().free
    assert memory.reserved == other.reserved


@EXAMPLES
@given(steps=steps_of(SIZES), again=steps_of(SIZES), data=st.data())
def test_a_row_gives_back_what_another_took(steps, again, data):
    first = row_of([step for step in steps if step[1] == 1] or [(SIZES[0], 1, 0)])
    kept = [block for block, _ in first]
    second = [(1000 + block, wanted) for block, wanted in row_of(again)]
    for block in data.draw(st.permutations(kept)):
        second.insert(data.draw(st.integers(0, len(second))), (block, 0))
    (memory, pool), (other, simple) = a_pool(), a_pool()
    rows = Row(columns(first)), Row(columns(second))
    for _ in range(4):
        blocks, asked, done = {}, {}, rows[0].run(memory, pool, None)
        one_by_one(other, simple, first, blocks, asked)
        done = rows[1].run(memory, pool, done)
        assert_done(done, one_by_one(other, simple, second, blocks, asked), blocks, asked)
        assert done.state.free == simple.save().free


@EXAMPLES
@given(steps=steps_of(SIZES))
def test_parts_give_back_what_they_took(steps):
    requests = row_of(steps)
    parts = [list(zip(*part, strict=True)) for part in cut(columns(requests), SHORTEST)]
    assert [request for part in parts for request in part] == requests
    assert all(len(part) >= SHORTEST for part in parts[:-1])
    for part in parts:
        taken = {block for block, wanted in part if wanted > 0}
        assert {block for block, wanted in part if not wanted} <= taken


def test_a_row_that_gives_back_what_others_took_stays_whole():
    own = [(0, MIB), (0, 0)] * 3
    assert len([*cut(columns(own), 2)]) == 3
    assert len([*cut(columns([*own, (9, 0)]), 2)]) == 1


@pytest.mark.parametrize(("kept", "replays"), [(False, 1), (True, 3)])
def test_parts_that_are_alike_are_made_once(monkeypatch, kept, replays):
    """Where the first leaves everything as it was, the others find the same."""
    memory, pool = a_pool([64 * MIB])
    two, three = 2 * MIB << SHIFT, 3 * MIB << SHIFT
    steps = [[(10 * k, two), (10 * k + 1, three), (10 * k, 0), (10 * k + 1, 0)] for k in range(3)]
    if kept:
        steps = [[(10 * k + 2, two), *step] for k, step in enumerate(steps)]
    row = row_in_parts([request for step in steps for request in step], len(steps[0]))
    made, replay = [], Pool.replay

    def noted(pool, *arguments):
        made.append(pool)
        return replay(pool, *arguments)

    monkeypatch.setattr(Pool, "replay", noted)
    row.run(memory, pool, None)
    assert len(made) == replays
