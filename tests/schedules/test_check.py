"""What a schedule is refused for, with the names of the actions."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    check,
    named_schedule,
    read_csv,
    with_messages,
    with_recomputation,
)
from gpipe_bench.schedules.table import TWO_PER_DEVICE


def rows(*texts):
    """Lists of actions from text: ``F00 B00`` is F and B of micro-batch 0 in partition 0."""
    return [[(word[0], int(word[1]), int(word[2])) for word in text.split()] for text in texts]


GOOD = ("F00 F10 B00 B10", "F01 B01 F11 I11 W11")


def test_a_list_of_ones_own_can_run():
    facts = check(rows(*GOOD))
    assert facts.in_flight == (2, 1)
    assert facts.placement == (0, 1)
    # Six units of work on each device; device 0 ends last, after eight.
    assert facts.bubble() == pytest.approx(1 - 12 / 16)


def test_all_partitions_on_one_device():
    assert check(rows("F00 F01 F02 B02 B01 B00")).in_flight == (3,)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ((), "a schedule must have an action, got none"),
        (("X00",), "one of F, R, B, I, W, got X(0,0)"),
        (("F00 F00 B00",), "every action must occur once, got 2 times F(0,0)"),
        (("F00 B00 F10",), "micro-batch 1 on partition 0 must be B, or I and W, got none"),
        (("F00 B00 I00 W00",), "must be B, or I and W, got B(0,0) and I(0,0) and W(0,0)"),
        (("F00 I00",), "must be B, or I and W, got I(0,0)"),
        (("F00 B00 B10",), "got no F(1,0)"),
        (("B00 F00",), "F(0,0) must come before B(0,0)"),
        (("F00 W00 I00",), "I(0,0) must come before W(0,0)"),
        (("R00 F00 B00",), "F(0,0) must come before R(0,0)"),
        (("F00 B00 R00",), "R(0,0) must come before the backward pass"),
        (("F00 F10 B00", "B10"), "partition 0 on device 0 and with B(1,0) on device 1"),
        (
            ("F00 B00 F10 B10", "F11 B11 F01 B01"),
            "a deadlock: device 0 waits with B(0,0) for B(0,1); device 1 waits with F(1,1) for F(1,0)",
        ),
        (("F00 R00 B00 F10 B10", "F01 F11 B01 B11"), "a deadlock: device 0 waits with R(0,0) for B(0,1); device 1"),
        (("F01 B01 F00 B00",), "device 0 waits with F(0,1) for F(0,0)"),
        (("F00 F10 B00 B10", "F11 F01 B01 B11"), "sends, got F(0,0) next on device 0, and F(1,1) next on device 1"),
        (("F00 F10 B10 B00", "F01 I01 F11 I11 W11 W01"), "got I(0,1) next on device 1, and B(1,0) next on device 0"),
    ],
)
def test_what_cannot_run_is_refused_by_the_names_of_its_actions(texts, words):
    with pytest.raises(ScheduleError, match=re.escape(words)):
        check(rows(*texts))


def test_numbers_must_count_from_zero():
    with pytest.raises(ScheduleError, match=r"integers from 0, got F\(-1,0\)"):
        check([[("F", -1, 0), ("B", -1, 0)]])


def test_numbers_must_be_integers_in_a_schedule_that_was_made_by_hand_too():
    with pytest.raises(ScheduleError, match=r"integers from 0, got F\(False,0\)"):
        check(Schedule(((Action("F", False, 0), Action("B", False, 0)),)))


def test_a_huge_number_is_refused_at_once():
    with pytest.raises(ScheduleError, match=r"got no F\(0,0\)"):
        check([[("F", 10**12, 0)]])


def test_several_problems_are_told_at_once():
    with pytest.raises(ScheduleError) as caught:
        check(rows("F00 F00 B00 F10"))
    assert len(caught.value.problems) == 2


def can_meet(lists):
    """Whether devices end that receive just before they need it, each tensor after all that were sent before it.

    A send ends when its receive begins; activations and gradients between two devices go through one queue each.
    """
    home = {j: device for device, row in enumerate(lists) for _, _, j in row}
    rows, queues = [list(row) for row in lists], {}
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(rows):
            if not row:
                continue
            kind, i, j = row[0]
            step = {"F": 1, "B": -1, "I": -1}.get(kind, 0)
            source = home.get(j - step, device)
            if source != device:
                queue = queues.get((source, device, step), [])
                if queue[:1] != [(i, j)]:
                    continue
                queue.pop(0)
            target = home.get(j + step, device)
            if target != device:
                queues.setdefault((device, target, step), []).append((i, j + step))
            row.pop(0)
            moved = True
    return not any(rows)


@settings(max_examples=300)
@given(st.data())
def test_any_order_that_can_run_is_found(data):
    """Random orders that keep dependencies, cut into the lists of random devices."""
    m, n, devices = (data.draw(st.integers(1, top)) for top in (4, 4, 3))
    home = [data.draw(st.integers(0, devices - 1)) for _ in range(n)]
    split = data.draw(st.booleans())
    ready = {("F", i, 0) for i in range(m)}
    lists = [[] for _ in range(devices)]
    while ready:
        kind, i, j = data.draw(st.sampled_from(sorted(ready)))
        ready.remove((kind, i, j))
        lists[home[j]].append((kind, i, j))
        back = "I" if split else "B"
        if kind == "F":
            ready.add(("F", i, j + 1) if j < n - 1 else (back, i, j))
        elif kind in "BI":
            ready |= {(back, i, j - 1)} if j else set()
            ready |= {("W", i, j)} if split else set()
    if not can_meet(lists):
        with pytest.raises(ScheduleError, match="must receive in the order in which another one sends"):
            check(lists)
        return
    facts = check(lists)
    assert sorted(facts.order) == sorted(action for row in facts.schedule.devices for action in row)
    place = {action: k for k, action in enumerate(facts.order)}
    for row in facts.schedule.devices:
        assert [place[action] for action in row] == sorted(place[action] for action in row)


@pytest.mark.parametrize("name", SCHEDULES)
def test_recomputation_goes_right_before_the_backward_pass(name):
    n = 4 if name in TWO_PER_DEVICE else 2
    schedule = with_recomputation(named_schedule(name, 4, n, 2), 3)
    check(schedule)
    recomputed = [action for action in schedule if action.kind == "R"]
    assert sorted(recomputed) == [("R", i, j) for i in range(3) for j in range(n)]
    for row in schedule.devices:
        for action, following in pairwise(row):
            assert action.kind != "R" or (following.kind in "BI" and following[1:] == action[1:])
    assert with_recomputation(schedule, 3) == schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_with_their_messages_are_complete(name):
    schedule = with_messages(named_schedule(name, 4, 6 if name in TWO_PER_DEVICE else 3, 3))
    assert check(schedule).schedule.messages


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ("0F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0", "must have both ends of each, got no 0SEND_F0; add it"),
        ("0F0,0SEND_F0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0", "must have both ends of each, got no 0RECV_B0; add it"),
        ("0F0,0SEND_F0,0B0,0RECV_B0", "1RECV_F0,1F0,1B0,1SEND_B0", "0RECV_B0 must come before B(0,0), got it later"),
        ("0SEND_F0,0F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0", "F(0,0) must come before 0SEND_F0, got it later"),
        (
            "0F0,0RECV_B0,0B0",
            "0SEND_F0,1RECV_F0,1F0,1B0,1SEND_B0",
            "F(0,0) must come before 0SEND_F0, got it later or on",
        ),
        ("0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0", "sent and received once, if it leaves its"),
        ("0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1SEND_F0,1B0,1SEND_B0", "leaves its device, got 1SEND_F0; drop it"),
    ],
)
def test_messages_that_do_not_fit_the_actions(first, second, problem):
    with pytest.raises(ScheduleError, match=re.escape(problem)):
        check(read_csv(f"{first}\n{second}\n"))
