"""All figures by their names; studies draw their own."""

from __future__ import annotations

from typing import Final

from gpipe_bench.figures.ablation import ABLATION
from gpipe_bench.figures.advice import ADVICE
from gpipe_bench.figures.base import Figure
from gpipe_bench.figures.published_tables import TABLES
from gpipe_bench.figures.schedule_bubbles import BUBBLES
from gpipe_bench.figures.schedule_timelines import STEPS
from gpipe_bench.figures.schedules import PARETO, SCALING
from gpipe_bench.figures.shares import SHARES
from gpipe_bench.figures.sweep import SWEEP
from gpipe_bench.figures.timelines import TIMELINES
from gpipe_bench.figures.why import WHY

_COMPONENTS: Final = (ABLATION, SHARES, TIMELINES, TABLES)
_SETTINGS: Final = (SWEEP, WHY, ADVICE, PARETO, SCALING, BUBBLES, STEPS)

FIGURES: Final[dict[str, Figure]] = {figure.name: figure for figure in (*_COMPONENTS, *_SETTINGS)}
"""What ``gpipe-bench figure`` draws."""
