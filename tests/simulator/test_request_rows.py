"""Rows of requests are cut into parts that have nothing to do with each other, and do what the requests do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.simulator import request_rows
from gpipe_bench.simulator.allocator import Allocator
from gpipe_bench.simulator.clock import Clock
from gpipe_bench.simulator.pools import MIB, SHIFT, Pool
from gpipe_bench.simulator.request_rows import Row, cut

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=100)
SIZES = st.sampled_from([MIB + 512, 2 * MIB, 3 * MIB, 7 * MIB])
STEPS = st.lists(st.tuples(SIZES, st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=25)
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


def row_in_parts(requests, shortest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_rows, "cut", lambda requests: cut(requests, shortest))
        return Row(requests)


def large_pool(segments=()):
    memory = Allocator(Clock(1, 1))
    pool = memory.pools(0)[1]
    for size in segments:
        pool.add(*memory.segment(size))
    return memory, pool


@EXAMPLES
@given(steps=STEPS, segments=st.lists(SIZES.map(lambda size: 8 * size), max_size=3))
def test_a_row_does_what_its_requests_do_one_by_one(steps, segments):
    requests = row_of(steps)
    (memory, pool), (other, simple) = large_pool(segments), large_pool(segments)
    row = row_in_parts(requests, SHORTEST)
    for _ in range(6):
        # What stays in use makes each run find less.
        done, blocks = row.run(memory, pool, None), {}
        changes, _ = simple.replay(requests, blocks, other.segment)
        assert done.blocks == blocks
        assert done.changes == tuple(changes)
        assert done.state.free == pool.save().free == simple.save().free
    assert memory.reserved == other.reserved


@EXAMPLES
@given(steps=STEPS)
def test_parts_give_back_what_they_took(steps):
    requests = row_of(steps)
    parts = cut(requests, SHORTEST)
    assert [request for part in parts for request in part] == requests
    assert all(len(part) >= SHORTEST for part in parts[:-1])
    for part in parts:
        taken = {block for block, wanted in part if wanted > 0}
        assert {block for block, wanted in part if not wanted} <= taken


def test_a_row_that_gives_back_what_others_took_stays_whole():
    assert len(cut([(0, MIB), (0, 0)] * 3, 2)) == 3
    assert len(cut([*[(0, MIB), (0, 0)] * 3, (9, 0)], 2)) == 1


@pytest.mark.parametrize(("kept", "replays"), [(False, 1), (True, 3)])
def test_parts_that_are_alike_are_made_once(monkeypatch, kept, replays):
    """Where the first leaves everything as it was, the others find the same."""
    memory, pool = large_pool([64 * MIB])
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
