"""The page: findings, provenance, timelines, tables and figures of all sources as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from gpipe_bench import __version__
from gpipe_bench.data import CAPTIONS_FOLDER
from gpipe_bench.figures.style import EVIDENCE_COLOURS
from gpipe_bench.figures.tables import read_events
from gpipe_bench.report.contents import Contents, read_contents
from gpipe_bench.report.findings.collect import findings_of, runs_of
from gpipe_bench.report.provenance import origin
from gpipe_bench.report.sections import make_sections, section_name
from gpipe_bench.report.sources import Source, check_folder, find_sources
from gpipe_bench.report.timelines import EVENT_FIELDS, kinds, timeline_set
from gpipe_bench.results.rows import EVIDENCE
from gpipe_bench.util.files import write_files

Step = Callable[[int, int, str], None]

_STEPS: Final = 4
_PARTS: Final = ("page.css", "tables.js", "figures.js", "timeline.js")


def write_report(
    results: Path, figures: Path | None, captions: Path | None, out: Path, step: Step = lambda *_: None
) -> Path:
    """Write the report of a run, or of reference results.

    Args:
        results: folder of CSV tables: those of a run, or reference results in a folder per evidence and hardware.
        figures: folder of SVG files; None for the one that belongs to ``results``.
        captions: reStructuredText files named like figures; None for those of the workflow.
        out: the HTML file.
        step: called before each of the page's parts with the number of finished parts, of all parts, and
            the name of the next.

    Raises:
        ConfigError: a folder does not exist, no table has a row, or a table cannot be read.
        OutputError: the file cannot be written.
    """
    if captions is not None:
        check_folder("--captions", captions)
    sources = find_sources(results, figures)
    step(0, _STEPS, "(reading tables)")
    contents = read_contents(sources)
    step(1, _STEPS, "(tables and figures)")
    sections = make_sections(sources, contents, captions or CAPTIONS_FOLDER)
    step(2, _STEPS, "(findings)")
    stems = [path.stem for source in sources for path in source.tables]
    findings = [(finding, section_name(finding.section, stems)) for finding in findings_of(contents)]
    step(3, _STEPS, "(timelines)")
    text = _render(
        findings=findings,
        sections=sections,
        origins=[origin(path, results) for source in sources for path in source.tables],
        counts=_counts(contents),
        sets=[one for source in sources for one in _timelines(source, contents)],
    )
    write_files({out: text})
    return out


def _timelines(source: Source, contents: Contents) -> list[dict[str, Any]]:
    sets: list[dict[str, Any]] = []
    for path in (path for path in source.tables if path in contents.read):
        events = path.with_name(f"{path.stem}_events.csv")
        # A table of events without any has a header alone.
        if events.exists() and events.read_bytes().count(b"\n") > 1:
            name = f"{path.stem} on {source.hardware}" if source.hardware else path.stem
            sets += timeline_set(name, read_events(events), contents.read[path])
    return sets


def _counts(contents: Contents) -> dict[str, int]:
    """How many rows there are of each kind of evidence."""
    found = [run.evidence for run in runs_of(contents)]
    return {name: found.count(name) for name in EVIDENCE if name in found}


def _render(sets: Sequence[Mapping[str, Any]], **words: Any) -> str:
    loader = PackageLoader("gpipe_bench.report", "parts")
    # select_autoescape knows .html and leaves the parts of the page that are no HTML as they are.
    environment = Environment(
        loader=loader, autoescape=select_autoescape(), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Styles and scripts of this package, put into the page as they are.
    parts = {name: Markup(loader.get_source(environment, name)[0]) for name in _PARTS}  # noqa: S704
    data = {"kinds": kinds(), "fields": EVENT_FIELDS, "sets": list(sets)}
    return environment.get_template("page.html").render(
        timeline=data, colours=EVIDENCE_COLOURS, version=__version__, parts=parts, **words
    )
