"""What a reader sees: every text inside the figure, large enough, with enough contrast, none over another."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from gpipe_bench.components import Components
from gpipe_bench.figures.base import COLUMN_IN, PAGE_IN, heading, lay_out
from gpipe_bench.figures.groups import setting_words
from gpipe_bench.figures.registry import FIGURES
from gpipe_bench.figures.runs import Run
from gpipe_bench.figures.style import FONT_PT, TITLE_PT, drawing
from gpipe_bench.figures.text import text_width_pt
from gpipe_bench.figures.verdicts import Verdicts
from tests.figures.marks import cut
from tests.figures.synthetic import (
    ablation_row,
    accelerator_ablation,
    cpu_ablation,
    cpu_ways,
    overlapping_events,
    published_ablation,
    step_events,
)


def shared_ablation():
    """Every combination of six components, one value each."""
    labels = [components.label for components in Components.factorial(shared=True)]
    speeds = {label: 60.0 - 0.5 * k for k, label in enumerate(labels)}
    return [ablation_row(label, throughput_samples_per_s=speed, **HERE) for label, speed in speeds.items()]


HERE = {"device": "cuda H9", "evidence": "simulated", "peak_reserved_gib": 20.0, "profile": "h9"}
LONG = "a_very_long_name_of_a_device_or_argument_" * 3


def steps(*runs):
    return {row.variant: Run(row, events, "showing another one") for row, events in runs}


def verdicts():
    kinds = ("ok", "limit", "wrong", "raises", "hangs")
    found = {("mine:1f1b", kind): kind for kind in kinds}
    return Verdicts({"mine:1f1b": "1.0+cpu", "none": "2"}, [*kinds], found, ["2.13.0"])


CASES = {
    "verdicts": ("verdicts", verdicts),
    "cpu": ("ablation", cpu_ablation),
    "ways of a cpu": ("ablation", cpu_ways),
    "accelerator": ("ablation", accelerator_ablation),
    "published": ("ablation", published_ablation),
    "64 combinations": ("ablation", shared_ablation),
    "all failed": (
        "ablation",
        lambda: [ablation_row("dep-x-x", status="oom", reason="$needed_ {9} GiB"), ablation_row("dep-x-ptl")],
    ),
    "long names": (
        "ablation",
        lambda: [ablation_row("baseline", device=LONG, model=LONG, throughput_samples_per_s=123456.25)],
    ),
    "incomplete": ("shares", cpu_ablation),
    "one task": ("timelines", lambda: steps((ablation_row("dep-x-x"), step_events(1, 1, copies=False)))),
    "overlaps": ("timelines", lambda: steps((ablation_row("baseline", device=LONG), overlapping_events(4, 4)))),
    "many partitions": ("timelines", lambda: steps((ablation_row("dep-x-x"), step_events(4, 64, copies=True)))),
    "no step": ("timelines", lambda: steps((ablation_row("baseline", status="oom", reason="needed 9 GiB"), []))),
}


def words(texts):
    return " ".join(text.get_text() for text, _ in texts).replace("\u00a0", " ")


def luminance(colour):
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def check(figure, texts):
    width, height = figure.get_size_inches() * 72
    assert width in (COLUMN_IN * 72, PAGE_IN * 72)
    pixels = np.asarray(figure.canvas.buffer_rgba())[::-1, :, :3]
    for text, box in texts:
        said = repr(text.get_text())
        assert text.get_fontsize() >= FONT_PT
        assert box.x0 >= -0.5 and box.x1 <= width + 0.5, f"{said} is clipped at the side"  # noqa: PT018
        assert box.y0 >= -0.5 and box.y1 <= height + 0.5, f"{said} is clipped above or below"  # noqa: PT018
        own = pixels[max(int(box.y0), 0) : int(box.y1) + 1, max(int(box.x0), 0) : int(box.x1) + 1].reshape(-1, 3)
        # What most of the pixels around the letters have is the ground.
        ground = Counter(map(tuple, own)).most_common(1)[0][0]
        lights = sorted((luminance(to_rgb(text.get_color())), luminance([part / 255 for part in ground])))
        assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5, f"{said} has too little contrast"
    for k, (text, box) in enumerate(texts):
        for other, area in texts[k + 1 :]:
            beside = min(box.x1, area.x1) - max(box.x0, area.x0)
            along = min(box.y1, area.y1) - max(box.y0, area.y0)
            # The boxes of two lines of text may share the room that accents and descenders would need.
            assert beside <= 0.5 or along <= 2.5, f"{text.get_text()!r} overlaps {other.get_text()!r}"


@pytest.mark.parametrize("case", CASES)
def test_texts_are_legible(case, texts_of):
    kind, data = CASES[case]
    with drawing():
        figure = FIGURES[kind].canvas(data())
        check(figure, texts_of(figure))


@pytest.mark.parametrize("case", CASES)
def test_the_edge_of_the_axes_cuts_no_mark(case):
    kind, data = CASES[case]
    with drawing():
        assert cut(FIGURES[kind].canvas(data())) == []


def test_badges_leave_the_title_its_first_line():
    title = "testnet: emulated memory is 15.0 to 18.5 % above the published"
    for kinds in (["measured"], ["published", "simulated"], ["published", "simulated", "emulated"]):
        with drawing():
            figure = lay_out([heading(title, kinds, "", COLUMN_IN)], COLUMN_IN)
        first, *_ = (text.get_text() for text in figure.axes[0].texts)
        assert text_width_pt(first, TITLE_PT, bold=True) > COLUMN_IN * 72 * 0.6


@pytest.mark.parametrize("kind", FIGURES)
def test_a_figure_says_what_it_shows(kind):
    figure = FIGURES[kind]
    assert figure.name == kind
    assert 60 < len(figure.caption) < 400
    assert figure.caption.endswith(".")
    assert figure.sources[0] == ""


def test_failed_runs_are_shown_with_their_reason(texts_of):
    with drawing():
        shown = words(texts_of(FIGURES["ablation"].canvas(cpu_ablation())))
    assert "unsupported, 16 variants: copy_streams needs an accelerator" in shown
    assert "oom, x-x-ptl-x-x: needed 3.1 GiB of 2.0 GiB" in shown
    assert "RuntimeError: worker of partition 2 died" in shown


@pytest.mark.parametrize(("devices", "words"), [(1, "4 partitions on one GPU"), (4, "4 partitions")])
def test_a_setting_says_that_all_partitions_share_one_gpu(devices, words):
    row = ablation_row("baseline", partitions=4, device="cuda Imaginary H9", device_count=devices)
    setting = setting_words(row).replace("\u00a0", " ").split("; ")[-1]
    assert setting.split(", ")[0] == words


def test_a_cpu_compares_ways_to_run_with_the_plain_loop(texts_of):
    with drawing():
        shown = words(texts_of(FIGURES["ablation"].canvas(cpu_ways())))
    assert "throughput\n(\u00d7 plain loop)" in shown
    assert "pipelines train up to 1.80\u00d7 as fast as the plain loop (1f1b)" in shown
    assert "one thread per partition's operators" in shown.replace("\u00a0", " ")
    assert "100 samples/s" in shown
    assert "1.80\u00d7" in shown
    assert "error, zb_v: RuntimeError: a worker died" in shown


def test_published_variants_show_median_and_gain_from_zero_on(texts_of):
    speeds = {"baseline": (10.0, 20.0, 40.0), "dep-x-x": (30.0, 33.0, 50.0)}
    rows = [
        ablation_row(variant, k, throughput_samples_per_s=speed)
        for variant, values in speeds.items()
        for k, speed in enumerate(values)
    ]
    with drawing():
        figure = FIGURES["ablation"].canvas(rows)
        shown = words(texts_of(figure))
    assert "33.0 (1.65\u00d7)" in shown
    assert "not run" in shown
    assert [axes.get_xlim()[0] for axes in figure.axes if axes.axison] == [0, 0]


def test_utilisation_stands_beside_throughput_and_memory(texts_of):
    rows = [
        ablation_row(variant, evidence="simulated", device="cuda X", throughput_samples_per_s=speed,
                     peak_reserved_gib=memory, utilization_fraction=share)
        for variant, speed, memory, share in (("baseline", 10.0, 8.0, 0.42), ("dep-str-ptl", 25.0, 4.0, 0.7))
    ]  # fmt: skip
    with drawing():
        figure = FIGURES["ablation"].canvas(rows)
        shown = words(texts_of(figure))
    assert "dep-str-ptl trains 2.50\u00d7 as fast as baseline, in 0.50\u00d7 its memory" in shown
    assert [axes.get_xlabel() for axes in figure.axes if axes.get_xlabel()] == [
        *("throughput\n(samples/s)", "peak reserved\n(GiB)", "device\nutilisation (%)"),
    ]
    assert {"42.0", "70.0"} <= {*shown.split()}
    assert "Utilisation: share of the step in which a task or a copy ran" in shown


def test_a_bar_of_ways_says_that_it_is_of_ratios(texts_of):
    with drawing():
        shown = words(texts_of(FIGURES["ablation"].canvas(cpu_ways())))
    assert "bar: from the least to the most of them; small circles: each repeat over the plain loop" in shown


def test_every_run_of_the_factorial_has_its_mark():
    with drawing():
        figure = FIGURES["ablation"].canvas(accelerator_ablation())
    speed = next(axes for axes in figure.axes if axes.get_ylabel().startswith("throughput"))
    assert max(float(line.get_ydata()[0]) for line in speed.lines) < 0.95 * speed.get_ylim()[1]
    medians = [line for line in speed.lines if len(line.get_xdata()) == 1]
    assert sorted(float(line.get_xdata()[0]) for line in medians) == [float(x) for x in range(32)]


def test_dots_of_64_combinations_do_not_touch():
    with drawing():
        figure = FIGURES["ablation"].canvas(shared_ablation())
    matrix = next(axes for axes in figure.axes if "portals" in {tick.get_text() for tick in axes.get_yticklabels()})
    first, second = matrix.transData.transform([(0, 0), (1, 0)])
    assert {line.get_markersize() for line in matrix.lines} <= {2.34375}
    assert (second - first)[0] * 72 / figure.dpi > 2.34375
