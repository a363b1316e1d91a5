"""Lists of messages: public hangs are found and their fixes are not, PyTorch's own lists, and what is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import CHANNELS, SCHEDULES, derived, named_schedule, read_csv, read_messages, stuck
from gpipe_bench.schedules.table import partition_count

DATA = Path(__file__).parent / "data"


def _reports():
    for block in (DATA / "hangs.txt").read_text().split("== ")[1:]:
        head, _, lists = block.partition("\n")
        origin, channels, outcome = map(str.strip, head.split("|"))
        yield pytest.param(lists, channels, outcome, id=f"{origin} {outcome}")


@pytest.mark.parametrize(("lists", "channels", "outcome"), [*_reports()])
def test_public_hangs_are_found_and_their_fixes_end(lists, channels, outcome):
    assert bool(stuck(read_messages(lists), channels)) == (outcome == "hangs")


def test_twenty_reports():
    heads = re.findall(r"^== (.*)\| hangs$", (DATA / "hangs.txt").read_text(), re.MULTILINE)
    assert len({re.findall(r"[\w.-]+/[\w.-]+#\d+", head)[0] for head in heads}) == 20


def test_what_is_stuck_is_named_rank_by_rank():
    text = "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0\n1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1\n"
    assert stuck(read_messages(text), "pair") == (
        "rank 0 is stuck at 2F0: waits for 2RECV_F0; next in its queues: 0SEND_F1 (with rank 1)",
        "rank 1 is stuck at 1F1: waits for 1RECV_F1; next in its queues: 1SEND_F0 (with rank 0)",
    )


def test_swapped_messages_are_named():
    text = "isend 1 name a,isend 1 name b,wait\nirecv 0 name b,irecv 0 name a,wait\n"
    assert stuck(read_messages(text), "edge")[0] == (
        "rank 1: irecv 0 name b gets the message of isend 1 name a of rank 0"
    )


def test_an_action_does_not_start_before_the_receive_that_stands_behind_it():
    assert "a message that it begins only later" in stuck(read_messages("0F0,0SEND_F0\n1F0,1RECV_F0\n"), "gloo")[1]


def test_blocking_sends_cross():
    text = "0F0,0SEND_F0,0RECV_B0,0B0\n1F1,1SEND_B0,1RECV_F0,1F0\n"
    assert stuck(read_messages(text), "edge") == ()
    assert len(stuck(read_messages(text, blocking=True), "edge")) == 2


def test_messages_in_a_row_are_a_batch_where_that_is_asked():
    text = "isend 1,irecv 1,wait\nisend 0,irecv 0,wait\n"
    assert len(stuck(read_messages(text), "pair")) == 2
    assert stuck(read_messages(text), "pair", batched=True) == ()


@pytest.mark.parametrize("name", SCHEDULES)
def test_our_runtime_ends_with_a_queue_for_each_directed_pair(name):
    schedule = named_schedule(name, 8, partition_count(name, 4), 4)
    for channels in ("gloo", "edge"):
        assert stuck(derived(schedule, [(0, 3)]), channels) == ()


def _lowered():
    for block in (DATA / "pytorch_lowered.txt").read_text().split("== ")[1:]:
        head, _, lists = block.partition("\n")
        yield pytest.param(lists, head.partition("|")[2].split(), id=head.partition("|")[0].strip())


@pytest.mark.parametrize(("lists", "ends"), [*_lowered()])
def test_lists_that_pytorch_lowers(lists, ends):
    assert [channels for channels in CHANNELS if not stuck(read_messages(lists), channels)] == ends


@pytest.mark.parametrize(("lists", "ends"), [*_lowered()])
def test_a_list_that_lost_a_receive_is_refuted(lists, ends):
    rows = lists.splitlines()
    field = next(one for one in rows[1].split(",") if "RECV_F" in one)
    rows[1] = rows[1].replace(f"{field},", "", 1)
    for channels in ends:
        assert stuck(read_messages("\n".join(rows)), channels)
    read_csv(lists)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("isend 1,foo\nirecv 0\n", "a field must be a call such as isend 1"),
        ("isend 3\nirecv 0\n", "a message must go between two ranks with lists, got isend 3 of rank 0"),
        ("0F0,0SEND_F0\n", "the other end of 0SEND_F0 must be on a rank, got none"),
        ("0F0,0SEND_F0,0X0\n1RECV_F0,1F0\n", "a field must be an action such as 0F3, 0SEND_F3"),
    ],
)
def test_errors(text, error):
    with pytest.raises(ScheduleError, match=error):
        stuck(read_messages(text), "pair")
