"""A row that gives back all that it takes gets no new segment where its demands are met."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.simulator.memory.pools import MIB, SHIFT, Pool
from gpipe_bench.simulator.memory.transients import Demands, keeps_nothing

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=300)
UNIT = 512
STEPS = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=15)
GAPS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 60)), min_size=1, max_size=6)


class Grown(Exception):  # noqa: N818 - a signal inside this file
    pass


def grow(size):
    raise Grown


def row_of(steps):
    """Requests of blocks of some units each; some are given back at once, the others after others, in the end all."""
    requests, alive = [], []
    for block, (units, which) in enumerate(steps):
        wanted = units * UNIT << SHIFT
        if not which:
            requests.append((block, -wanted))
            continue
        requests.append((block, wanted))
        alive.append(block)
        if which < 3:
            requests.append((alive.pop(which % len(alive)), 0))
    return [*requests, *((block, 0) for block in alive)]


def demands(requests):
    return Demands(tuple(map(list, zip(*requests, strict=True))))


def pool_of(gaps):
    """A pool with free intervals, each behind something in use."""
    pool, address = Pool(small=True), 0
    for used, units in gaps:
        address += used * UNIT
        pool.give(address, units * UNIT)
        address += units * UNIT
    return pool


@EXAMPLES
@given(steps=STEPS, gaps=GAPS)
def test_demands_that_are_met_need_no_segment(steps, gaps):
    requests, pool = row_of(steps), pool_of(gaps)
    before = pool.save().free
    if demands(requests).met(before):
        pool.replay(requests, {}, grow)
        assert pool.save().free == before


def test_a_single_block_needs_an_interval_of_its_size():
    least = demands([(0, 2 * UNIT << SHIFT), (0, 0)])
    assert not least.met(pool_of([(1, 1), (1, 1)]).save().free)
    assert least.met(pool_of([(1, 1), (1, 2)]).save().free)
    assert not least.met(())


def test_blocks_in_use_cost_themselves_and_a_piece_that_is_too_small():
    """One unit in use may leave 2 units on either side of it: 5 units are too few for 3 more, 6 are enough."""
    requests = [(0, UNIT << SHIFT), (1, 3 * UNIT << SHIFT), (0, 0), (1, 0)]
    assert not demands(requests).met(pool_of([(1, 5)]).save().free)
    assert demands(requests).met(pool_of([(1, 6)]).save().free)


def test_intervals_help_each_other():
    requests = [(k, MIB // 2 << SHIFT) for k in range(3)] + [(k, 0) for k in range(3)]
    room = [(1, 4 * MIB // 2 // UNIT)] * 2
    assert not demands(requests).met(pool_of(room[:1]).save().free)
    assert demands(requests).met(pool_of(room).save().free)


def test_a_row_keeps_nothing_if_it_gives_back_what_it_takes_and_no_more():
    one = 1 << SHIFT
    assert keeps_nothing(([0, 1, 0], [one, -one, 0]))
    assert not keeps_nothing(([0], [one]))
    assert not keeps_nothing(([0, 0, 1], [one, 0, 0]))
