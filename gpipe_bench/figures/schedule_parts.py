"""The figures of the experiment of schedules, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from matplotlib.figure import Figure

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.schedule_bubbles import bubble_figure
from gpipe_bench.figures.schedule_timelines import read_steps, steps_figure
from gpipe_bench.figures.schedules import ScheduleCell, pareto_figure, read_cells, scaling_figure
from gpipe_bench.figures.style import draw

T = TypeVar("T")

_CELLS: Final[Mapping[str, Callable[[Sequence[ScheduleCell]], Figure]]] = {
    "pareto": pareto_figure,
    "scaling": scaling_figure,
    "bubbles": bubble_figure,
}
_STEPS: Final = "timelines"


def draw_schedules(rows_csv: Path, out_stem: Path, part: str, twins: Path | None = None) -> list[Path]:
    """Draw one of the figures.

    Args:
        rows_csv: table of rows, with those of devices and events beside it.
        out_stem: path of the figure without its suffix.
        part: ``pareto``, ``scaling``, ``bubbles`` or ``timelines``.
        twins: a table with the simulated rows of emulated ones; it need not be there.

    Returns:
        The paths written: SVG, PDF, PNG.

    Raises:
        ConfigError: a table cannot be read, or has nothing for this figure; or there is no such figure.
        OutputError: the figure cannot be written.
    """
    if part == _STEPS:
        return draw(steps_figure, _some(read_steps(rows_csv), part, rows_csv), out_stem)
    if part not in _CELLS:
        raise ConfigError([f"part must be one of {', '.join([*_CELLS, _STEPS])}, got {part!r}; use one of them"])
    cells = read_cells(rows_csv)
    if twins is not None and twins != rows_csv and twins.exists():
        cells += read_cells(twins)
    return draw(_CELLS[part], _some(cells, part, rows_csv), out_stem)


def _some(found: list[T], part: str, rows_csv: Path) -> list[T]:
    if not found:
        raise ConfigError([f"rows must have cells that ended well for {part}, got none in {rows_csv}; run them first"])
    return found
