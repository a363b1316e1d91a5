"""All figures by their names, and those of the reference tables by one call; studies draw their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.ablation import ABLATION
from gpipe_bench.figures.advice import ADVICE
from gpipe_bench.figures.base import Figure, Selection
from gpipe_bench.figures.networks import NETWORKS
from gpipe_bench.figures.published_tables import TABLES
from gpipe_bench.figures.schedule_bubbles import BUBBLES
from gpipe_bench.figures.schedule_timelines import STEPS
from gpipe_bench.figures.schedules import PARETO, SCALING
from gpipe_bench.figures.shares import SHARES
from gpipe_bench.figures.sweep import SWEEP
from gpipe_bench.figures.timelines import TIMELINES
from gpipe_bench.figures.verdicts import VERDICTS
from gpipe_bench.figures.why import WHY
from gpipe_bench.figures.zero_bubble import ZERO_BUBBLE
from gpipe_bench.results.catalogue import DrawnFigure, reference_figures
from gpipe_bench.util.processes import spread

_COMPONENTS: Final = (ABLATION, SHARES, TIMELINES, TABLES)
_SETTINGS: Final = (SWEEP, WHY, ADVICE, PARETO, SCALING, BUBBLES, STEPS, NETWORKS, ZERO_BUBBLE, VERDICTS)

FIGURES: Final[dict[str, Figure]] = {figure.name: figure for figure in (*_COMPONENTS, *_SETTINGS)}
"""What ``gpipe-bench figure`` draws."""


def draw_reference(out: Path, folder: Path = REFERENCE_FOLDER, processes: int = 1) -> Iterator[list[Path]]:
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

    def draw(figure: DrawnFigure) -> list[Path]:
        return FIGURES[figure.kind].draw(figure.table, out / figure.place / figure.name, Selection(figure.evidence))

    yield from spread(draw, figures, processes)
