"""Many rectangles of one look as one shape: a hatch is then drawn once, not once for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

Box = tuple[float, float, float, float]
"""Left, bottom, width and height, in the units of the axes."""


def add_boxes(axes: Axes, boxes: Sequence[Box], **look: Any) -> None:
    """Draw rectangles that look alike; nothing where there are none."""
    if boxes:
        unit = Path.unit_rectangle()
        paths = [unit.transformed(Affine2D().scale(w, h).translate(x, y)) for x, y, w, h in boxes]
        axes.add_patch(PathPatch(Path.make_compound_path(*paths), **look))
