"""What a row of requests did in one place is what it does in another, wherever a footprint says so."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.simulator.memory.footprints import Footprint, Footprints
from gpipe_bench.simulator.memory.pools import SHIFT, Pool, Shrinking

UNIT = 512
EXAMPLES = settings(deadline=None, derandomize=True, max_examples=300)
SIZES = st.integers(1, 9)


def pool_of(gaps):
    """A pool with free intervals: pairs of (bytes in use before it, bytes free), in units."""
    pool, address = Pool(small=True), UNIT
    for used, free in gaps:
        address += used * UNIT
        pool.give(address, free * UNIT)
        address += free * UNIT
    return pool


def requests_of(steps):
    """Takes of a size in units, each given back when its lifetime is over."""
    requests, alive = [], []
    for block, (size, lifetime) in enumerate(steps):
        requests.append((block, size * UNIT << SHIFT))
        alive.append([block, lifetime])
        for entry in [one for one in alive if one[1] == 0]:
            requests.append((entry[0], 0))
            alive.remove(entry)
        for entry in alive:
            entry[1] -= 1
    return requests


class Grown(Exception):  # noqa: N818 - a signal inside this file
    pass


def grow(size):
    raise Grown


def replayed(pool, requests, end=None):
    """Make the requests; gives state and blocks, and their footprint, in which what ends at ``end`` may be smaller."""
    before, blocks = pool.save(), {}
    shrinking = None if end is None else Shrinking(pool, end)
    chosen, larger = pool.replay(requests, blocks, grow, shrinking)
    return (
        pool.save().free,
        blocks,
        larger,
        Footprint(before, pool.save(), blocks, choices(requests, chosen), shrinking),
    )


def choices(requests, chosen):
    return [abs(wanted) >> SHIFT for _, wanted in requests if wanted], chosen


GAPS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30)), min_size=1, max_size=6)
STEPS = st.lists(st.tuples(SIZES, st.integers(0, 4)), min_size=1, max_size=12)


@EXAMPLES
@given(gaps=GAPS, shifts=st.lists(st.integers(0, 5), min_size=6, max_size=6), more=GAPS, steps=STEPS, data=st.data())
def test_a_footprint_fits_only_where_the_same_happens(gaps, shifts, more, steps, data):
    requests, pool = requests_of(steps), pool_of(gaps)
    # One of the intervals may be the one that is found smaller each time.
    ends = sorted(pool.save().places()[1])
    end = data.draw(st.sampled_from([None, *ends]))
    lacking = data.draw(st.integers(0, 6))
    try:
        *_, larger, footprint = replayed(pool, requests, end)
    except Grown:
        return
    elsewhere = [
        (used + shift, max(free - lacking * (end == ends[number]), 1))
        for number, ((used, free), shift) in enumerate(zip(gaps, shifts, strict=False))
    ]
    other = pool_of([*elsewhere, *more])
    again = footprint.again(other.save())
    if again is not None:
        free, blocks, same_larger, _ = replayed(other, requests)
        assert (again[0].free, again[1]) == (free, blocks)
        assert same_larger == larger


def test_a_footprint_fits_at_other_addresses():
    requests = requests_of([(2, 0), (3, 9), (2, 9)])
    *_, footprint = replayed(pool_of([(1, 4), (1, 9)]), requests)
    other = pool_of([(5, 4), (2, 12), (3, 9)])
    state, blocks = footprint.again(other.save())
    assert (state.free, blocks) == replayed(other, requests)[:2]


@pytest.mark.parametrize(
    "gaps",
    [
        [(1, 4), (1, 8), (1, 9)],  # 8 would have suited better than 9
        [(1, 4), (1, 10)],  # no 9
        [(1, 9), (1, 4)],  # the other way round
    ],
)
def test_a_footprint_does_not_fit_where_something_else_might_happen(gaps):
    *_, footprint = replayed(pool_of([(1, 4), (1, 9)]), requests_of([(3, 9), (5, 9)]))
    assert footprint.again(pool_of(gaps).save()) is None


@pytest.mark.parametrize(("rest", "fits"), [(20, True), (12, True), (9, False)])
def test_an_interval_may_shrink_as_far_as_no_choice_changes(rest, fits):
    # Blocks of 5 and 3 are cut from the large interval; what is left of it must stay larger than the interval of 4,
    # which the block of 2 is cut from.
    requests = requests_of([(5, 9), (3, 9), (2, 9)])
    pool = pool_of([(1, 4), (1, 20)])
    end = max(pool.save().places()[1])
    *_, footprint = replayed(pool, requests, end)
    other = pool_of([(1, 4), (1, rest)])
    again = footprint.again(other.save())
    assert (again is not None) is fits
    if again is not None:
        assert (again[0].free, again[1]) == replayed(other, requests)[:2]


def test_the_interval_that_shrinks_is_found():
    footprints, requests = Footprints(), requests_of([(3, 0), (5, 0)])
    fitted = []
    for kept in range(10):
        pool = pool_of([(1, 4), (1 + kept, 30 - kept)])
        before, blocks = pool.save(), {}
        fitted.append(footprints.again(before) is not None)
        if not fitted[-1]:
            shrinking = footprints.shrinking(pool)
            chosen, _ = pool.replay(requests, blocks, grow, shrinking)
            footprint = Footprint(before, pool.save(), blocks, choices(requests, chosen), shrinking)
            footprints.add(footprint, ())
    # Not the first time, not when it differs first, and not when it is watched.
    assert fitted == [False] * 3 + [True] * 7
