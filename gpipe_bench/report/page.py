"""The page: the answer, figures, tables, timelines and provenance of all sources as one HTML file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from gpipe_bench import __version__
from gpipe_bench.drawing.colours import LATER_PARTITION, TIMELINE_JS
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.style import BADGE_COLOURS
from gpipe_bench.figures.tables import is_race, read_events, read_rows
from gpipe_bench.report.pictures import PageFigure, page_figure, themed
from gpipe_bench.report.sources import Source, find_sources
from gpipe_bench.report.tables import PageTable, answers, headline, page_table
from gpipe_bench.report.timelines import EVENT_FIELDS, kinds, timeline_set
from gpipe_bench.results.catalogue import DrawnFigure, figures_of, run_name
from gpipe_bench.results.rows import EVIDENCE, Row
from gpipe_bench.results.tables import read_text
from gpipe_bench.util.files import write_files

Step = Callable[[int, int, str], None]

_PARTS: Final = ("page.css", "page.js", "timeline.js")
_NEEDED: Final = ("evidence", "model", "variant", "partitions", "chunks", "status", "throughput_samples_per_s")
_TITLES: Final = {
    "ablation": "Components",
    "speed": "Published tables",
    "memory": "Published tables",
    "predictions": "Published tables",
    "sweep": "Partitions and micro-batches",
    "why": "Partitions and micro-batches",
    "schedules": "Schedules",
    "zero": "Schedules",
    "residuals": "Networks that read many layers",
    "advice": "Advice",
    "transparency": "Training",
    "peers": "Other pipelines",
}
"""The sections of tables and figures by the first words of their names, in order; all others are in a last one."""

_OTHERS: Final = "More tables"


_FACTS: Final = ("evidence", "device", "profile", "torch", "cuda", "driver", "python", "commit", "dirty", "source")
_NAMED_AT_MOST: Final = 6


@dataclass(frozen=True, slots=True)
class Origin:
    """One file behind the page.

    Attributes:
        name: path below the folder of results.
        sha256: digest of its bytes.
        lines: without the header.
        facts: the columns that describe the run, its machine and its packages, with their values.
    """

    name: str
    sha256: str
    lines: int
    facts: list[tuple[str, str]]


@dataclass(slots=True)
class Section:
    """What the page says of one experiment."""

    title: str
    figures: list[PageFigure] = field(default_factory=list)
    tables: list[PageTable] = field(default_factory=list)


def write_report(results: Path, figures: Path | None, out: Path, step: Step = lambda *_: None) -> Path:
    """Write the report of a run, or of reference results.

    Args:
        results: folder of CSV tables: those of a run, or reference results in a folder per evidence and hardware.
        figures: folder of SVG files; None for the one that belongs to ``results``.
        out: the HTML file.
        step: called before each of the page's parts with the number of finished parts, of all parts, and
            the name of the next.

    Raises:
        ConfigError: a folder does not exist, no table has a row, or a table cannot be read.
        OutputError: the file cannot be written.
    """
    sources = find_sources(results, figures)
    paths = [path for source in sources for path in source.tables]
    step(0, 3, "(reading tables)")
    texts = {path: read_text(path) for path in paths}
    if not any(map(len, texts.values())):
        rule = "tables must have at least one row"
        raise ConfigError([f"{rule}, got headers alone in {', '.join(map(str, paths))}; run them first"])
    with_rows = [path for path, text in texts.items() if len(text) and set(_NEEDED) <= set(text.columns)]
    rows = {path: read_rows(path, _NEEDED) for path in with_rows if not is_race(path)}
    step(1, 3, "(tables and figures)")
    styles: dict[str, str] = {}
    sections = _sections(sources, texts, styles)
    step(2, 3, "(timelines)")
    asked = [row for path, own in rows.items() if path.stem in ("ablation", "rows") for row in own]
    evidence = [kind for text in texts.values() if "evidence" in text for kind in text["evidence"]]
    page = _render(
        headline=headline(_comparable(asked)),
        answers=answers(_comparable(asked)),
        sections=sections,
        styles=Markup("\n".join(f".{name} {{{themed(style)}}}" for style, name in styles.items())),  # noqa: S704
        origins=[origin(path, results) for path in paths],
        counts={kind: evidence.count(kind) for kind in EVIDENCE if kind in evidence},
        timeline={"kinds": kinds(), "over": LATER_PARTITION, "fields": EVENT_FIELDS, "sets": _timelines(sources, rows)},
    )
    write_files({out: page})
    return out


def _comparable(rows: Sequence[Row]) -> list[Row]:
    """The rows of ablations: of the published ones those of settings with several variants."""
    several = {(row.model, row.model_args, row.batch_size) for row in rows if row.variant == "baseline"}
    return [
        row for row in rows if row.evidence != "published" or (row.model, row.model_args, row.batch_size) in several
    ]


def _sections(sources: Sequence[Source], texts: dict[Path, Any], styles: dict[str, str]) -> list[Section]:
    sections = {title: Section(title) for title in dict.fromkeys([*_TITLES.values(), _OTHERS])}

    def section(stem: str) -> Section:
        return sections[_TITLES.get(stem.partition("_")[0], _OTHERS)]

    for source in sources:
        on = f" on {source.hardware}" if source.hardware else ""
        for path in (path for path in source.tables if len(texts[path])):
            table = page_table(f"{path.stem.replace('_', ' ')}{on}", texts[path])
            table.evidence = table.evidence or source.evidence
            section(path.stem).tables.append(table)
        drawn = dict(_drawn(source))
        for path in source.images:
            section(path.stem).figures.append(page_figure(path, source, drawn.get(path.stem), styles))
    return [one for one in sections.values() if one.figures or one.tables]


def _drawn(source: Source) -> Iterator[tuple[str, DrawnFigure]]:
    """The figures of the tables of a source by the names of their files; those of a run end with the evidence."""
    for path in source.tables:
        for kind in [source.evidence] if source.evidence else EVIDENCE:
            for one in figures_of(path, kind):
                yield one.name if source.evidence else run_name(one.name, kind), one


def _timelines(sources: Sequence[Source], rows: dict[Path, list[Row]]) -> list[dict[str, Any]]:
    """The steps of ablations, then those of other tables; a sweep has too many that nobody could tell apart."""
    found = []
    for source in sources:
        for path in (path for path in source.tables if path in rows and not path.stem.startswith("sweep")):
            events = path.with_name(f"{path.stem}_events.csv")
            # A table of events without any has a header alone.
            if events.exists() and events.read_bytes().count(b"\n") > 1:
                name = path.stem.replace("_", " ") + (f" on {source.hardware}" if source.hardware else "")
                found += timeline_set(name, read_events(events), rows[path])
    return sorted(found, key=lambda one: not one["name"].startswith("ablation"))


def _render(**words: Any) -> str:
    loader = PackageLoader("gpipe_bench.report", "parts")
    # select_autoescape knows .html and leaves the parts of the page that are no HTML as they are.
    environment = Environment(
        loader=loader, autoescape=select_autoescape(), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Styles and scripts of this package, put into the page as they are.
    parts = {name: Markup(loader.get_source(environment, name)[0]) for name in _PARTS}  # noqa: S704
    parts["drawing.js"] = Markup(TIMELINE_JS.read_text(encoding="utf-8"))  # noqa: S704
    return environment.get_template("page.html").render(
        colours=BADGE_COLOURS, version=__version__, parts=parts, **words
    )


def origin(path: Path, folder: Path) -> Origin:
    """What a table says of where it comes from.

    Args:
        path: a CSV file that was read before.
        folder: its name is given below this.
    """
    table = read_text(path)
    facts = []
    for name in (name for name in _FACTS if name in table):
        found = [value for value in table[name].unique() if value]
        facts.append((name, ", ".join(found) if len(found) <= _NAMED_AT_MOST else f"{len(found)} different"))
    started = sorted({*table.get("started_utc", ())} - {""})
    if started:
        facts.append(("started", started[0] if started[0] == started[-1] else f"{started[0]} to {started[-1]}"))
    return Origin(
        path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name,
        hashlib.sha256(path.read_bytes()).hexdigest(),
        len(table),
        [(name, text) for name, text in facts if text],
    )
