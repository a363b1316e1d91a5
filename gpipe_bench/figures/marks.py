"""The marks of the ablation: one shape and colour per published variant, one shape per kind of failure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.transforms import Transform

from gpipe_bench.figures.style import INK, OKABE_ITO
from gpipe_bench.results.intervals import Interval


@dataclass(frozen=True, slots=True)
class Mark:
    """Shape, colour and size in points of a variant's median."""

    shape: str
    colour: str
    size_pt: float


VARIANT_MARKS: Final = {
    "baseline": Mark("o", OKABE_ITO["black"], 4.0),
    "dep-x-x": Mark("^", OKABE_ITO["orange"], 4.6),
    "dep-str-x": Mark("s", OKABE_ITO["blue"], 3.8),
    "dep-str-ptl": Mark("D", OKABE_ITO["vermilion"], 3.8),
}
OTHER_MARK: Final = Mark("o", "#8A8A8A", 2.6)
FAILURE_MARKS: Final = {"unsupported": "x", "oom": "v", "error": "X", "skipped": "_"}


def draw_interval(axes: Axes, interval: Interval, scale: float, y: float, mark: Mark) -> None:
    """A median at height ``y`` with its interval, both times ``scale``."""
    if not math.isnan(interval.low):
        axes.plot([scale * interval.low, scale * interval.high], [y, y], color=mark.colour, solid_capstyle="butt")
        for end in (interval.low, interval.high):
            axes.plot([scale * end] * 2, [y - 0.09, y + 0.09], color=mark.colour)
    draw_median(axes, scale * interval.median, y, mark)


def draw_median(axes: Axes, x: float, y: float, mark: Mark) -> None:
    """The filled mark of a variant; a thin white rim parts it from its neighbours."""
    style: dict[str, Any] = {
        "color": mark.colour,
        "markersize": mark.size_pt,
        "markeredgecolor": "white",
        "markeredgewidth": 0.3,
    }
    axes.plot(x, y, mark.shape, zorder=3, **style)


def draw_samples(axes: Axes, samples: Sequence[float], scale: float, y: float, mark: Mark) -> None:
    """Single repeats as small open circles at height ``y``."""
    style: dict[str, Any] = {
        "markerfacecolor": "none",
        "markeredgecolor": mark.colour,
        "markersize": 2.2,
        "markeredgewidth": 0.5,
    }
    axes.plot([scale * sample for sample in samples], [y] * len(samples), "o", clip_on=False, **style)


def draw_failure(axes: Axes, x: float, y: float, status: str, transform: Transform) -> None:
    """The mark of a run that gave no value."""
    style: dict[str, Any] = {"color": INK, "markersize": 3.5, "markeredgewidth": 0.9, "clip_on": False}
    axes.plot(x, y, FAILURE_MARKS[status], transform=transform, **style)
