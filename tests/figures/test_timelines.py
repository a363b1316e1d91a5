"""The published variants' timelines in one figure, on one axis of time."""

from __future__ import annotations

import pytest

from gpipe_bench.components import PUBLISHED
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.runs import Run
from gpipe_bench.figures.style import drawing
from gpipe_bench.figures.timelines import draw_timelines, timelines_figure
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
        shown = charts(timelines_figure(runs()))
    longest = max(event.end_us for event in runs()["baseline"].events) / 1000
    assert len(shown) == 4
    assert {axes.get_xlim() for axes in shown} == {(0.0, longest)}
    assert len({axes.get_position().width for axes in shown}) == 1


def test_only_the_last_chart_has_the_numbers_of_the_axis():
    with drawing():
        shown = charts(timelines_figure(runs()))
    assert [bool(axes.get_xlabel()) for axes in shown] == [False, False, False, True]


def test_each_variant_says_how_fast_it_is_and_what_it_adds(texts_of):
    with drawing():
        shown = words(texts_of(timelines_figure(runs())))
    assert "baseline: 10.0 samples/s, 20.0 GiB, idle" in shown
    assert "dep-str-ptl: 13.0 samples/s (1.30\u00d7), 20.0 GiB, idle" in shown
    assert "+ Fork and Join:" in shown
    assert "+ copy streams:" in shown
    assert "+ portals:" in shown
    assert "simulated" in shown.split()


def test_texts_are_legible(texts_of):
    with drawing():
        figure = timelines_figure(runs())
        check(figure, texts_of(figure))


def test_a_variant_without_a_timeline_says_why(texts_of):
    some = runs()
    failed = row("dep-x-x", None, status="oom", reason="device 0 needs 30 GiB")
    some["dep-x-x"] = Run(failed, [], "no timeline, oom: device 0 needs 30 GiB")
    with drawing():
        figure = timelines_figure(some)
        assert "dep-x-x: no timeline, oom: device 0 needs 30 GiB" in words(texts_of(figure))
    assert len(charts(figure)) == 3


def test_what_the_host_issued_before_the_step_does_not_lengthen_it():
    from dataclasses import replace

    events = [replace(event, issue_us=event.issue_us - 5000) for event in step_events(2, 2, copies=False)]
    with drawing():
        (axes,) = charts(timelines_figure({"baseline": Run(row("baseline"), events)}))
    assert axes.get_xlim()[1] == max(event.end_us for event in events) / 1000


def test_it_is_drawn_from_tables_and_from_one_evidence(tmp_path):
    rows, records = [], []
    for variant, run in runs().items():
        rows += [run.row, ablation_row(variant)]
        records += event_records(run.events, variant, evidence="simulated", cell=f"simulated-{variant}")
        records += event_records(step_events(2, 2, copies=False), variant)
    tables = write_events(tmp_path / "events.csv", records), write_rows(tmp_path / "rows.csv", rows)
    paths = draw_timelines(*tables, tmp_path / "timelines")
    assert [path.suffix for path in paths] == [".svg", ".pdf", ".png"]


def test_no_published_variant_is_refused(tmp_path):
    rows = write_rows(tmp_path / "rows.csv", [ablation_row("baseline")])
    events = write_events(tmp_path / "events.csv", event_records(step_events(1, 1, copies=False), "baseline"))
    with pytest.raises(ConfigError, match="rows must hold published variants that are simulated, got none"):
        draw_timelines(events, rows, tmp_path / "timelines")
