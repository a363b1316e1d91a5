"""What a reader sees: every text inside the figure, large enough, none over another."""

import pytest

from gpipe_bench.figures.ablation import ablation_figure
from gpipe_bench.figures.runs import Run
from gpipe_bench.figures.style import FONT_PT, WIDTH_IN, drawing
from gpipe_bench.figures.timeline import timeline_figure
from tests.figures.synthetic import (
    ablation_row,
    accelerator_ablation,
    cpu_ablation,
    cpu_ways,
    overlapping_events,
    published_ablation,
    step_events,
)

LONG = "a_very_long_name_of_a_device_or_argument_" * 3


def close_values():
    return [
        ablation_row(variant, k, throughput_samples_per_s=123456.25 + k / 50, peak_allocated_gib=12.0625)
        for variant in ("baseline", "dep-x-x", "dep-str-ptl")
        for k in range(3)
    ]


ABLATIONS = {
    "cpu": cpu_ablation,
    "ways of a cpu": cpu_ways,
    "accelerator": accelerator_ablation,
    "all evidence": lambda: [*cpu_ablation(), *published_ablation(), *accelerator_ablation(1, "simulated")],
    "close values": close_values,
    "all failed": lambda: [ablation_row("dep-x-x", status="oom", reason="$needed_ {9} GiB"), ablation_row("dep-x-ptl")],
    "long names": lambda: [ablation_row("baseline", device=LONG, model=LONG, throughput_samples_per_s=1.0)],
}
STEPS = {
    "one task": lambda: step_events(1, 1, copies=False),
    "cpu": lambda: overlapping_events(4, 4),
    "accelerator": lambda: step_events(8, 4, copies=True, device="cuda"),
    "many micro-batches": lambda: step_events(32, 8, copies=True),
    "many partitions": lambda: step_events(4, 64, copies=True),
}


def check(figure, texts, width_in=WIDTH_IN):
    width, height = figure.get_size_inches() * 72
    assert width == pytest.approx(width_in * 72)
    for text, box in texts:
        assert text.get_fontsize() >= FONT_PT
        assert box.x0 >= 0 and box.x1 <= width, f"{text.get_text()!r} is clipped at the side"  # noqa: PT018
        assert box.y0 >= 0 and box.y1 <= height, f"{text.get_text()!r} is clipped above or below"  # noqa: PT018
    for k, (text, box) in enumerate(texts):
        for other, area in texts[k + 1 :]:
            across = min(box.x1, area.x1) - max(box.x0, area.x0)
            along = min(box.y1, area.y1) - max(box.y0, area.y0)
            # The boxes of two lines of text may share the room that accents and descenders would need.
            assert across <= 0.5 or along <= 2, f"{text.get_text()!r} overlaps {other.get_text()!r}"


@pytest.mark.parametrize("case", ABLATIONS)
def test_texts_of_an_ablation_are_legible(case, texts_of):
    with drawing():
        figure = ablation_figure(ABLATIONS[case]())
        check(figure, texts_of(figure))


@pytest.mark.parametrize("case", STEPS)
def test_texts_of_a_timeline_are_legible(case, texts_of):
    row = ablation_row("dep-str-ptl", device=LONG if case == "cpu" else "cpu")
    with drawing():
        figure = timeline_figure(Run(row, STEPS[case](), "copy streams unsupported on cpu"), "dep-str-ptl")
        check(figure, texts_of(figure))


def words(texts):
    return " ".join(text.get_text() for text, _ in texts).replace("\u00a0", " ")


def test_an_ablation_labels_each_kind_of_evidence(texts_of):
    with drawing():
        shown = words(texts_of(ablation_figure(ABLATIONS["all evidence"]())))
    assert all(evidence in shown.split() for evidence in ("published", "simulated", "measured"))


def test_failed_runs_are_shown_with_their_reason(texts_of):
    with drawing():
        shown = words(texts_of(ablation_figure(cpu_ablation())))
    assert "unsupported, 16 variants: copy_streams needs an accelerator" in shown
    assert "oom, x-x-ptl-x-x: needed 3.1 GiB of 2.0 GiB" in shown
    assert "RuntimeError: worker of partition 2 died" in shown


def test_a_cpu_compares_ways_to_run_with_the_plain_loop(texts_of):
    with drawing():
        shown = words(texts_of(ablation_figure([*cpu_ways(), *accelerator_ablation(1, "simulated")])))
    assert "throughput (\u00d7 plain loop)" in shown
    assert "100 samples/s" in shown
    assert "1.50\u00d7" in shown
    assert "1.80\u00d7" in shown
    assert "error, zb_v: RuntimeError: a worker died" in shown
    assert "Plain loop: the nn.Sequential without a pipeline" in shown


def test_published_variants_show_median_and_gain(texts_of):
    speeds = {"baseline": (10.0, 20.0, 40.0), "dep-x-x": (30.0, 33.0, 50.0)}
    rows = [
        ablation_row(variant, k, throughput_samples_per_s=speed)
        for variant, values in speeds.items()
        for k, speed in enumerate(values)
    ]
    with drawing():
        shown = words(texts_of(ablation_figure(rows)))
    assert "20.0" in shown
    assert "33.0 (1.65\u00d7)" in shown
    assert "not run" in shown


def test_every_run_of_the_factorial_has_its_mark():
    with drawing():
        figure = ablation_figure(accelerator_ablation())
    speed = figure.axes[2]
    medians = [line for line in speed.lines if len(line.get_xdata()) == 1]
    assert sorted(float(line.get_xdata()[0]) for line in medians) == [float(x) for x in range(32)]


def test_a_timeline_says_what_is_drawn_and_how_idle_it_was(texts_of):
    run = Run(ablation_row("dep-x-ptl", 2), step_events(4, 2, copies=False), "showing dep-x-ptl")
    with drawing():
        shown = words(texts_of(timeline_figure(run, "dep-str-ptl")))
    assert "testnet: timeline of dep-str-ptl measured showing dep-x-ptl depth=5" in shown
    # Each partition computes 4 x 0.9, 3 x 0.8 and 4 x 1.7 units of the 5 x 1.2 + 4 x 3 + 2.5 that the step lasts.
    assert "measured step of repeat 2: 20.5 ms; idle 38%, ideal bubble 20%" in shown


def test_micro_batches_are_numbered_where_they_fit(texts_of):
    with drawing():
        shown = texts_of(timeline_figure(Run(ablation_row("baseline"), step_events(2, 1, copies=False)), "baseline"))
    inside = [text.get_text() for text, _ in shown if text.get_path_effects()]
    # Forward 0 1, backward 1, recomputation 0, backward 0.
    assert sorted(inside) == ["0", "0", "0", "1", "1"]
