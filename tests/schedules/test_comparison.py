"""Actions beside their predictions: who is late, and where the two part ways."""

from __future__ import annotations

import pytest

from gpipe_bench.schedules import Action, Schedule, named_schedule, timing
from gpipe_bench.schedules.comparison import compared, from_own_durations, parting

ROW = [("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0)]
PREDICTED = {Action("F", 0, 0): (0, 1), Action("F", 1, 0): (1, 2), Action("B", 0, 0): (2, 4), Action("B", 1, 0): (4, 6)}


def test_actions_are_compared_in_the_order_of_their_predictions():
    actual = {action: (start + 1, end + 2) for action, (start, end) in PREDICTED.items()}
    rows = compared(Schedule.of([ROW]), PREDICTED, actual)
    assert [row.action for row in rows] == ROW
    assert {(row.late_ms, row.longer_ms) for row in rows} == {(1, 1)}


def test_the_two_part_ways_at_the_first_action_that_starts_or_ends_elsewhere():
    late = {**PREDICTED, Action("B", 0, 0): (2, 4.5), Action("B", 1, 0): (4.5, 6.5)}
    rows = compared(Schedule.of([ROW]), PREDICTED, late)
    assert parting(rows, 0.4).action == ("B", 0, 0)
    assert parting(rows, 0.5) is None


@pytest.mark.parametrize(("name", "n"), [("1f1b", 2), ("zb_v", 4), ("dualpipe_v", 4)])
def test_a_run_without_transfers_is_as_its_own_durations_say(name, n):
    schedule = named_schedule(name, 4, n, 2)
    times = timing(schedule)
    actual = {action: (times.start[action], times.end[action]) for action in schedule}
    assert from_own_durations(schedule, actual) == actual


def test_actions_that_took_no_time_have_no_row():
    rows = compared(Schedule.of([ROW]), PREDICTED, {Action("F", 0, 0): (0, 1)})
    assert [row.action for row in rows] == [("F", 0, 0)]
