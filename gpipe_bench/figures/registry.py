"""All figures by their names."""

from __future__ import annotations

from typing import Final

from gpipe_bench.figures.ablation import ABLATION
from gpipe_bench.figures.advice import ADVICE
from gpipe_bench.figures.base import Figure
from gpipe_bench.figures.peers import PEERS
from gpipe_bench.figures.published_tables import TABLES
from gpipe_bench.figures.shares import SHARES
from gpipe_bench.figures.sweep import SWEEP
from gpipe_bench.figures.timelines import TIMELINES
from gpipe_bench.figures.transparency import TRANSPARENCY
from gpipe_bench.figures.why import WHY

FIGURES: Final[dict[str, Figure]] = {
    figure.name: figure for figure in (ABLATION, SHARES, TIMELINES, TABLES, SWEEP, WHY, ADVICE, TRANSPARENCY, PEERS)
}
"""What ``gpipe-bench figure`` draws."""
