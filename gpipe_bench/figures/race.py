"""What the figures of the race share: the table, the looks of the contenders, the head of the page."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.page import Page
from gpipe_bench.figures.style import FAINT, OKABE_ITO, drawing, save
from gpipe_bench.peer_rows import PeerRow

__all__ = ["LOOKS", "MODES", "Record", "add_absent", "add_head", "draw_race", "present", "read_race"]

MODES: Final = ("never", "except_last", "always")
LOOKS: Final = {
    "engine-autograd": (OKABE_ITO["blue"], "-", "o"),
    "engine-scheduled": (OKABE_ITO["sky"], "-", "D"),
    "torchgpipe": (OKABE_ITO["vermilion"], "--", "^"),
    "fairscale": (OKABE_ITO["orange"], "--", "v"),
    "pipelining-gpipe": (OKABE_ITO["green"], "-.", "s"),
    "pipelining-1f1b": (OKABE_ITO["purple"], "-.", "P"),
    "loop": (OKABE_ITO["black"], ":", "x"),
    "plain": (FAINT, ":", "+"),
    "loop-threads": (OKABE_ITO["black"], ":", "X"),
    "plain-threads": (FAINT, ":", "*"),
    "loop-processes": (OKABE_ITO["black"], "--", "d"),
}
"""Colour, line and marker of each contender; none shares more than the colour with another."""

Record = Mapping[str, str]


def read_race(rows_csv: Path) -> list[dict[str, str]]:
    """The rows of a race.

    Args:
        rows_csv: rows with the columns of :class:`gpipe_bench.peer_rows.PeerRow`.

    Raises:
        ConfigError: the table cannot be read, lacks columns, or has nothing to draw; all such problems.
    """
    try:
        with rows_csv.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            missing = sorted(set(PeerRow.columns()) - set(reader.fieldnames or ()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            [f"table must be a readable CSV file, got {rows_csv} ({error}); run the race first"]
        ) from error
    problems = []
    if missing:
        problems = [
            f"columns of {rows_csv} must include {', '.join(missing)}, got none; name a table that peers run wrote"
        ]
    if not problems and not any(row["status"] == "ok" for row in rows):
        problems = [f"table must have a row that is ok, got none in {rows_csv}; read their reasons"]
    if problems:
        raise ConfigError(problems)
    return rows


def draw_race(figure_of: Callable[[Sequence[Record]], Figure], rows_csv: Path, out_stem: Path) -> list[Path]:
    """Draw a figure of a race.

    Args:
        figure_of: makes the figure of some rows.
        rows_csv: the table of the race.
        out_stem: path of the figure without its suffix.

    Returns:
        The paths written: SVG, PDF, PNG.

    Raises:
        ConfigError: of :func:`read_race`.
        OutputError: the figure cannot be written.
    """
    rows = read_race(rows_csv)
    with drawing():
        return save(figure_of(rows), out_stem)


def add_head(page: Page, title: str, rows: Sequence[Record]) -> None:
    """Add the title, and on what was raced."""
    head = next(row for row in rows if row["status"] == "ok")
    page.heading(title, head["evidence"])
    page.paragraph(f"{head['device']}, {head['cores']} cores, torch {head['torch']}; {_versions(rows)}", colour=FAINT)


def add_absent(page: Page, rows: Sequence[Record]) -> None:
    """Add who could not take part everywhere."""
    absent = sorted({f"{row['contender']}: {row['status']}" for row in rows if row["status"] != "ok"})
    if absent:
        page.paragraph(f"Not everywhere here: {', '.join(absent)}; the table has the reasons.", colour=FAINT)


def present(rows: Sequence[Record]) -> list[str]:
    """Contenders with a row, in the order of the legend."""
    known = {row["contender"] for row in rows}
    return [name for name in LOOKS if name in known]


def _versions(rows: Sequence[Record]) -> str:
    peers = {row["package"]: row["package_version"] for row in rows if row["package"] in {"torchgpipe", "fairscale"}}
    return ", ".join(f"{name} {version or '-'}" for name, version in peers.items())
