"""The page: what lies in the folders of results and figures, sorted into sections, as one HTML file."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from gpipe_bench import __version__
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.style import EVIDENCE_COLOURS, WIDTH_IN
from gpipe_bench.figures.tables import is_race, read_events, read_peers, read_rows
from gpipe_bench.files import write_files
from gpipe_bench.peer_rows import PeerRow
from gpipe_bench.report.captions import caption
from gpipe_bench.report.cells import cell_tables
from gpipe_bench.report.peers import peer_tables
from gpipe_bench.report.provenance import Origin, origin
from gpipe_bench.report.tables import PageTable, lifted, plain_tables
from gpipe_bench.report.timelines import EVENT_FIELDS, kinds, timeline_set
from gpipe_bench.rows import Row

__all__ = ["write_report"]

_NEEDED: Final = ("evidence", "model", "variant", "partitions", "chunks", "status", "throughput_samples_per_s")
_COMPANIONS: Final = ("_devices", "_steps", "_events", "_layers", "_ratios", "_configurations")
_FIRST: Final = ("ablation", "speed", "memory", "sweep", "advice", "timeline", "predictions", "transparency", "peers")
_PART_OF: Final = {"why": "sweep"}
_OTHER: Final = "figures"
_TITLES: Final = {"timeline": "Timeline figures", _OTHER: "Other figures"}


@dataclass(frozen=True, slots=True)
class PageFigure:
    """A figure inside the page: its picture as text, its width in points, its caption as HTML."""

    stem: str
    image: str
    width_pt: float
    caption: Markup


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


def write_report(results: Path, figures: Path, captions: Path, out: Path) -> Path:
    """Write the report of the tables and figures that lie in two folders.

    Args:
        results: CSV tables: rows of experiments with companions beside them, and any others.
        figures: SVG files; those named ``<experiment>`` or ``<experiment>_…`` go to that experiment.
        captions: reStructuredText files named like figures.
        out: the HTML file.

    Raises:
        ConfigError: nothing to show, or a table that cannot be read.
        OutputError: the file cannot be written.
    """
    tables = [path for path in sorted(results.glob("*.csv")) if not path.stem.endswith(_COMPANIONS)]
    images = sorted(figures.glob("*.svg"))
    if not tables and not images:
        raise ConfigError(
            [f"folders must hold tables or figures, got none in {results} and {figures}; run an experiment first"]
        )
    raced = {path: read_peers(path) for path in tables if is_race(path) and _is_rows(path)}
    rows = {path: read_rows(path, _NEEDED) for path in tables if path not in raced and _is_rows(path)}
    sections: dict[str, Section] = {}
    for path in tables:
        section = _section(sections, path.stem, [other.stem for other in tables])
        if path in raced:
            found = peer_tables(raced[path])
        else:
            found = cell_tables(rows[path]) if path in rows else plain_tables(path)
        section.tables += map(lifted, found)
    for path in images:
        section = _section(sections, path.stem, [other.stem for other in tables])
        words = caption(captions, path.stem, section.name, str(results / f"{section.name}.csv"))
        section.figures.append(PageFigure(path.stem, _data_uri(path), _width_pt(path), words))
    ordered = sorted(sections.values(), key=_order)
    counts = _counts([*rows.values(), *raced.values()])
    text = _render(ordered, _timelines(rows), [origin(path, results) for path in tables], counts)
    write_files({out: text})
    return out


def _is_rows(path: Path) -> bool:
    """Whether a table has the columns of rows, and a line below them."""
    header, _, rest = path.read_text(encoding="utf-8").partition("\n")
    return set(_NEEDED) <= set(header.strip().split(",")) and bool(rest.strip())


def _section(sections: dict[str, Section], stem: str, tables: Sequence[str]) -> Section:
    """The section of a table or figure: of the experiment in its first word, else of the table it belongs to."""
    first = stem.partition("_")[0]
    begins = [name for name in tables if stem == name or stem.startswith(f"{name}_")]
    name = _PART_OF.get(first, first)
    if name not in _FIRST:
        name = min(begins, key=len) if begins else _OTHER
    return sections.setdefault(name, Section(name))


def _order(section: Section) -> tuple[int, str]:
    return (_FIRST.index(section.name) if section.name in _FIRST else len(_FIRST), section.name)


def _timelines(rows: Mapping[Path, Sequence[Row]]) -> list[dict[str, Any]]:
    sets: list[dict[str, Any]] = []
    for path, members in rows.items():
        events = path.with_name(f"{path.stem}_events.csv")
        # A table of events without any has a header alone.
        if events.exists() and events.read_text(encoding="utf-8").count("\n") > 1:
            sets += timeline_set(path.stem, read_events(events), members)
    return sets


def _counts(tables: Iterable[Sequence[Row | PeerRow]]) -> dict[str, int]:
    """How many rows there are of each kind of evidence."""
    found = [row.evidence for rows in tables for row in rows]
    return {name: found.count(name) for name in EVIDENCE_COLOURS if name in found}


def _data_uri(path: Path) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _width_pt(path: Path) -> float:
    """The width that a figure was drawn for; that of one column where it does not say."""
    found = re.search(r'<svg[^>]*\swidth="([0-9.]+)pt"', path.read_text(encoding="utf-8"))
    return float(found.group(1)) if found else 72 * WIDTH_IN


def _render(
    sections: Sequence[Section], sets: Sequence[dict[str, Any]], origins: Sequence[Origin], counts: Mapping[str, int]
) -> str:
    loader = PackageLoader("gpipe_bench.report", "parts")
    # select_autoescape knows .html and leaves the parts of the page that are no HTML as they are.
    environment = Environment(
        loader=loader, autoescape=select_autoescape(), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Styles and scripts of this package, put into the page as they are.
    sources = {name: loader.get_source(environment, name)[0] for name in ("page.css", "timeline.js", "tables.js")}
    parts = {name: Markup(source) for name, source in sources.items()}  # noqa: S704
    data = {"kinds": kinds(), "fields": EVENT_FIELDS, "colours": EVIDENCE_COLOURS, "sets": list(sets)}
    return environment.get_template("page.html").render(
        sections=sections,
        timeline=data,
        origins=origins,
        counts=counts,
        colours=EVIDENCE_COLOURS,
        version=__version__,
        parts=parts,
    )
