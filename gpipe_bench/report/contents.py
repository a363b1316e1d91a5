"""What the tables of a report hold: rows of experiments, races of peers, and other tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pandas as pd

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.tables import is_race, read_peers, read_rows
from gpipe_bench.report.sources import Source
from gpipe_bench.results.peer_rows import PeerRow
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import read_text

_NEEDED: Final = ("evidence", "model", "variant", "partitions", "chunks", "status", "throughput_samples_per_s")


@dataclass(slots=True)
class Contents:
    """All tables of a report.

    Attributes:
        rows: of experiments by the name of their table; published rows stand beside those that they are compared with.
        read: the rows of each file.
        races: rows of races of peers, by the name of their table.
        texts: all other tables, as text.
    """

    rows: dict[str, list[Row]] = field(default_factory=dict)
    read: dict[Path, list[Row]] = field(default_factory=dict)
    races: dict[str, list[PeerRow]] = field(default_factory=dict)
    texts: dict[Path, pd.DataFrame] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        """How many rows and lines there are."""
        tables: Iterable[Sequence[object]] = [*self.read.values(), *self.races.values()]
        return sum(map(len, tables)) + sum(len(text) for text in self.texts.values())


def read_contents(sources: Iterable[Source]) -> Contents:
    """Read the tables of all sources.

    Raises:
        ConfigError: a table cannot be read, is empty or ragged, or has values that do not fit; or no table has a line.
    """
    found = Contents()
    paths = [(source, path) for source in sources for path in source.tables]
    for source, path in paths:
        text = read_text(path)
        if text.empty or not (is_race(path) or set(_NEEDED) <= set(text.columns)):
            found.texts[path] = text
        elif is_race(path):
            found.races.setdefault(path.stem, []).extend(read_peers(path))
        else:
            found.read[path] = read_rows(path, _NEEDED)
            for row in found.read[path]:
                name = _published_name(row) if source.evidence == "published" else path.stem
                found.rows.setdefault(name, []).append(row)
    if not found.lines:
        rule = "tables must have at least one row"
        raise ConfigError([f"{rule}, got headers alone in {', '.join(str(path) for _, path in paths)}; run them first"])
    return found


def _published_name(row: Row) -> str:
    """The table that published values belong to: ``speed`` of the experiment ``unet-speed``."""
    return row.experiment.rpartition("-")[2] or "published"
