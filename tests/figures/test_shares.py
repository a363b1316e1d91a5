"""The figure of shares: bars are Shapley values, diamonds the order of print."""

from __future__ import annotations

import pytest

from gpipe_bench.components import Components
from gpipe_bench.figures.ablation import ablation_figure
from gpipe_bench.figures.shares import shares_figure
from gpipe_bench.figures.style import draw, drawing
from gpipe_bench.figures.tables import read_rows
from tests.figures.synthetic import ablation_row, accelerator_ablation, cpu_ablation, write_rows
from tests.figures.test_layout import check, words

GAINS = dict(zip(Components.__slots__, (1.0, 2.0, 4.0, 8.0, 16.0), strict=True))


def additive():
    """Every component brings the same whatever the others."""
    rows = []
    for components in Components.factorial():
        speed = 100 + sum(gain for name, gain in GAINS.items() if getattr(components, name))
        memory = {"peak_reserved_gib": 200 - speed, "peak_allocated_gib": 1.0}
        rows.append(
            ablation_row(components.label, evidence="simulated", throughput_samples_per_s=float(speed), **memory)
        )
    return rows


def published(**changes):
    speeds = {"baseline": 117.0, "dep-x-x": 118.0, "dep-str-x": 130.0, "dep-str-ptl": 131.0}
    return [
        ablation_row(
            variant, None, evidence="published", throughput_samples_per_s=speed, peak_reserved_gib=80.0, **changes
        )
        for variant, speed in speeds.items()
    ]


def bars(axes):
    return [bar.get_width() for bar in axes.patches]


def diamonds(axes, colour):
    """Place of each diamond by component."""
    return {
        round(line.get_ydata()[0] - 0.12): line.get_xdata()[0]
        for line in axes.lines
        if line.get_marker() == "D" and line.get_color() == colour
    }


def test_bars_are_the_shares():
    with drawing():
        speed, memory = shares_figure(additive()).axes[:2]
    assert bars(speed) == pytest.approx(list(GAINS.values()))
    assert bars(memory) == pytest.approx([-gain for gain in GAINS.values()])


def test_diamonds_are_the_steps_of_print():
    with drawing():
        speed = shares_figure([*additive(), *published()]).axes[0]
    # fork and join, copy streams, portals: second to fourth
    assert diamonds(speed, "white") == pytest.approx({1: 2.0, 2: 4.0, 3: 8.0})
    assert diamonds(speed, "#000000") == pytest.approx({1: 1.0, 2: 12.0, 3: 1.0})


def test_published_values_of_other_settings_are_not_mixed_in():
    with drawing():
        speed = shares_figure([*additive(), *published(chunks=4)]).axes[0]
    assert diamonds(speed, "#000000") == {}


@pytest.mark.parametrize(
    "rows",
    [
        lambda: [*additive(), *published()],
        lambda: accelerator_ablation(3),
        lambda: [*accelerator_ablation(1, "simulated"), *accelerator_ablation(2)],
        cpu_ablation,
    ],
    ids=["published", "measured", "both", "incomplete"],
)
def test_texts_are_legible(rows, texts_of):
    with drawing():
        figure = shares_figure(rows())
        check(figure, texts_of(figure))


def test_the_evidence_and_the_total_are_named(texts_of):
    with drawing():
        shown = words(texts_of(shares_figure(additive())))
    assert "simulated" in shown.split()
    assert "throughput 100 to 131 samples/s" in shown.replace("\n", " ")


def test_an_incomplete_factorial_says_that_there_are_no_shares(texts_of):
    with drawing():
        shown = words(texts_of(shares_figure(additive()[1:])))
    assert "No shares: they need a value of every combination" in shown


def test_published_values_are_marked_in_the_simulated_block_of_the_ablation(texts_of):
    with drawing():
        figure = ablation_figure([*additive(), *published()])
        shown = words(texts_of(figure))
    marks = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() == "d"]
    assert marks == [117.0, 118.0, 130.0, 131.0]
    assert "Open diamonds: the published values." in shown
    assert shown.count("ablation") == 1


def test_figures_are_three_files(tmp_path):
    paths = draw(shares_figure, read_rows(write_rows(tmp_path / "rows.csv", additive())), tmp_path / "shares")
    assert [path.name for path in paths] == ["shares.svg", "shares.pdf", "shares.png"]
