"""Schedules in PyTorch's CSV form: read, written, and read by PyTorch."""

from __future__ import annotations

import re

import pytest

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import SCHEDULES, Schedule, check, named_schedule, read_csv, to_csv, with_recomputation
from gpipe_bench.schedules.table import TWO_PER_DEVICE


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_written_reads_back(name):
    schedule = named_schedule(name, 3, 4 if name in TWO_PER_DEVICE else 2, 2)
    assert read_csv(to_csv(schedule)) == schedule


def test_the_text_of_a_schedule():
    assert to_csv(named_schedule("zb_h1", 2, 2, 2)) == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def test_empty_fields_and_spaces_are_passed_over():
    schedule = read_csv("0F0, 0F1,,0B0,0B1\n1F0,,1B0,1F1,1B1,,\n")
    assert schedule == named_schedule("1f1b", 2, 2, 2)
    check(schedule)


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n\r\n", "\n \n\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_marks_of_editors_are_no_part_of_a_schedule(start, end):
    schedule = named_schedule("zb_h1", 3, 2, 2)
    assert read_csv(start + to_csv(schedule).rstrip() + end) == schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_pytorch_adds_to_a_schedule_is_kept_or_passed_over(name):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    n = 6 if name in TWO_PER_DEVICE else 3
    schedule = named_schedule(name, 4, n, 3)
    # Communication is added to pairs when PyTorch runs them.
    alone = Schedule(schedule.devices)
    fields = [row.split(",") for row in to_csv(alone).splitlines()]
    actions = {rank: [schedules._Action.from_str(field) for field in row] for rank, row in enumerate(fields)}
    sharded = {rank: schedules._add_unshard_reshard(row) for rank, row in actions.items()}
    lowered = schedules._add_send_recv(sharded, schedule.placement.__getitem__, n)
    text = "".join(",".join(map(str, row)) + "\n" for row in lowered.values())
    assert "SEND_F" in text
    assert "UNSHARD" in text
    read = read_csv(text)
    assert read.devices == alone.devices
    # Messages are where PyTorch has them; what it does to sharded parameters is passed over.
    kept = ([one for one in map(str, row) if "SHARD" not in one] for row in lowered.values())
    assert to_csv(read) == "".join(",".join(row) + "\n" for row in kept)
    assert check(read).schedule == read_csv(to_csv(read))


def test_messages_are_kept_with_pairs_and_only_if_a_list_has_them():
    text = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,(1F0;1B0)OVERLAP_F_B,1SEND_B0\n"
    assert to_csv(read_csv(text)) == text
    assert read_csv("0F0,0UNSHARD,0B0\n").messages == ()


def test_a_pair_is_two_actions_one_after_the_other():
    schedule = read_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert schedule.devices == read_csv("0F0,0F1,0B0,0B1\n").devices
    assert schedule.pairs == {("F", 1, 0)}
    assert to_csv(schedule) == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"


def test_pytorch_reads_what_is_written():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    text = to_csv(named_schedule("zb_v", 2, 4, 2)) + to_csv(named_schedule("dualpipe_v", 4, 4, 2))
    read = [str(schedules._Action.from_str(field)) for field in text.replace("\n", ",").split(",") if field]
    assert read == [field for field in text.replace("\n", ",").split(",") if field]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a schedule must have an action, got none"),
        ("0F0,0B0\n\n1F0,1B0\n", "must have the actions of a device, got none in line 2; remove it"),
        ("0F0,0B0\n,,\n1F0,1B0\n", "must have the actions of a device, got none in line 2; remove it"),
        ("0F0,0B0\n1RECV_F0,1SEND_B0\n", "must have the actions of a device, got none in line 2; remove it"),
        ("0F0,0SEND\n", "got '0SEND' in line 1; correct it"),
        ("0F0,0SEND_F\n", "got '0SEND_F' in line 1; correct it"),
        ("0F0\n1G0\n", "got '1G0' in line 2"),
        ("0F0,(0F1;0SEND_B0)OVERLAP_F_B\n", "got '(0F1;0SEND_B0)OVERLAP_F_B' in line 1"),
        ("0F" + "9" * 5000, "got '0F99"),
    ],
)
def test_other_fields_are_refused(text, words):
    with pytest.raises(ScheduleError, match=re.escape(words)):
        read_csv(text)


def test_recomputation_cannot_be_written():
    with pytest.raises(ScheduleError, match=r"must have no R, got R\(0,0\)"):
        to_csv(with_recomputation(named_schedule("gpipe", 2, 1, 1), 1))
