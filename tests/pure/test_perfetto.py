"""Slices of one track never overlap in part, whatever ran when."""

from hypothesis import given
from hypothesis import strategies as st

from gpipe_bench.results.perfetto import Slice, perfetto_trace
from tests.overlaps import partial_overlaps

TRACKS = ("compute", "copies", "skips")
NAMES = {0: "first", 1: "second"}
TIMES = st.one_of(st.integers(-50, 50).map(lambda ns: ns / 1000), st.floats(-1e3, 1e7, allow_nan=False))


@st.composite
def slices(draw):
    ends = sorted((draw(TIMES), draw(TIMES)))
    return Slice(draw(st.sampled_from(list(NAMES))), draw(st.sampled_from(TRACKS)), "x", "kind", *ends, {"fact": 1})


def trace(drawn):
    return perfetto_trace(drawn, processes=NAMES, tracks=TRACKS, facts={"title": "one step"})


def shown(drawn):
    """Names of tracks, in their order, and of the track of each slice."""
    rows = trace(drawn)["traceEvents"]
    names = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    return list(names.values()), [names[row["pid"], row["tid"]] for row in rows if row["ph"] == "X"]


def one(track, start, end):
    return Slice(0, track, "x", "kind", start, end, {})


@given(st.lists(slices(), max_size=20))
def test_no_two_slices_of_a_track_overlap_in_part(drawn):
    found = trace(drawn)
    assert partial_overlaps(found) == []
    assert sum(row["ph"] == "X" for row in found["traceEvents"]) == len(drawn)


def test_a_track_whose_slices_overlap_is_drawn_as_several():
    drawn = [one("copies", 4, 6), one("copies", 1, 3), one("copies", 2, 5), one("copies", 2.5, 7), one("compute", 1, 9)]
    tracks, each = shown(drawn)
    assert tracks == ["compute", "copies", "copies (2)", "copies (3)"]
    assert each == ["copies", "compute", "copies (2)", "copies (3)", "copies"]


def test_slices_that_follow_one_another_share_a_track():
    assert shown([one("copies", 1.001, 1.003), one("copies", 1.003, 1.1)])[0] == ["copies"]


def test_whole_nanoseconds_are_what_perfetto_reads():
    drawn = [one("copies", ns / 1000, (ns + 1) / 1000) for ns in range(2000)]
    rows = [row for row in trace(drawn)["traceEvents"] if row["ph"] == "X"]
    assert [(int(row["ts"] * 1000.0), int(row["dur"] * 1000.0)) for row in rows] == [(ns, 1) for ns in range(2000)]
