"""The balance of the race: found by the times of whole partitions, forward and backward on their own."""

from dataclasses import replace
from itertools import pairwise

import pytest

from gpipe_bench.bench.peers import partition_times
from gpipe_bench.bench.peers.partition_times import even_balance
from tests.peers.cases_of import tiny_unet

FORWARD = [1, 1, 1, 1, 1, 6, 1, 1, 1, 1]
BACKWARD = [4, 1, 4, 1, 1, 1, 4, 1, 1, 4]


@pytest.fixture
def costs(monkeypatch):
    """Times that follow from the layers alone, and a first balance that layers timed one by one would give."""

    def times_of(_, balances, __):
        return [(_parts(FORWARD, balance), _parts(BACKWARD, balance)) for balance in balances]

    monkeypatch.setattr(partition_times, "_times_of", times_of)
    monkeypatch.setattr(partition_times, "balance_by_time", lambda *_, **__: [6, 4])


def _parts(layers, balance):
    starts = [sum(balance[:j]) for j in range(len(balance) + 1)]
    return [sum(layers[start:end]) for start, end in pairwise(starts)]


def _span(balance, m):
    spans = (_parts(layers, balance) for layers in (FORWARD, BACKWARD))
    return sum(sum(parts) + (m - 1) * max(parts) for parts in spans)


@pytest.mark.usefixtures("costs")
def test_the_balance_is_the_one_whose_pipeline_is_quickest():
    case = replace(tiny_unet(), balance=(), chunks=8)
    best = min(([cut, 10 - cut] for cut in range(1, 10)), key=lambda balance: _span(balance, 8))
    assert even_balance(case, 0.0) == best
    assert best != [6, 4]


def test_a_cut_moves_by_a_few_layers_and_leaves_no_partition_empty():
    near = partition_times._neighbours([2, 9, 3], 0)
    assert near[0] == [2, 9, 3]
    assert sorted(near) == [[left, 11 - left, 3] for left in range(1, 9)]


def test_every_balance_is_timed_forward_and_backward():
    found = partition_times._times_of(tiny_unet(), [(14, 15), (10, 19)], 0.0)
    assert [[len(times) for times in one] for one in found] == [[2, 2], [2, 2]]
    assert min(min(times) for one in found for times in one) > 0
