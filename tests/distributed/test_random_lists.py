"""Lists of messages end, or are stuck, as processes over gloo show."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

from gpipe_bench.schedules import read_messages, stuck
from tests.distributed.random_lists import Call, Lists, disagreement, drawn, found, predicted
from tests.distributed.watched import watched
from tests.project.pages import PAGES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what threads do is read from /proc")

# Of these lists some end and some are stuck, with messages of every size.
SOME = range(8)


@pytest.mark.parametrize("seed", SOME)
def test_the_check_and_processes_agree(seed, tmp_path):
    assert not disagreement(drawn(seed), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(SOME), 1000))
def test_the_check_and_processes_agree_on_a_thousand_lists(seed, tmp_path):
    assert not disagreement(drawn(seed), tmp_path)


def test_lists_that_end_and_lists_that_are_stuck_are_drawn():
    stuck_ones = [bool(predicted(drawn(seed))[0]) for seed in range(1000)]
    words = " ".join(PAGES["docs/hangs.md"].split())
    assert f"Of the lists 0 to 999, {stuck_ones.count(False)} end and {stuck_ones.count(True)} are stuck." in words
    assert 0 < sum(stuck_ones[: len(SOME)]) < len(SOME)


@pytest.mark.parametrize("elements", [0, 1, 1 << 20])
def test_gloo_buffers_no_send_of_any_size(elements, tmp_path):
    crossing = Lists([[(Call("send", 1, 0),), (Call("recv", 1, 0),)], [(Call("send", 0, 0),), (Call("recv", 0, 0),)]], {
        (0, 1, 0): elements, (1, 0, 0): elements,
    })  # fmt: skip
    assert found(crossing, tmp_path)[0] == predicted(crossing)[0] == {0: 0, 1: 0}


def wait_twice(rank, places):
    work = dist.isend(torch.ones(1), 1) if rank == 0 else dist.irecv(torch.ones(1), 0)
    for place in range(2):
        places[rank] = place
        work.wait()


def test_gloo_never_ends_a_second_wait_for_a_message(tmp_path):
    assert watched(2, tmp_path, wait_twice) == {0: 1, 1: 1}
    lists = read_messages("isend 1,wait 0,wait 0\nirecv 0,wait 0,wait 0\n")
    assert stuck(lists, "gloo") == (
        "rank 0 is stuck at wait 0: waits for isend 1, for which it has waited before",
        "rank 1 is stuck at wait 0: waits for irecv 0, for which it has waited before",
    )
    assert stuck(lists, "pair") == ()
