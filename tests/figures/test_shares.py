"""The figure of shares: bars are Shapley values, diamonds the published order."""

from __future__ import annotations

import pytest

from gpipe_bench.components import Components
from gpipe_bench.figures.ablation import ABLATION
from gpipe_bench.figures.shares import SHARES
from gpipe_bench.figures.style import drawing
from tests.figures.synthetic import ablation_row
from tests.figures.test_layout import check, words

GAINS = dict(zip(Components.switched(), (1.0, 2.0, 4.0, 8.0, 16.0), strict=True))
WITH_SHARED = GAINS | {"shared": 32.0}


def additive(gains=GAINS):
    """Every component brings the same whatever the others."""
    rows = []
    for components in Components.factorial(shared=gains is WITH_SHARED):
        speed = 100 + sum(gain for name, gain in gains.items() if getattr(components, name))
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


def panels(rows):
    with drawing():
        return [axes for axes in SHARES.canvas(rows).axes if axes.axison]


def diamonds(axes, colour):
    """Place of each diamond by component."""
    return {
        round(line.get_ydata()[0] - 0.12): line.get_xdata()[0]
        for line in axes.lines
        if line.get_marker() == "D" and line.get_color() == colour
    }


def test_bars_are_the_shares():
    speed, memory = panels(additive())
    assert [bar.get_width() for bar in speed.patches] == pytest.approx(list(GAINS.values()))
    assert [bar.get_width() for bar in memory.patches] == pytest.approx([-gain for gain in GAINS.values()])


def test_where_copies_of_skips_were_switched_they_have_a_share():
    speed, memory = panels(additive(WITH_SHARED))
    assert [bar.get_width() for bar in speed.patches] == pytest.approx(list(WITH_SHARED.values()))
    assert len(memory.patches) == 6
    # 32 of the 64 combinations are not all
    assert panels(additive(WITH_SHARED)[:-1]) == []
    assert len(panels(additive())[0].patches) == 5


def test_diamonds_are_the_steps_of_the_published_order():
    speed, _ = panels([*additive(), *published()])
    # fork and join, copy streams, portals: second to fourth
    assert diamonds(speed, "white") == pytest.approx({1: 2.0, 2: 4.0, 3: 8.0})
    assert diamonds(speed, "#222222") == pytest.approx({1: 1.0, 2: 12.0, 3: 1.0})


def test_published_values_of_other_settings_are_not_mixed_in():
    speed, _ = panels([*additive(), *published(chunks=4)])
    assert diamonds(speed, "#222222") == {}


def test_the_evidence_and_the_total_are_named(texts_of):
    with drawing():
        figure = SHARES.canvas([*additive(), *published()])
        shown = texts_of(figure)
        check(figure, shown)
    assert {"simulated", "published"} <= set(words(shown).split())
    assert "throughput 100 to 131 samples/s" in words(shown)


def test_an_incomplete_factorial_says_that_there_are_no_shares(texts_of):
    with drawing():
        shown = words(texts_of(SHARES.canvas(additive()[1:])))
    assert "No shares: they need a value of every combination" in shown


def test_published_values_are_marked_in_the_simulated_block_of_the_ablation(texts_of):
    with drawing():
        figure = ABLATION.canvas([*additive(), *published()])
        shown = words(texts_of(figure))
    speed = next(axes for axes in figure.axes if axes.get_xlabel().startswith("throughput"))
    assert [line.get_xdata()[0] for line in speed.lines if line.get_marker() == "d"] == [117.0, 118.0, 130.0, 131.0]
    assert "Open diamonds: published." in shown
