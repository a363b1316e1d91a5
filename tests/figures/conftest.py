"""What a reader sees of a figure."""

from __future__ import annotations

import pytest
from matplotlib.text import Text


@pytest.fixture
def texts_of(monkeypatch):
    """Draws a figure and returns the texts that really appear, with their boxes in points."""
    seen = []
    draw = Text.draw

    def record(self, renderer, *args, **kwargs):
        if self.get_visible() and self.get_text().strip():
            seen.append((self, Text.get_window_extent(self, renderer)))
        return draw(self, renderer, *args, **kwargs)

    def texts(figure):
        monkeypatch.setattr(Text, "draw", record)
        figure.set_dpi(72)
        figure.canvas.draw()
        monkeypatch.setattr(Text, "draw", draw)
        return list(seen)

    return texts
