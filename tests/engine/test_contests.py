"""Workers against the calling thread: what a contest decides from the times that it is told."""

from __future__ import annotations

import pytest
import torch

from gpipe_bench.engine import granularity
from gpipe_bench.engine.granularity import (
    LONGEST_CYCLE_S,
    LONGEST_TASK_S,
    SHORTEST_TASK_S,
    Contest,
    Contests,
    kind_of,
)
from gpipe_bench.engine.microbatch import scatter


def contest(*times: tuple[bool, float]) -> Contest:
    """A contest of batches of one cycle and ten tasks, after these times."""
    made = Contest(1, 10)
    for inline, seconds in times:
        made.note(seconds, inline=inline)
    return made


W, I = False, True  # noqa: E741 - workers, inline
SHORT = LONGEST_CYCLE_S / 3


def test_two_batches_with_workers_come_before_a_try():
    assert [contest(*[(W, SHORT)] * count).inline() for count in range(3)] == [False, False, True]


def test_long_cycles_are_never_tried():
    assert not contest(*[(W, LONGEST_CYCLE_S * 1.01)] * 20).inline()


def test_long_tasks_get_workers_whatever_they_take_there():
    made = Contest(10, 20)
    for inline, seconds in [(W, SHORT), (W, SHORT), (I, 20 * LONGEST_TASK_S * 1.01)]:
        made.note(seconds, inline=inline)
    assert made.settled is False
    made = Contest(10, 20)
    for inline, seconds in [(W, 10 * SHORT), (W, 10 * SHORT), (I, 20 * LONGEST_TASK_S * 0.3)]:
        made.note(seconds, inline=inline)
    assert made.settled is True


@pytest.mark.parametrize("disturbed", [0, 1])
def test_very_short_tasks_stay_in_the_calling_thread_whatever_workers_take(disturbed):
    made = Contest(10, 20)
    for factor in [1.5] * disturbed + [0.9]:
        for inline, seconds in [(W, SHORT), (W, SHORT), (I, 20 * SHORTEST_TASK_S * factor)]:
            assert made._inline is None
            made.note(seconds, inline=inline)
    assert made.settled is True


def test_what_counts_is_the_length_of_a_cycle():
    made = Contest(10, 20)
    for _ in range(2):
        made.note(9 * LONGEST_CYCLE_S, inline=False)
    assert made.inline()


def test_a_slow_beginning_does_not_keep_from_trying_and_does_not_count():
    assert contest((W, 1e3), (W, SHORT), (W, SHORT)).inline()
    assert contest((W, SHORT * 2.9), (W, SHORT), (I, SHORT * 1.5))._inline is None


@pytest.mark.parametrize("disturbed", [0, 1])
def test_one_try_of_the_calling_thread_that_was_disturbed_does_not_bring_workers(disturbed):
    tries = [SHORT, SHORT]
    tries[disturbed] *= 9
    made = contest((W, SHORT), (W, SHORT), (I, tries[0]), (W, SHORT), (I, tries[1]), (W, SHORT), (I, SHORT))
    assert made.settled is True


def test_one_batch_in_which_workers_met_well_does_not_bring_them():
    made = contest((W, SHORT), (W, SHORT * 0.6), (I, SHORT), (W, SHORT * 1.1), (I, SHORT), (W, SHORT), (I, SHORT))
    assert made.settled is True


def test_a_clear_result_for_the_calling_thread_settles_it_at_once():
    made = contest((W, SHORT), (W, SHORT), (I, SHORT * 0.7))
    for _ in range(20):
        made.note(SHORT * 9, inline=made.inline())
    assert made.inline()


def test_workers_must_be_clearly_faster_twice():
    times = [(W, SHORT), (W, SHORT), (I, SHORT * 2), (W, SHORT), (I, SHORT * 2)]
    assert contest(*times[:3])._inline is None
    made = contest(*times)
    for _ in range(20):
        made.note(SHORT * 9, inline=made.inline())
    assert not made.inline()


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_where_it_hardly_matters_the_calling_thread_has_it_after_three_tries_in_turns(factor):
    made = contest((W, SHORT), (W, SHORT))
    turns = []
    for _ in range(5):
        turns.append(made.inline())
        made.note(SHORT * (factor if turns[-1] else 1), inline=turns[-1])
    assert turns == [True, False, True, False, True]
    assert made._inline is True


def test_kinds_have_contests_of_their_own_and_old_ones_go(monkeypatch):
    monkeypatch.setattr(granularity, "_MOST_KINDS", 2)
    contests = Contests()
    first = contests.of("a", 1, 1)
    assert first[0] is not first[1]
    contests.of("b", 1, 1)
    assert contests.of("a", 1, 1) is first
    contests.of("c", 1, 1)
    assert contests.of("a", 1, 1) is first
    assert len(contests._kinds) == 2


def test_batches_are_alike_that_agree_in_number_shapes_and_dtypes():
    kinds = [
        kind_of(scatter(batch, m))
        for batch, m in [
            (torch.ones(4, 3), 2),
            (torch.zeros(4, 3), 2),
            (torch.ones(4, 3), 4),
            (torch.ones(8, 3), 2),
            (torch.ones(4, 3, dtype=torch.float64), 2),
            ((torch.ones(4, 3), torch.ones(4)), 2),
        ]
    ]
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 5
