"""Published tables as a figure: a line per row of print, its published value beside those of other evidence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from matplotlib.figure import Figure

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.lines import Line, add_legend, add_lines
from gpipe_bench.figures.page import Page
from gpipe_bench.figures.style import FAINT, draw
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.results.rows import EVIDENCE, Row
from gpipe_bench.results.tables import frame_of

if TYPE_CHECKING:
    import pandas as pd

METRICS: Final = {
    "throughput_samples_per_s": "throughput (samples/s)",
    "peak_reserved_gib": "memory reserved, all devices (GiB)",
}
"""What can be drawn, with its name on the axis."""

_SETTING: Final = ("partitions", "chunks", "batch_size", "checkpoint", "model_args")


def draw_published_tables(rows_csv: Path, out_stem: Path, metric: str = "") -> list[Path]:
    """Draw the published tables in a result table.

    Args:
        rows_csv: rows with the columns of :class:`gpipe_bench.results.rows.Row`.
        out_stem: path of the figure without its suffix.
        metric: one of :data:`METRICS`; by default the one that was printed.

    Returns:
        The paths written: SVG, PDF, PNG.

    Raises:
        ConfigError: there is no such metric, the table cannot be read, lacks a column, or variants would share a line.
        OutputError: the figure cannot be written.
    """
    if metric and metric not in METRICS:
        raise ConfigError([f"metric must be one of {', '.join(METRICS)}, got {metric!r}; use one of them"])
    rows = read_rows(rows_csv)
    _check_lines(rows, rows_csv)
    return draw(partial(published_tables_figure, metric=metric or printed_metric(rows)), rows, out_stem)


def printed_metric(rows: Sequence[Row]) -> str:
    """The first metric that the published rows have; throughput where there are none."""
    published = [row for row in rows if row.evidence == "published"]
    printed = [name for name in METRICS if any(getattr(row, name) is not None for row in published)]
    return (printed or list(METRICS))[0]


def published_tables_figure(rows: Sequence[Row], metric: str) -> Figure:
    """The figure of some rows, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page()
    rows = _as_run(rows)
    by_model = {
        model: [row for row in rows if row.model == model] for model in dict.fromkeys(row.model for row in rows)
    }
    for model, own in by_model.items():
        if own[0] is not rows[0]:
            page.space(0.12)
        kinds = [kind for kind in EVIDENCE if any(row.evidence == kind for row in own)]
        page.heading(f"{model}: published {METRICS[metric].partition(' ')[0]} again", *kinds)
        page.paragraph("; ".join([*_devices(own), *_brackets(own)]), colour=FAINT)
        lines = _lines(own, metric)
        page.space(0.05)
        add_lines(page, lines, METRICS[metric], ("simulated", "published"))
    kinds = [kind for kind in EVIDENCE if any(row.evidence == kind for row in rows)]
    page.space(0.04)
    add_legend(page, kinds)
    page.space(0.03)
    micro = ", m: micro-batches" if not all(map(_sizes_vary, by_model.values())) else ""
    page.paragraph(f"Right: simulated over published, minus 1. n: partitions{micro}.", colour=FAINT)
    return page.render()


def _check_lines(rows: Sequence[Row], rows_csv: Path) -> None:
    lines = frame_of(rows, Row).groupby(["evidence", "model", *_SETTING], dropna=False)
    most = lines["variant"].nunique().max()
    if most > 1:
        rule = f"rows of {rows_csv} must have one variant for each setting"
        raise ConfigError([f"{rule}, got {most} for one; draw the ablation of them, or leave one of them"])


def _as_run(rows: Sequence[Row]) -> list[Row]:
    """Simulated rows of one autograd engine: where there are two, that of the published runs."""
    two = any(row.flavour == "published" for row in rows)
    return [row for row in rows if not (two and row.flavour == "current")]


def _devices(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(f"{row.evidence}: {row.device}" for row in rows if row.device))


def _sizes_vary(rows: Sequence[Row]) -> bool:
    """Whether rows of one model differ in its arguments, which then name the lines."""
    return len({row.model_args for row in rows}) > 1


def _sizes(model_args: str) -> dict[str, str]:
    """The arguments that the papers name a size of the model by."""
    known = dict(part.split("=", 1) for part in model_args.split(";"))
    return {name: known[name] for name in ("L", "B", "D", "C") if name in known}


def _brackets(rows: Sequence[Row]) -> list[str]:
    return [f"in brackets: {', '.join(_sizes(rows[0].model_args))}"] if _sizes_vary(rows) else []


def _lines(rows: Sequence[Row], metric: str) -> list[Line]:
    lines = frame_of(rows, Row).groupby([*_SETTING], sort=False, dropna=False)
    return [_line(line, metric, several=_sizes_vary(rows)) for _, line in lines]


def _line(line: pd.DataFrame, metric: str, *, several: bool) -> Line:
    kinds = line.groupby("evidence", sort=False)
    values, first = kinds[metric].median().dropna(), kinds["status"].first()
    failures = {str(kind): status for kind, status in first.items() if status != "ok" and kind not in values}
    head = line.iloc[0]
    size = f"({', '.join(_sizes(head['model_args']).values())})" if several else f"m={head['chunks']}"
    return Line(f"n={head['partitions']} {size}", {str(kind): value for kind, value in values.items()}, failures)
