"""Timeline events and their Chrome trace."""

import json

import pytest

from gpipe_bench.results.timeline import COMPUTE_KINDS, COPY_KINDS, KINDS, TimelineEvent, chrome_trace, write_trace
from tests.suite.cells_of import ok_result


def event(kind, i, j, start, end, *, device="cuda:0", stream="compute", nbytes=0):
    return TimelineEvent(device, stream, kind, i, j, start - 1.0, start, end, nbytes)


EVENTS = [
    event("backward", 0, 1, 30.0, 50.0, device="cuda:1"),
    event("forward", 0, 0, 0.0, 10.0, nbytes=64),
    event("copy", 0, 1, 10.0, 12.0, device="cuda:0", stream="copy", nbytes=64),
    event("forward", 0, 1, 12.0, 30.0, device="cuda:1"),
]


def trace(events):
    return chrome_trace(events, title="one step", metadata={"evidence": "measured", "variant": "dep-str-ptl"})


def named(rows, what):
    return {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == f"{what}_name"}


def test_kinds_are_computations_and_copies():
    assert set(COMPUTE_KINDS) | set(COPY_KINDS) == set(KINDS)
    assert len(KINDS) == len(set(KINDS)) == 9


def test_columns_are_those_of_the_event_table():
    columns = TimelineEvent.columns()
    assert " ".join(columns) == "device stream kind microbatch partition issue_us start_us end_us bytes"
    assert columns == tuple(EVENTS[0].to_dict())
    assert TimelineEvent(**EVENTS[0].to_dict()) == EVENTS[0]


def test_slices_in_order_of_start_with_their_facts():
    slices = [row for row in trace(EVENTS)["traceEvents"] if row["ph"] == "X"]
    assert [row["name"] for row in slices] == ["forward (0,0)", "copy (0,1)", "forward (0,1)", "backward (0,1)"]
    assert slices[1] == {
        "ph": "X",
        "name": "copy (0,1)",
        "cat": "copy",
        "pid": 1,
        "tid": 1,
        "ts": 10.0,
        "dur": 2.0,
        "args": {"microbatch": 0, "partition": 1, "device": "cuda:0", "issue_us": 9.0, "bytes": 64},
    }


def test_a_process_per_partition_named_by_where_it_computes():
    rows = trace(EVENTS)["traceEvents"]
    assert named(rows, "process") == {(0, 0): "partition 0 on cuda:0", (1, 0): "partition 1 on cuda:1"}
    assert sum(row["name"] == "process_name" for row in rows) == 2


def test_a_track_for_computation_and_for_each_kind_of_copy():
    copies = [event(kind, 0, 1, 50.0, 51.0, stream="copy") for kind in COPY_KINDS]
    rows = trace([*EVENTS, *copies])["traceEvents"]
    assert named(rows, "thread") == {
        (0, 0): "compute",
        (1, 0): "compute",
        (1, 1): "copies in",
        (1, 2): "gradients out",
        (1, 3): "skips in",
        (1, 4): "skip gradients out",
    }


def test_a_copy_on_the_sender_s_compute_stream_does_not_overlap_what_the_receiver_computes():
    rows = trace([event("forward", 0, 1, 0.0, 10.0, device="cuda:1"), event("copy", 1, 1, 5.0, 15.0)])["traceEvents"]
    assert named(rows, "thread") == {(1, 0): "compute", (1, 1): "copies in (compute stream)"}
    assert [row["tid"] for row in rows if row["ph"] == "X"] == [0, 1]


def test_copies_of_one_kind_that_overlap_are_on_two_tracks():
    copies = [event("copy", i, 1, 5.0 + i, 7.0 + i, stream="copy") for i in range(2)]
    assert named(trace(copies)["traceEvents"], "thread") == {(1, 0): "copies in", (1, 1): "copies in (2)"}


def test_a_trace_carries_title_and_metadata_and_is_plain_json():
    found = json.loads(json.dumps(trace(EVENTS)))
    assert found["otherData"] == {"title": "one step", "evidence": "measured", "variant": "dep-str-ptl"}
    assert found["displayTimeUnit"] == "ms"


def test_no_events_give_an_empty_trace():
    assert trace([])["traceEvents"] == []


def test_events_are_frozen():
    with pytest.raises(AttributeError):
        EVENTS[0].bytes = 1


def test_a_trace_says_what_it_shows(tmp_path):
    result = ok_result("dep-x-ptl", 1)
    events = [TimelineEvent(**event) for event in result.events]
    remark = "copy streams unsupported on cpu: showing dep-x-ptl"
    write_trace(tmp_path / "a" / "trace.json", "dep-str-ptl", result.row, events, remark)
    trace = json.loads((tmp_path / "a" / "trace.json").read_text())
    assert [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"] == ["forward (0,0)"]
    assert trace["otherData"] == {
        "title": f"unet dep-str-ptl (measured): {remark}",
        "evidence": "measured",
        "variant": "dep-x-ptl",
        "model": "unet depth=2;B=1;C=4;size=16;in=3;out=1;dropout=0.1",
        "device": "cpu Model X",
        "repeat": "1",
        "remark": remark,
        "placement": "0-1",
    }
