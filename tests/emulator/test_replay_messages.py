"""Messages between processes in a replay: all parts of a meeting begin together, and wait for each other."""

from __future__ import annotations

import pytest

from gpipe_bench.errors import TraceError
from gpipe_bench.machine.replay import Replay, replay
from gpipe_bench.machine.trace import Record
from gpipe_bench.machine.trace_file import difference, read_trace, write_trace
from tests.emulator.bed.rows import NS_PER_MS, Bed, traced

PLAIN = Bed()


def meet(device, stream=0, meeting=1, parts=2, ms=3, **options):
    return Record("meet", "part", device, stream, thread=device, duration=ms, meeting=meeting, parts=parts, **options)


def work(device, ms, stream=0):
    return Record("kernel", "work", device, stream, thread=device, duration=ms)


def spans(*records, machine=PLAIN, host_time=True):
    """When each row began and ended, in milliseconds."""
    found = replay(traced(*records), machine, host_time=host_time)
    return [(begin // NS_PER_MS, end // NS_PER_MS) for begin, end in zip(found.begin_ns, found.end_ns, strict=True)]


@pytest.mark.parametrize("first", [0, 1])
def test_parts_begin_when_the_last_has_come_to_the_head_of_its_stream(first):
    rows = [[work(0, 5), meet(0), work(0, 1)], [work(1, 2), meet(1), work(1, 1)]]
    expected = [[(0, 5), (5, 8), (8, 9)], [(0, 2), (5, 8), (8, 9)]]
    assert spans(*rows[first], *rows[1 - first]) == [*expected[first], *expected[1 - first]]


def test_a_meeting_takes_as_long_as_its_longest_part():
    assert spans(meet(0, ms=1), meet(1, ms=4)) == [(0, 4), (0, 4)]


def test_many_parts_meet():
    rows = [row for device in range(4) for row in (work(device, device), meet(device, parts=4))]
    assert [spans(*rows)[2 * device + 1] for device in range(4)] == [(3, 6)] * 4


def test_other_streams_of_a_part_go_on():
    assert spans(meet(0, 1), work(0, 2), work(1, 9), meet(1)) == [(9, 12), (0, 2), (0, 9), (9, 12)]


def test_meetings_may_come_in_another_order_on_streams_of_their_own():
    rows = [meet(0, 1, 1), meet(0, 2, 2), meet(1, 2, 2), meet(1, 1, 1)]
    assert spans(*rows) == [(0, 3)] * 4


def test_who_waits_for_an_event_after_a_part_begins_after_the_meeting():
    event = [Record("record", "", 0, 1, version=1), Record("wait", "", 0, 0, version=1)]
    rows = [meet(0, 1), *event, work(0, 1), work(1, 5), meet(1)]
    found = spans(*rows)
    assert found[0] == found[5] == (5, 8)
    assert found[1] == (8, 8)
    assert found[3] == (8, 9)


def test_a_thread_that_waits_for_its_part_waits_for_all():
    rows = [meet(0), Record("sync_stream", "", 0, 0), work(0, 1), work(1, 4), meet(1)]
    found = replay(traced(*rows), Bed())
    assert found.host_ns[2] == 7 * NS_PER_MS


def test_messages_of_one_sender_take_turns_on_its_link():
    rows = [meet(0, 1, 1, peer=1), meet(0, 2, 2, peer=2), meet(1, 0, 1), meet(2, 0, 2)]
    assert spans(*rows) == [(0, 3), (3, 6), (0, 3), (3, 6)]


def test_messages_of_two_senders_take_turns_on_a_bus():
    shared = Bed(shared=lambda source, target: ((0, 1),))
    rows = [meet(0, 0, 1, peer=2), meet(1, 0, 2, peer=3), meet(2, 0, 1), meet(3, 0, 2)]
    assert spans(*rows, machine=shared) == [(0, 3), (3, 6), (0, 3), (3, 6)]
    assert spans(*rows) == [(0, 3)] * 4


def test_a_launch_takes_each_host_its_time():
    rows = [meet(0, launches=1, ms=0), meet(1, launches=1, ms=0), work(0, 1), work(1, 1)]
    assert spans(*rows, machine=Bed(launch_ns=NS_PER_MS)) == [(0, 1), (0, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize("waits", [False, True])
def test_a_part_that_never_comes_is_an_error(waits):
    rows = [meet(0), *[Record("sync_device", "", 0, 0)] * waits, work(1, 1)]
    with pytest.raises(TraceError, match=r"all parts of a message must come.* row 0 \(one of 2 parts of message 1\)"):
        replay(traced(*rows), Bed())


def test_meetings_that_cross_on_one_stream_are_an_error_and_times_are_there_nevertheless():
    rows = [work(0, 2), meet(0, 0, 1), meet(0, 0, 2), meet(1, 0, 2), meet(1, 0, 1)]
    made = Replay(traced(*rows), Bed())
    with pytest.raises(TraceError, match=r"row 1 .* row 2 .* row 3 .* row 4 "):
        made.run()
    assert list(made.rows().end_ns) == [2 * NS_PER_MS, -1, -1, -1, -1]


def test_a_file_keeps_meetings(tmp_path):
    trace = traced(meet(0, meeting=2, peer=1), meet(1, meeting=2))
    write_trace(tmp_path / "rows.jsonl", trace)
    again = read_trace(tmp_path / "rows.jsonl")
    assert again.records == trace.records
    assert difference(trace, again).row is None
    assert difference(trace, traced(meet(0, peer=1), meet(1))).row is None
    assert replay(again, Bed()).makespan_ns == 3 * NS_PER_MS


@pytest.mark.parametrize(
    "rows",
    [
        [meet(0, meeting=0), meet(1, meeting=0)],
        [meet(0, meeting=9), meet(1, meeting=9)],
        [meet(0, parts=1), meet(1, parts=1)],
        [meet(0, parts=2), meet(1, parts=3)],
        [meet(-1), meet(0)],
        [Record("kernel", "work", 0, 0, meeting=1, parts=1)],
    ],
)
def test_meetings_of_a_file_that_do_not_fit_are_an_error(tmp_path, rows):
    rows = [row._replace(thread=0) for row in rows]
    write_trace(tmp_path / "rows.jsonl", traced(*rows))
    with pytest.raises(TraceError, match="a part of a message must be a meet on a device"):
        replay(read_trace(tmp_path / "rows.jsonl"), Bed())
