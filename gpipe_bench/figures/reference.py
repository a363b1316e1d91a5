"""All figures of the reference tables, drawn by one command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import Selection
from gpipe_bench.figures.registry import FIGURES
from gpipe_bench.results.catalogue import REFERENCE, DrawnFigure, reference_figures
from gpipe_bench.util.processes import spread


def draw_reference(out: Path, folder: Path = REFERENCE, processes: int = 1) -> Iterator[list[Path]]:
    """Draw the figures, several at once where there are processes for them.

    Args:
        out: folder of the figures.
        folder: of the reference tables.
        processes: how many draw at once; see :func:`gpipe_bench.util.processes.spread`.

    Yields:
        The paths of each figure as it is done.

    Raises:
        ConfigError: there is no table, or one cannot be read.
        OutputError: a figure cannot be written.
    """
    figures = reference_figures(folder)
    if not figures:
        raise ConfigError([f"reference must hold tables of rows, got none below {folder}; restore the folder"])
    yield from spread(lambda figure: _draw(figure, out), figures, processes)


def _draw(figure: DrawnFigure, out: Path) -> list[Path]:
    return FIGURES[figure.kind].draw(figure.table, out / figure.place / figure.name, Selection(figure.evidence))
