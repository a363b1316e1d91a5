"""The race of peers in figures: its table, and the looks of the contenders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.style import FAINT, OKABE_ITO
from gpipe_bench.results.peer_rows import PeerRow
from gpipe_bench.results.tables import read_table

if TYPE_CHECKING:
    import pandas as pd

MODES: Final = ("never", "except_last", "always")
LOOKS: Final = {
    "engine-autograd": (OKABE_ITO["blue"], "-", "o"),
    "engine-scheduled": (OKABE_ITO["sky"], "-", "D"),
    "engine-autograd-one-thread": (OKABE_ITO["blue"], "--", "1"),
    "engine-scheduled-one-thread": (OKABE_ITO["sky"], "--", "2"),
    "engine-step-gpipe": (OKABE_ITO["sky"], "-", "h"),
    "engine-1f1b": (OKABE_ITO["blue"], "-", "p"),
    "engine-interleaved": (OKABE_ITO["blue"], "-", "<"),
    "engine-zb-h1": (OKABE_ITO["blue"], "-", ">"),
    "torchgpipe": (OKABE_ITO["vermilion"], "--", "^"),
    "fairscale": (OKABE_ITO["orange"], "--", "v"),
    "distributed-gpipe": (OKABE_ITO["sky"], ":", "$G$"),
    "distributed-1f1b": (OKABE_ITO["blue"], ":", "$F$"),
    "distributed-interleaved": (OKABE_ITO["blue"], ":", "$I$"),
    "distributed-zb-h1": (OKABE_ITO["blue"], ":", "$H$"),
    "distributed-zb-v": (OKABE_ITO["blue"], ":", "$V$"),
    "pipelining-gpipe": (OKABE_ITO["green"], "-.", "s"),
    "pipelining-1f1b": (OKABE_ITO["purple"], "-.", "P"),
    "pipelining-interleaved": (OKABE_ITO["purple"], "-.", "H"),
    "pipelining-zero-bubble": (OKABE_ITO["purple"], "-.", "8"),
    "pipelining-zb-v": (OKABE_ITO["purple"], "-.", "3"),
    "loop": (OKABE_ITO["black"], ":", "x"),
    "plain": (FAINT, ":", "+"),
    "loop-threads": (OKABE_ITO["black"], ":", "X"),
    "plain-threads": (FAINT, ":", "*"),
    "loop-processes": (OKABE_ITO["black"], "--", "d"),
}
"""Colour, line and marker of each contender; none shares more than the colour with another."""


def read_race(rows_csv: Path) -> pd.DataFrame:
    """The rows of a race.

    Args:
        rows_csv: rows with the columns of :class:`gpipe_bench.results.peer_rows.PeerRow`.

    Raises:
        ConfigError: the table cannot be read, lacks columns, or has nothing to draw; all such problems.
    """
    rows = read_table(rows_csv, PeerRow.columns(), PeerRow)
    if not any(rows["status"] == "ok"):
        raise ConfigError([f"table must have a row that is ok, got none in {rows_csv}; read their reasons"])
    return rows


def versions(rows: pd.DataFrame) -> str:
    """The other packages of a race with their versions."""
    peers = rows[rows["package"].isin(["torchgpipe", "fairscale"])].groupby("package", sort=False)["package_version"]
    return ", ".join(f"{name} {version or '-'}" for name, version in peers.last().items())


def present(rows: pd.DataFrame) -> list[str]:
    """Contenders with a row, in the order of the legend."""
    return [name for name in LOOKS if name in set(rows["contender"])]
