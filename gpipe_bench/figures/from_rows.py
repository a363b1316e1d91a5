"""From a table of rows to the files of a figure: what every such figure has in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from gpipe_bench.figures.style import drawing, save
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.rows import Row


def draw_rows(figure_of: Callable[[Sequence[Row]], Figure], rows_csv: Path, out_stem: Path) -> list[Path]:
    """Draw the figure of a result table.

    Args:
        figure_of: makes the figure of some rows.
        rows_csv: rows with the columns of :class:`gpipe_bench.rows.Row`.
        out_stem: path of the figure without its suffix.

    Returns:
        The paths written: SVG, PDF, PNG.

    Raises:
        ConfigError: the table cannot be read, lacks a column, or ``figure_of`` refuses it.
        OutputError: the figure cannot be written.
    """
    rows = read_rows(rows_csv)
    with drawing():
        return save(figure_of(rows), out_stem)
