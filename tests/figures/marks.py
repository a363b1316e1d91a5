"""Which marks and boxes of a figure the edge of their axes cuts."""

from __future__ import annotations

from math import isnan

from matplotlib.markers import MarkerStyle

from gpipe_bench.figures.style import save


def noting_cuts(monkeypatch):
    """What is cut in the figures that are saved from now on."""
    found = []

    def noted(figure, *more):
        paths = save(figure, *more)
        found.extend(cut(figure))
        return paths

    monkeypatch.setattr("gpipe_bench.figures.base.save", noted)
    return found


def cut(figure):
    """The axis and the shape of each mark and box that is not drawn as a whole; the figure is drawn with 72 dpi."""
    figure.set_dpi(72)
    figure.canvas.draw()
    found = []
    for axes in figure.axes:
        name, box = axes.get_xlabel() or axes.get_ylabel(), axes.bbox
        for line in (line for line in axes.lines if line.get_clip_on() and line.get_marker() not in ("None", "|")):
            shape = MarkerStyle(line.get_marker())
            ends = shape.get_path().transformed(shape.get_transform()).get_extents()
            half = line.get_markersize() * max(ends.x1, -ends.x0)
            for x, y in axes.transData.transform(line.get_xydata()):
                room = min(x - box.x0, box.x1 - x, y - box.y0, box.y1 - y)
                if not isnan(room) and room < half - 0.3:
                    found.append((name, line.get_marker()))
        for patch in (patch for patch in axes.patches if patch.get_clip_on()):
            own = patch.get_window_extent()
            if own.width >= 1 and (own.x0 < box.x0 - 0.5 or own.x1 > box.x1 + 0.5):
                found.append((name, type(patch).__name__))
    return found
