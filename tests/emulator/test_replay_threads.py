"""Which rows of other host threads come first in a replay, and what comes of rows that never come."""

from __future__ import annotations

import pytest

from gpipe_bench.errors import TraceError
from gpipe_bench.machine.replay import replay
from gpipe_bench.machine.trace import Record
from tests.emulator.bed.rows import NS_PER_MS, Bed, traced

# A launch takes a millisecond, kernels none.
MS = Bed(launch_ns=NS_PER_MS)


def launch(thread, launches=1, device=0, **options):
    return Record("kernel", "work", device, 0, thread=thread, launches=launches, duration=0, **options)


def row(kind, thread, version=0, **options):
    return Record(kind, thread=thread, version=version, **options)


def arrivals(*records, machine=MS):
    """When the thread of each row came to it, in milliseconds."""
    return [time // NS_PER_MS for time in replay(traced(*records), machine).host_ns]


def test_threads_go_on_by_themselves():
    assert arrivals(launch(0), launch(0), launch(1), launch(1)) == [0, 1, 0, 1]


def test_threads_that_share_an_interpreter_launch_in_turns():
    locked = Bed(launch_ns=NS_PER_MS, lock_permille=1000)
    assert arrivals(launch(0), launch(0), launch(1), launch(1), machine=locked) == [0, 1, 0, 2]


def test_an_await_comes_after_its_signal():
    assert arrivals(launch(0, 5), row("signal", 0, 1), launch(0), row("await", 1, 1), launch(1)) == [0, 5, 5, 5, 5]


def test_an_await_of_what_was_signalled_before_does_not_pause():
    assert arrivals(row("signal", 0, 1), launch(1, 5), row("await", 1, 1), launch(1)) == [0, 0, 5, 5]


def test_an_await_of_a_signal_from_before_the_trace_does_not_pause():
    assert arrivals(row("await", 1, 7), launch(1)) == [0, 0]


def test_a_hand_over_can_be_passed_on():
    rows = [launch(0, 2), row("signal", 0, 1), row("await", 1, 1), launch(1, 3), row("signal", 1, 2)]
    assert arrivals(*rows, row("await", 2, 2), launch(2), row("await", 0, 2)) == [0, 2, 2, 2, 5, 5, 5, 5]


@pytest.mark.parametrize("kind", ["wait", "sync_event"])
def test_who_waits_for_an_event_comes_after_its_record(kind):
    waits = Record(kind, "", 1 if kind == "wait" else -1, 0, thread=1, version=1)
    assert arrivals(launch(0, 5), Record("record", "", 0, 0, version=1), waits, launch(1)) == [0, 5, 5, 5]


def test_a_backward_pass_begins_after_its_call_and_ends_after_its_rows():
    began = [launch(0, 2), row("backward", 0, 1)]
    passes = [launch(1, 3, backward=1), launch(2, 4, backward=1), launch(1, 3, backward=1)]
    assert arrivals(*began, *passes, row("backward_end", 0, 1), launch(0)) == [0, 2, 2, 2, 5, 8, 8]


def test_events_belong_to_backward_passes_too():
    event = Record("record", "", 0, 0, thread=1, version=2, backward=1)
    assert arrivals(launch(0, 2), row("backward", 0, 1), event, row("backward_end", 0, 1)) == [0, 2, 2, 2]


def test_backward_passes_at_one_time_do_not_wait_for_each_other():
    rows = [row("backward", 0, 1), row("backward", 1, 2), launch(2, 5, backward=1), launch(3, 2, backward=2)]
    assert arrivals(*rows, row("backward_end", 1, 2), row("backward_end", 0, 1)) == [0, 0, 0, 0, 2, 5]


def test_a_backward_pass_ends_after_those_that_were_run_for_it():
    inner = [row("backward", 1, 2, backward=1), launch(2, 3, backward=2), row("backward_end", 1, 2, backward=1)]
    rows = [row("backward", 0, 1), launch(1, 1, backward=1), *inner, row("backward_end", 0, 1)]
    assert arrivals(*rows) == [0, 0, 1, 1, 4, 4]


def test_who_reads_a_block_comes_after_who_wrote_it():
    assert arrivals(launch(0, 5, writes=(1,)), launch(0), launch(1, reads=(1,))) == [0, 5, 5]


def test_readers_do_not_wait_for_each_other():
    assert arrivals(launch(0, 5, reads=(1,)), launch(1, reads=(1,))) == [0, 0]


def test_who_writes_a_block_comes_after_all_who_read_it():
    rows = [launch(0, 5, reads=(1,)), launch(1, 7, reads=(1,)), launch(2, writes=(1,))]
    assert arrivals(*rows) == [0, 0, 7]


def test_who_reads_a_block_comes_after_its_allocation():
    made = Record("alloc", "", 0, 0, nbytes=8, writes=(1,))
    assert arrivals(launch(0, 5), made, launch(1, reads=(1,))) == [0, 5, 5]


def test_a_block_is_freed_after_all_who_touched_it():
    freed = Record("free", "", 0, 0, thread=1, nbytes=8, writes=(1,))
    assert arrivals(launch(0, 5, reads=(1,)), freed, launch(1)) == [0, 5, 5]


def test_record_stream_comes_after_the_write():
    used = Record("record_stream", "", 0, 1, thread=1, writes=(1,))
    assert arrivals(launch(0, 5, writes=(1,)), used) == [0, 5]


def test_blocks_of_the_host_order_threads_too():
    made = Record("alloc", "", -1, 0, nbytes=8, writes=(1,))
    assert arrivals(launch(0, 5), made, launch(1, reads=(1,))) == [0, 5, 5]


def test_numbers_of_threads_may_have_gaps():
    rows = [launch(40, 5, writes=(1,)), launch(7, reads=(1,))]
    assert arrivals(*rows) == [0, 5]


def test_rows_that_wait_for_each_other_are_named():
    rows = [launch(0), row("await", 0, 2), row("await", 3, 1), row("signal", 0, 1), row("signal", 3, 2)]
    message = (
        r"got: row 1 \(await 2 of thread 0\) waits for row 4 \(signal 2 of thread 3\); row 2 .* for row 3 .*; record"
    )
    with pytest.raises(TraceError, match=message):
        replay(traced(*rows), MS)


def test_only_some_of_many_rows_are_named():
    rows = [row("await", 1 + place, 1) for place in range(9)] + [row("await", 0, 2), row("signal", 0, 1)]
    with pytest.raises(TraceError) as caught:
        replay(traced(*rows, row("signal", 1, 2)), MS)
    assert str(caught.value).count("waits for") == 5


def test_results_do_not_depend_on_how_rows_of_threads_were_interleaved():
    #   thread 0   launches, hands over          thread 1   launches itself, then what was handed over
    one = [launch(0, 2), row("signal", 0, 1), launch(0, 2)]
    other = [launch(1, 3, device=1), row("await", 1, 1), launch(1, 3, device=1)]
    assert arrivals(*one, *other) == [0, 2, 2, 0, 3, 3]
    assert arrivals(other[0], *one, *other[1:]) == [0, 0, 2, 2, 3, 3]


# --- nodes of autograd: numbers from 100, the other digits say which ---


def node(thread, rank, number, *waiting, backward=1):
    """A node, and those that wait for it."""
    return Record(
        "node", thread=thread, nbytes=rank, writes=(100 + number,), reads=tuple(100 + one for one in waiting),
        backward=backward,
    )  # fmt: skip


def ran(*records):
    """Numbers of the nodes, in the order in which their threads came to them."""
    times = arrivals(*records)
    found = [(time, place) for place, time in enumerate(times) if records[place].kind == "node"]
    return [records[place].writes[0] - 100 for _, place in sorted(found)]


CALL = [row("backward", 0, 1)]


def work(thread, launches=1, **options):
    return launch(thread, launches, backward=1, **options)


def test_of_nodes_that_are_ready_the_one_with_the_highest_number_goes_first():
    nodes = [node(1, 3, 1), work(1), node(1, 5, 2), work(1), node(1, 4, 3), work(1)]
    assert ran(*CALL, *nodes, row("backward_end", 0, 1)) == [2, 3, 1]


def test_a_node_waits_for_those_that_give_it_gradients():
    #   thread 1: 1, then 3 or 4          3 waits for 2 of thread 2, for 5 ms; it came first in the trace
    nodes = [node(1, 9, 1, 4), work(1), node(2, 9, 2, 3), work(2, 5), node(1, 8, 3), work(1), node(1, 7, 4), work(1)]
    assert ran(*CALL, *nodes) == [1, 2, 4, 3]


def test_a_node_is_not_interrupted():
    nodes = [node(1, 1, 1), work(1, 9), node(2, 9, 2, 3), work(2, 5), node(1, 8, 3), work(1)]
    assert arrivals(*CALL, *nodes)[5] == 9


def test_nodes_of_nested_passes_go_first():
    nested = [row("backward", 2, 2, backward=1), node(1, 1, 2, backward=2), launch(1, backward=2)]
    assert ran(*CALL, node(1, 9, 3), work(1), node(1, 5, 1), work(1), *nested) == [3, 2, 1]


def test_sums_of_gradients_wait_for_no_data():
    nodes = [node(1, 9, 1), work(1, 5, writes=(7,)), node(2, 9, 2), work(2, reads=(7,), sums=True), work(2)]
    assert arrivals(*CALL, *nodes)[1:] == [0, 0, 0, 0, 1]


def test_a_thread_does_not_wait_for_memory_that_another_one_still_uses():
    made = Record("alloc", "", 0, 0, nbytes=8, writes=(1,))
    freed = Record("free", "", 0, 0, thread=1, nbytes=8, writes=(1,))
    rows = [made, launch(0, 5), launch(0, reads=(1,)), launch(1), freed, launch(1)]
    assert arrivals(*rows) == [0, 0, 5, 0, 1, 1]


def test_the_calling_thread_goes_on_when_all_nodes_have_run():
    nodes = [node(1, 1, 1), work(1, 5), node(0, 1, 2), work(0), row("backward_end", 0, 1), launch(0)]
    assert arrivals(*CALL, *nodes)[-2:] == [5, 5]
