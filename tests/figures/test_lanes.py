from hypothesis import given
from hypothesis import strategies as st

from gpipe_bench.figures.lanes import lane_keys, stack
from gpipe_bench.results.timeline import TimelineEvent
from tests.figures.synthetic import step_events


def event(start: float, end: float, i: int = 0) -> TimelineEvent:
    return TimelineEvent("cpu", "compute", "forward", i, 0, start, start, end, 0)


def test_lanes_are_compute_before_copy_for_each_partition():
    assert lane_keys(step_events(2, 3, copies=True)) == [
        (0, "compute"), (1, "compute"), (1, "copy"), (2, "compute"), (2, "copy"),
    ]  # fmt: skip


def test_a_partition_without_events_keeps_its_lane():
    assert lane_keys([TimelineEvent("cpu", "compute", "forward", 0, 2, 0, 0, 1, 0)]) == [
        (0, "compute"), (1, "compute"), (2, "compute"),
    ]  # fmt: skip


def test_only_boxes_at_the_same_time_share_the_height():
    boxes = stack([event(0, 10, 0), event(20, 40, 1), event(30, 50, 2), event(40, 60, 3), event(60, 70, 4)], 70)
    assert [(box.event.microbatch, box.track, box.tracks) for box in boxes] == [
        (0, 0, 1), (1, 0, 2), (2, 1, 2), (3, 0, 2), (4, 0, 1),
    ]  # fmt: skip


def test_an_overlap_within_the_error_of_clocks_is_a_touch():
    assert [box.tracks for box in stack([event(0, 500.4), event(500, 1000)], 1000)] == [1, 1]
    assert [box.tracks for box in stack([event(0, 510), event(500, 1000)], 1000)] == [2, 2]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=25))
def test_no_two_boxes_of_a_track_overlap_and_none_is_lost(spans):
    events = [event(start, start + length, i) for i, (start, length) in enumerate(spans)]
    boxes = stack(events, 70)
    assert sorted(box.event.microbatch for box in boxes) == list(range(len(spans)))
    for box in boxes:
        assert 0 <= box.track < box.tracks
        for other in boxes:
            if other is not box and (other.track, other.tracks) == (box.track, box.tracks):
                overlap = min(box.event.end_us, other.event.end_us) - max(box.event.start_us, other.event.start_us)
                assert overlap <= 0.07 + 1e-9
