"""Which process is named as the cause, when some wait for others."""

from __future__ import annotations

import pytest

from gpipe_bench.distributed.failures import FailureChannel, LostError
from tests.distributed.virtual import Context, VirtualGroup, World

SILENT, CLOSED = LostError(RuntimeError("Timed out waiting")), LostError(RuntimeError("Connection closed\nby peer"))
RANKS = [10, 11, 12]


def news_of(context, ranks=range(3)):
    world = context.world
    return [FailureChannel([(context.group(rank), RANKS)], 0.01, lambda: world.now_s) for rank in ranks]


def connected():
    return Context(World(3), "news", range(3))


def test_what_is_told_is_the_cause():
    first, second, _ = news_of(connected())
    first.tell("é" * 5000)
    first.tell("another reason")
    assert second.cause([10], CLOSED) == "é" * 2048


def test_a_reason_that_is_no_text_of_utf_8():
    """As the name of a file whose bytes are none."""
    first, second, _ = news_of(connected())
    first.tell("no file \udcff")
    assert second.cause([10], CLOSED) == "no file ?"


def test_what_a_process_told_that_goes_as_this_one_begins_to_hear():
    context = connected()
    told = FailureChannel([(context.group(2), RANKS)], 0.01, lambda: context.world.now_s)

    class Late(VirtualGroup):
        def recv(self, tensors, rank, tag):
            work = super().recv(tensors, rank, tag)
            if rank == 2:
                told.tell("the reason")
                context.close(2)
                context.world.settle()
            return work

    first = FailureChannel([(Late(context, 0), RANKS)], 0.01, lambda: context.world.now_s)
    assert first.cause([12], CLOSED) == "the reason"


@pytest.mark.parametrize("before", [True, False])
def test_a_process_that_is_gone(before):
    context = connected()
    if before:
        context.close(2)
        first, _ = news_of(context, range(2))
    else:
        first, *_ = news_of(context)
        context.close(2)
    assert first.cause([12], CLOSED) == "rank 12 is gone or silent, said rank 10: Connection closed"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_silent_one_at_the_end_of_a_chain(order):
    """0 waits for 1, which waits for 2. Whoever asks second knows it."""
    news, waits = news_of(connected()), {0: 11, 1: 12}
    first, second = [news[rank].cause([waits[rank]], SILENT) for rank in order]
    assert "rank 12 is silent, or waits for one that is, said rank 11: Timed out" in second
    assert "is silent, or waits for one that is, said rank" in first


def test_a_reason_at_the_end_of_a_chain():
    first, second, third = news_of(connected())
    third.tell("the reason")
    second.tell("\x0112")
    assert first.cause([11], SILENT) == "the reason"


def test_all_replicas_that_do_not_answer():
    first, second, _ = news_of(connected())
    second.tell("\x0110 12")
    assert "rank 12 is silent" in first.cause([11, 12], SILENT)


def test_processes_that_wait_for_one_another():
    first, second, _ = news_of(connected())
    second.tell("\x0110")
    assert "rank 10 is silent, or waits for one that is, said rank 11" in first.cause([11], SILENT)


def test_a_process_of_another_pipeline():
    """There is no connection to 13: it is named by the one that waits for it."""
    first, second, _ = news_of(connected())
    second.tell("\x0113")
    assert "rank 13 is silent, or waits for one that is, said rank 11" in first.cause([11], SILENT)
