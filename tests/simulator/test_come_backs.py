"""What comes back between passes, whoever is first; and free memory as states."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.simulator.memory.allocator import Allocator
from gpipe_bench.simulator.memory.pools import SHIFT, Pool
from gpipe_bench.simulator.memory_states.come_backs import Moments, come_backs
from gpipe_bench.simulator.memory_states.free_states import FreePool

TURNS = Moments(np.array([10, 20, 20, 30]), np.array([0, 10, 30, 50]))


def backs(*ended, least=None):
    times, entries = zip(*ended, strict=True)
    return come_backs(Moments(np.array(times), np.array(entries)), TURNS, None if least is None else np.array(least))


def test_the_first_comes_back_first():
    found = backs((5, 0), (15, 0), (25, 0), (99, 0))
    assert (found.new.tolist(), found.odd) == ([1, 1, 0, 1], {})


def test_of_one_time_what_began_first_comes_first():
    assert backs((20, 8)).new.tolist() == [0, 1, 0, 0]
    assert backs((20, 10)).new.tolist() == [0, 0, 1, 0]
    assert backs((20, 30), (20, 30)).new.tolist() == [0, 0, 0, 2]


def test_others_may_come_back_before_it():
    # The second and the fourth before the second pass; then the third, which is now the second; then the first.
    found = backs((25, 0), (15, 0), (20, 20), (15, 0))
    assert (found.new.tolist(), found.odd) == ([0, 0, 0, 1], {1: (1, 3), 2: (1,)})


def test_nothing_comes_back_before_it_goes():
    assert backs((5, 0), (5, 0), least=[1, 3]).new.tolist() == [0, 1, 0, 1]


class _Both:
    """A pool that remembers, beside one that does not."""

    def __init__(self) -> None:
        self.segments = [Allocator(None) for _ in range(2)]
        pools = [Pool(small=False) for _ in range(2)]
        self.plain = pools[0]
        self.quick = FreePool(pools[1], self.segments[1].segment)
        self.pool = pools[1]


MIB = 2**20
# The last is larger than another by less than is split off.
SIZES = st.sampled_from([2 * MIB, 3 * MIB, 5 * MIB, 11 * MIB, 11 * MIB + 4096])


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    rows=st.lists(st.lists(SIZES, min_size=1, max_size=3), min_size=1, max_size=3),
    chosen=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=60),
)
def test_a_pool_that_remembers_is_one_that_does_not(rows, chosen):
    both = _Both()
    # Each row takes blocks, gives all but the last one back, and that one comes back later.
    requests = []
    for row in rows:
        taken = [(name, size << SHIFT) for name, size in enumerate(row)]
        requests.append(taken + [(name, 0) for name, _ in taken[:-1]])
    nothing, left = {}, []
    for which, back in chosen:
        row = requests[which % len(requests)]
        blocks = {}
        _, larger = both.plain.replay(row, blocks, both.segments[0].segment)
        made = both.quick.make(row, nothing, {})
        assert made.blocks == blocks
        assert both.quick.changes(made.changes) == (tuple(larger), ())
        asked = dict(row[: len(row) // 2 + 1])
        too_many = {name: (interval - asked[name]) >> SHIFT for name, interval in blocks.items()}
        assert made.extra == {name: more for name, more in too_many.items() if more}
        left += blocks.values()
        if back < len(left):
            interval = left.pop(back)
            place = interval & (2**SHIFT - 1), interval >> SHIFT
            both.plain.give(*place)
            both.quick.give(*place)
    both.quick.leave()
    assert both.pool.save() == both.plain.save()
    assert both.segments[0].reserved == both.segments[1].reserved


@pytest.mark.parametrize("count", [0, 3])
def test_without_groups_nothing_comes_back(count):
    turns = Moments(np.arange(count), np.arange(count))
    found = come_backs(Moments(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)), turns)
    assert (found.new.tolist(), found.odd) == ([0] * count, {})
