"""Sections of the page: tables and figures sorted by experiment."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from markupsafe import Markup

from gpipe_bench.figures.style import WIDTH_IN
from gpipe_bench.report.captions import caption
from gpipe_bench.report.cells import cell_tables
from gpipe_bench.report.contents import Contents
from gpipe_bench.report.peers import peer_tables
from gpipe_bench.report.sources import Source
from gpipe_bench.report.tables import PageTable, lifted, plain_tables

_ORDER: Final = (
    "ablation",
    "speed",
    "memory",
    "sweep",
    "schedules",
    "advice",
    "timeline",
    "predictions",
    "transparency",
    "peers",
)
_OTHER: Final = "figures"
_PART_OF: Final = {"why": "sweep", "settings": "published"}
_TITLES: Final = {"timeline": "Timeline figures", "published": "Published values", _OTHER: "Other figures"}
_DRAWN_FROM: Final = {"why": "sweep", "timeline": "ablation"}
"""Figures whose table has another first word."""


@dataclass(frozen=True, slots=True)
class PageFigure:
    """A figure inside the page.

    Attributes:
        id: its name, after the place of its source.
        title: its name in words.
        evidence: of all of its values; empty where the picture alone says it.
        hardware: name of the hardware of reference results; empty for a run.
        image: the picture as text.
        width_pt: the width that it was drawn for.
        caption: as HTML.
    """

    id: str
    title: str
    evidence: str
    hardware: str
    image: str
    width_pt: float
    caption: Markup

    @property
    def wide(self) -> bool:
        """Whether it was drawn for more than one column of a paper."""
        return self.width_pt > 1.5 * 72 * WIDTH_IN


@dataclass(slots=True)
class Section:
    """What the page says of one experiment."""

    name: str
    figures: list[PageFigure] = field(default_factory=list)
    tables: list[PageTable] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Its heading."""
        return _TITLES.get(self.name, self.name.replace("_", " ").capitalize())


def make_sections(sources: Sequence[Source], contents: Contents, captions: Path) -> list[Section]:
    """The sections of all tables and figures, known experiments first.

    Args:
        sources: where they lie.
        contents: the tables of these sources.
        captions: folder of captions, named like figures.
    """
    stems = _stems(sources, contents)
    sections: dict[str, Section] = {}

    def section(stem: str) -> Section:
        name = section_name(stem, stems)
        return sections.setdefault(name, Section(name))

    for stem in stems:
        found = cell_tables(contents.rows.get(stem, [])) + peer_tables(contents.races.get(stem, []))
        section(stem).tables.extend(map(lifted, found))
    for source in sources:
        for path in (path for path in source.tables if path in contents.texts):
            section(path.stem).tables.extend(lifted(_labelled(table, source)) for table in plain_tables(path))
        for path in source.images:
            home = section(path.stem)
            words = caption(captions, path.stem, home.name, table_of(path.stem, source.tables))
            home.figures.append(_figure(path, source, words))
    shown = [one for one in sections.values() if one.tables or one.figures]
    return sorted(shown, key=lambda one: (_ORDER.index(one.name) if one.name in _ORDER else len(_ORDER), one.name))


def section_name(stem: str, tables: Iterable[str]) -> str:
    """The section of a table or figure: the experiment in its first word, else the table that its name begins with."""
    first = stem.partition("_")[0]
    name = _PART_OF.get(first, first)
    if name in _ORDER or name in _PART_OF.values():
        return name
    begins = [name for name in tables if stem == name or stem.startswith(f"{name}_")]
    return min(begins, key=len) if begins else _OTHER


def _stems(sources: Sequence[Source], contents: Contents) -> list[str]:
    """The names of all tables, and of experiments of published rows."""
    files = {path.stem for source in sources for path in source.tables if path not in contents.read}
    return sorted({*files, *contents.rows})


def _labelled(table: PageTable, source: Source) -> PageTable:
    """A table of reference results names their hardware, and their evidence where its lines do not."""
    table.title = f"{table.title} on {source.hardware}" if source.hardware else table.title
    table.evidence = table.evidence or source.evidence
    return table


def _figure(path: Path, source: Source, words: Markup) -> PageFigure:
    name = "-".join(filter(None, (source.place, path.stem)))
    picture = path.read_bytes()
    found = re.search(rb'<svg[^>]*\swidth="([0-9.]+)pt"', picture)
    return PageFigure(
        id=name,
        title=path.stem.replace("_", " "),
        evidence=source.evidence,
        hardware=source.hardware,
        image=f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}",
        width_pt=float(found.group(1)) if found else 72 * WIDTH_IN,
        caption=words,
    )


def table_of(stem: str, tables: Sequence[Path]) -> Path | None:
    """The table that a figure was drawn from, by its name: ``why_unet`` from ``sweep_unet``."""
    first, _, rest = stem.partition("_")
    origin = _DRAWN_FROM.get(first, first)
    names = [f"{origin}_{rest}", stem, *sorted((path.stem for path in tables), key=len, reverse=True)]
    begun = (name for name in names if name in (f"{origin}_{rest}", stem) or f"{origin}_{rest}".startswith(f"{name}_"))
    paths = {path.stem: path for path in tables}
    return next((paths[name] for name in begun if name in paths), None)
