"""The published variants' timelines in one figure, on one axis of time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpipe_bench.components import PUBLISHED
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import Selection
from gpipe_bench.figures.runs import Run
from gpipe_bench.figures.style import drawing
from gpipe_bench.figures.timelines import TIMELINES
from tests.figures.synthetic import ablation_row, event_records, step_events, write_events, write_rows
from tests.figures.test_layout import check, words


def row(variant, speed=10.0, **changes):
    values = {"evidence": "simulated", "throughput_samples_per_s": speed, "peak_reserved_gib": 20.0}
    return ablation_row(variant, **{**values, **changes})


def runs():
    """Each variant a little faster than the one before."""
    return {
        variant: Run(row(variant, 10.0 + k), step_events(8, 4, copies=k > 1, device="cuda", unit_us=1000.0 - 100 * k))
        for k, variant in enumerate(PUBLISHED)
    }


def charts(figure):
    return [axes for axes in figure.axes if axes.axison]


def test_all_variants_share_the_axis_of_the_longest_step():
    with drawing():
        shown = charts(TIMELINES.canvas(runs()))
    longest = max(event.end_us for event in runs()["baseline"].events) / 1000
    assert len(shown) == 4
    assert {axes.get_xlim() for axes in shown} == {(0.0, longest)}
    assert len({axes.get_position().width for axes in shown}) == 1
    assert [bool(axes.get_xlabel()) for axes in shown] == [False, False, False, True]


def test_each_variant_says_how_fast_it_is_and_what_it_adds(texts_of):
    with drawing():
        figure = TIMELINES.canvas(runs())
        texts = texts_of(figure)
        check(figure, texts)
    shown = words(texts)
    assert "10.0 samples/s, 20.0 GiB, idle" in shown
    assert "13.0 samples/s (1.30\u00d7), 20.0 GiB, idle" in shown
    assert "ideal bubble 27%" in shown
    assert all(f"+ {what}:" in shown for what in ("Fork and Join", "copy streams", "portals"))
    assert "simulated" in shown.split()


def test_micro_batches_are_numbered_where_they_fit():
    with drawing():
        (axes,) = charts(TIMELINES.canvas({"baseline": Run(row("baseline"), step_events(2, 1, copies=False))}))
    # Forward 0 1, backward 1, recomputation 0, backward 0.
    assert sorted(text.get_text() for text in axes.texts if text.get_bbox_patch()) == ["0", "0", "0", "1", "1"]


def test_a_variant_without_a_timeline_says_why(texts_of):
    some = runs()
    failed = row("dep-x-x", None, status="oom", reason="device 0 needs 30 GiB")
    some["dep-x-x"] = Run(failed, [], "no timeline, oom: device 0 needs 30 GiB")
    with drawing():
        figure = TIMELINES.canvas(some)
        assert "dep-x-x: no timeline, oom: device 0 needs 30 GiB" in words(texts_of(figure))
    assert len(charts(figure)) == 3


def test_what_the_host_issued_before_the_step_does_not_lengthen_it():
    events = [replace(event, issue_us=event.issue_us - 5000) for event in step_events(2, 2, copies=False)]
    with drawing():
        (axes,) = charts(TIMELINES.canvas({"baseline": Run(row("baseline"), events)}))
    assert axes.get_xlim()[1] == max(event.end_us for event in events) / 1000


def test_it_is_drawn_from_tables_of_one_evidence_and_flavour(tmp_path):
    rows, records = [], []
    for variant, run in runs().items():
        for k, flavour in enumerate(("current", "published")):
            cell = f"{flavour}-{variant}"
            rows += [replace(run.row, cell=cell, flavour=flavour), ablation_row(variant)]
            events = step_events(2 + k, 2, copies=False)
            records += event_records(events, variant, evidence="simulated", cell=cell)
        records += event_records(step_events(9, 2, copies=False), variant)
    write_events(tmp_path / "rows_events.csv", records)
    found = TIMELINES.read(write_rows(tmp_path / "rows.csv", rows), Selection("simulated"))
    assert [*found] == list(PUBLISHED)
    assert {max(event.microbatch for event in run.events) for run in found.values()} == {2}


def test_no_published_variant_is_refused(tmp_path):
    rows = write_rows(tmp_path / "rows.csv", [ablation_row("dep-x-ptl")])
    write_events(tmp_path / "rows_events.csv", event_records(step_events(1, 1, copies=False), "dep-x-ptl"))
    with pytest.raises(ConfigError, match="rows must hold published variants that are measured, got none"):
        TIMELINES.draw(rows, tmp_path / "timelines")
    assert TIMELINES.draw(rows, tmp_path / "timelines", Selection(variant="dep-x-ptl"))
