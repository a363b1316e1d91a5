"""The ablation as a figure: the published variants above, every combination below; on a CPU, each way to run.

One block per group of comparable rows, so values of different evidence stand under each other, each with its own badge
and axes. A run that failed keeps its place and shows why.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.cpu import CPU_READING, add_cpu
from gpipe_bench.figures.factorial import add_factorial
from gpipe_bench.figures.groups import failure_notes, ordered_groups, setting_words
from gpipe_bench.figures.marks import draw_failure
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.published import add_published, beside_words
from gpipe_bench.figures.style import FAINT, draw
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.results.outcomes import CpuGroup, Group, group_rows, shown_groups
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import nearest

_FEW: Final = 5


def draw_ablation(rows_csv: Path, out_stem: Path) -> list[Path]:
    """Draw the ablation in a result table.

    Args:
        rows_csv: rows with the columns of :class:`gpipe_bench.results.rows.Row`.
        out_stem: path of the figure without its suffix.

    Returns:
        The paths written: SVG, PDF, PNG.

    Raises:
        ConfigError: the table cannot be read, lacks a column, has unknown variants, or is a sweep.
        OutputError: the figure cannot be written.
    """
    rows = read_rows(rows_csv)
    _check_variants(rows, rows_csv)
    _check_setting(rows, rows_csv)
    return draw(ablation_figure, rows, out_stem)


def ablation_figure(rows: Sequence[Row]) -> Figure:
    """The figure of some rows, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page()
    for k, (group, beside) in enumerate(shown_groups(ordered_groups(rows))):
        if k:
            page.space(0.16)
        _add_group(page, group, beside)
    return page.render()


def _check_variants(rows: Sequence[Row], rows_csv: Path) -> None:
    labels = [components.label for components in Components.factorial()]
    unknown = sorted({row.variant for row in rows} - set(labels))
    if unknown:
        known = [*PUBLISHED, *labels]
        rule = f"variant in {rows_csv} must be a label of components"
        raise ConfigError([f"{rule}, got {name!r}; {nearest(name, known)}" for name in unknown])


def _check_setting(rows: Sequence[Row], rows_csv: Path) -> None:
    places = {(row.partitions, row.chunks, row.batch_size) for row in rows}
    if len(places) > 1 and all(len(group.outcomes) == 1 for group in group_rows(rows)):
        rule = f"rows of {rows_csv} must have several variants of a setting"
        raise ConfigError([f"{rule}, got one for each of {len(places)} settings; draw the sweep of them"])


def _add_group(page: Page, group: Group, beside: Sequence[Group]) -> None:
    kinds = [other.head.evidence for other in beside]
    what = "pipelines on a CPU" if isinstance(group, CpuGroup) else "ablation"
    page.heading(f"{group.head.model}: {what}", *kinds, group.head.evidence)
    page.paragraph(setting_words(group.head), colour=FAINT)
    page.space(0.06)
    if isinstance(group, CpuGroup):
        add_cpu(page, group)
    else:
        _add_variants(page, group, beside)
    for status, sentence in failure_notes(list(group.outcomes.values())):
        _add_note(page, status, sentence)
    page.space(0.03)
    page.paragraph(" ".join([_reading(group), *beside_words(beside)]), colour=FAINT)


def _add_variants(page: Page, group: Group, beside: Sequence[Group]) -> None:
    if set(group.outcomes) & set(PUBLISHED):
        add_published(page, group, beside)
    if set(group.outcomes) - set(PUBLISHED):
        add_factorial(page, group)


def _add_note(page: Page, status: str, sentence: str) -> None:
    def mark(frame: Frame) -> None:
        axes = frame.axes(0.06, 0.1, 0.0, 0.1)
        axes.set_axis_off()
        draw_failure(axes, 0.5, 0.75, status, axes.transAxes)

    page.strip(0.0, mark)
    page.paragraph(sentence, left_in=0.2)


def _reading(group: Group) -> str:
    """How to read the marks of a group."""
    fewest, most = group.repeats
    if most == 0:
        return "No run of this group ended."
    if isinstance(group, CpuGroup):
        other = f" {CPU_READING}"
    else:
        unpublished = set(group.outcomes) - set(PUBLISHED)
        other = " Grey: combinations that were never published." if unpublished else ""
    if most == 1:
        return f"One {group.head.evidence} value per variant, no interval.{other}"
    repeats = f"{most}" if fewest == most else f"{fewest} to {most}"
    # An interval of so few samples is their range, see gpipe_bench.results.intervals; the reader should know.
    few = " (with so few, their range)" if most <= _FEW else ""
    bar = f"bar: its 95% bootstrap interval{few}"
    what = "steps" if group.head.evidence == "emulated" else "repeats"
    return f"Filled: median of {repeats} {what}, {bar}, small open circles: single {what}.{other}"
