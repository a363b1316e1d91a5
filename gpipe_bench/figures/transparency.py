"""Transparency as a figure: losses, gradients, running statistics and accuracies, with and without the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.claims import ARM_STYLES, add_claims
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.style import FAINT, RIGHT_IN, RULE, WIDTH_IN, draw
from gpipe_bench.results.tables import plain_records, read_table
from gpipe_bench.results.transparency_rows import CLAIM_COLUMNS, LAYER_COLUMNS, STEP_COLUMNS, TransparencyRow

if TYPE_CHECKING:
    import pandas as pd

_LEFT_IN: Final = 0.55
_FLOOR: Final = 1e-18
_COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "": TransparencyRow.columns(),
    "_steps": STEP_COLUMNS,
    "_layers": LAYER_COLUMNS,
    "_verdict": CLAIM_COLUMNS,
}
_LAST_KEY: Final = {"_steps": "step", "_layers": "layer", "_verdict": "reference"}
"""The last of the columns by which lines of a companion differ; all before it count too."""

Tables = Mapping[str, "pd.DataFrame"]


def draw_transparency(rows_csv: Path, out_stem: Path, model: str = "") -> list[Path]:
    """Draw the tables of the transparency experiment.

    Args:
        rows_csv: table of rows; ``_steps``, ``_layers`` and ``_verdict`` lie beside it.
        out_stem: path of the figure without its suffix.
        model: the one to draw; all of them by default.

    Returns:
        The paths written: SVG, PDF, PNG.

    Raises:
        ConfigError: a table cannot be read or lacks a column, or there is no such model; all such problems.
        OutputError: the figure cannot be written.
    """
    tables: dict[str, pd.DataFrame] = {}
    problems: list[str] = []
    for suffix, columns in _COLUMNS.items():
        path = rows_csv.with_name(f"{rows_csv.stem}{suffix}{rows_csv.suffix}")
        records, name = None if suffix else TransparencyRow, f"transparency{suffix.replace('_', '-')}"
        key = columns[: columns.index(_LAST_KEY[suffix]) + 1] if suffix else ()
        try:
            tables[suffix] = read_table(path, columns, records, kind=name, key=key, empty=suffix == "_layers")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    known = tables[""]["model"].unique()
    if model and model not in known:
        raise ConfigError([f"model must be one of {', '.join(known)}, got {model!r}; use one of them"])
    if model:
        tables = {name: table[table["model"] == model] for name, table in tables.items()}
    if not any(tables[""]["status"] == "ok"):
        raise ConfigError([f"table must have a row that is ok, got none in {rows_csv}; read their reasons"])
    return draw(transparency_figure, tables, out_stem)


def transparency_figure(tables: Tables) -> Figure:
    """The figure of some tables, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page()
    good = tables[""][tables[""]["status"] == "ok"]
    for k, model in enumerate(good["model"].unique()):
        if k:
            page.space(0.15)
        _add_model(page, model, {name: table[table["model"] == model] for name, table in tables.items()})
    return page.render()


def _add_model(page: Page, model: str, tables: Tables) -> None:
    rows = tables[""]
    (head,) = plain_records(rows[rows["status"] == "ok"].head(1))
    page.heading(f"{model}: training with and without the pipeline", head["evidence"])
    seeds = len(rows["seed"].unique())
    setting = f"batch {head['batch_size']}, {head['chunks']} chunks, {head['partitions']} partitions, {seeds} seeds"
    page.paragraph(f"{head['data']}; {head['model_args'].replace(';', ', ')}; {setting}", colour=FAINT)
    steps, layers, claims = (
        table[(table["precision"] == "float32") & (table["normalisation"] == "batch")]
        for table in (tables["_steps"], tables["_layers"], tables["_verdict"])
    )
    _strip(page, "Training loss", lambda axes: _losses(axes, steps), 0.7)
    _strip(page, "Gradient difference at each step (relative)", lambda axes: _gradients(axes, steps), 0.65)
    if len(layers):
        title = "Running variance after step 1, difference to plain"
        _strip(page, title, lambda axes: _statistics(axes, layers), 0.75)
    # Without running statistics there is nothing to defer: the runs that ask for it repeat the others.
    add_claims(page, claims if len(layers) else claims[~claims["deferred_batch_norm"].fillna(False)])
    page.space(0.04)
    if layers.empty:
        page.paragraph("No batch normalisation in this model: deferring it changes nothing, and is left out.")
    reading = "Lines: medians of the seeds; thin: each. Bars: 95% intervals of paired differences; grey: margin."
    page.paragraph(f"{reading} 'pipeline': all checkpoint modes, the same to the bit.")


def _strip(page: Page, title: str, plot: Callable[[Axes], None], height_in: float) -> None:
    def body(frame: Frame) -> None:
        frame.text(0.06, 0.06, title, fontweight="bold")
        axes = frame.axes(_LEFT_IN, WIDTH_IN - _LEFT_IN - RIGHT_IN, 0.36, height_in)
        axes.grid(axis="y", linewidth=0.3, color=RULE)
        axes.set_axisbelow(True)
        plot(axes)
        handles, labels = axes.get_legend_handles_labels()
        columns = max(len(labels), 1)
        axes.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(-0.01, 0.97), ncols=columns, borderpad=0,
            columnspacing=0.8, handlelength=1.5, handletextpad=0.3, borderaxespad=0.1,
        )  # fmt: skip

    page.strip(0.36 + height_in + 0.33, body)


def _line(
    axes: Axes, records: pd.DataFrame, xy: tuple[str, str], style: str, label: str, *, beneath: bool = False
) -> None:
    """Draw the median over seeds; ``beneath``: broad, to be seen where another line lies on it."""
    x, y = xy
    colour, dash, marker = ARM_STYLES[style]
    by_seed = records.pivot_table(index=x, columns="seed", values=y, aggfunc="first").clip(lower=_FLOOR)
    places = [int(place) for place in by_seed.index]
    if x == "step":
        for seed in by_seed:
            axes.plot(places, by_seed[seed], color=colour, linewidth=0.3, alpha=0.5)
    every = max(1, len(places) // 8)
    width, size = (2.4, 4.0) if beneath else (0.9, 2.4)
    axes.plot(
        places, by_seed.median(axis=1), color=colour, linestyle=dash, linewidth=width,
        marker=marker, markersize=size, markevery=every, label=label,
    )  # fmt: skip


def _of(records: pd.DataFrame, arm: str, checkpoint: str = "", *, deferred: bool = False) -> pd.DataFrame:
    own = (records["arm"] == arm) & (records["checkpoint"] == checkpoint)
    return records[own & (records["deferred_batch_norm"].fillna(False) == deferred)]


def _losses(axes: Axes, steps: pd.DataFrame) -> None:
    _line(axes, _of(steps, "plain"), ("step", "loss"), "plain", "plain", beneath=True)
    _line(axes, _of(steps, "accumulated"), ("step", "loss"), "accumulated", "accumulated micro-batches", beneath=True)
    _line(axes, _of(steps, "pipeline", "except_last", deferred=True), ("step", "loss"), "deferred", "pipeline")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")


def _gradients(axes: Axes, steps: pd.DataFrame) -> None:
    pipeline = _of(steps, "pipeline", "except_last", deferred=True)
    _line(axes, pipeline, ("step", "gradient_difference_plain"), "plain", "to plain")
    _line(axes, pipeline, ("step", "gradient_difference_accumulated"), "accumulated", "to accumulated micro-batches")
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR / 10, 1e3)
    axes.set_yticks([_FLOOR, 1e-12, 1e-6, 1], ["exact 0", "1e-12", "1e-6", "1"])
    axes.minorticks_off()
    axes.set_xlabel("step")


def _statistics(axes: Axes, layers: pd.DataFrame) -> None:
    first = layers[layers["step"] == 0]
    for mode in ("always", "except_last", "never"):
        records = _of(first, "pipeline", mode)
        _line(axes, records, ("layer", "variance_difference"), mode, mode)
    records = _of(first, "pipeline", "except_last", deferred=True)
    _line(axes, records, ("layer", "variance_difference"), "deferred", "deferred")
    axes.set_yscale("log")
    axes.set_ylim(1e-8, 10)
    axes.set_yticks([1e-8, 1e-6, 1e-4, 1e-2, 1], ["1e-8", "1e-6", "1e-4", "1e-2", "1"])
    axes.minorticks_off()
    axes.set_xlabel("layer, from the image on (modes: not deferred)")
