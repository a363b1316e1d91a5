"""Transparency as a figure: losses, gradients, running statistics and accuracies, with and without the pipeline."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.claims import ARM_STYLES, add_claims
from gpipe_bench.figures.page import Frame, Page
from gpipe_bench.figures.style import FAINT, RIGHT_IN, RULE, WIDTH_IN, drawing, save
from gpipe_bench.transparency_rows import CLAIM_COLUMNS, LAYER_COLUMNS, STEP_COLUMNS, TransparencyRow

__all__ = ["draw_transparency", "transparency_figure"]

_LEFT_IN: Final = 0.55
_FLOOR: Final = 1e-18
Record = Mapping[str, str]
Tables = Mapping[str, Sequence[Record]]


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
    needed = {"": TransparencyRow.columns(), "_steps": STEP_COLUMNS, "_layers": LAYER_COLUMNS}
    tables: dict[str, Sequence[Record]] = {}
    problems: list[str] = []
    for suffix, columns in {**needed, "_verdict": CLAIM_COLUMNS}.items():
        path = rows_csv.with_name(f"{rows_csv.stem}{suffix}{rows_csv.suffix}")
        try:
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                tables[suffix] = list(reader)
                missing = sorted(set(columns) - set(reader.fieldnames or ()))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            problems.append(f"table must be a readable CSV file, got {path} ({error}); collect the results first")
            continue
        if missing:
            problems.append(f"columns of {path} must include {', '.join(missing)}, got none; collect the results again")
    if problems:
        raise ConfigError(problems)
    known = dict.fromkeys(row["model"] for row in tables[""])
    if model and model not in known:
        raise ConfigError([f"model must be one of {', '.join(known)}, got {model!r}; use one of them"])
    if model:
        tables = {name: [record for record in table if record["model"] == model] for name, table in tables.items()}
    if not any(row["status"] == "ok" for row in tables[""]):
        raise ConfigError([f"table must have a row that is ok, got none in {rows_csv}; read their reasons"])
    with drawing():
        return save(transparency_figure(tables), out_stem)


def transparency_figure(tables: Tables) -> Figure:
    """The figure of some tables, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    page = Page()
    good = [row for row in tables[""] if row["status"] == "ok"]
    for k, model in enumerate(dict.fromkeys(row["model"] for row in good)):
        if k:
            page.space(0.15)
        own = {name: [record for record in table if record["model"] == model] for name, table in tables.items()}
        _add_model(page, model, own, next(row for row in good if row["model"] == model))
    return page.render()


def _add_model(page: Page, model: str, tables: Tables, head: Record) -> None:
    page.heading(f"{model}: training with and without the pipeline", head["evidence"])
    seeds = len({row["seed"] for row in tables[""]})
    setting = f"batch {head['batch_size']}, {head['chunks']} chunks, {head['partitions']} partitions, {seeds} seeds"
    page.paragraph(f"{head['data']}; {head['model_args'].replace(';', ', ')}; {setting}", colour=FAINT)
    steps = [r for r in tables["_steps"] if (r["precision"], r["normalisation"]) == ("float32", "batch")]
    _strip(page, "Training loss", lambda axes: _losses(axes, steps), 0.7)
    _strip(page, "Gradient difference at each step (relative)", lambda axes: _gradients(axes, steps), 0.65)
    layers = [r for r in tables["_layers"] if (r["precision"], r["normalisation"]) == ("float32", "batch")]
    if layers:
        title = "Running variance after step 1, difference to plain"
        _strip(page, title, lambda axes: _statistics(axes, layers), 0.75)
    claims = [r for r in tables["_verdict"] if (r["precision"], r["normalisation"]) == ("float32", "batch")]
    # Without running statistics there is nothing to defer: the runs that ask for it repeat the others.
    add_claims(page, claims if layers else [r for r in claims if r["deferred_batch_norm"] != "True"])
    page.space(0.04)
    if not layers:
        page.paragraph("No batch normalisation in this model: deferring it changes nothing, and is left out.")
    reading = "Lines: medians of the seeds; thin: each. Bars: 95% intervals of paired differences; grey: margin."
    page.paragraph(f"{reading} 'pipeline': all checkpoint modes, the same to the bit.")


def _strip(page: Page, title: str, draw: Callable[[Axes], None], height_in: float) -> None:
    def body(frame: Frame) -> None:
        frame.text(0.06, 0.06, title, fontweight="bold")
        axes = frame.axes(_LEFT_IN, WIDTH_IN - _LEFT_IN - RIGHT_IN, 0.36, height_in)
        axes.grid(axis="y", linewidth=0.3, color=RULE)
        axes.set_axisbelow(True)
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        columns = max(len(labels), 1)
        axes.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(-0.01, 0.97), ncols=columns, borderpad=0,
            columnspacing=0.8, handlelength=1.5, handletextpad=0.3, borderaxespad=0.1,
        )  # fmt: skip

    page.strip(0.36 + height_in + 0.33, body)


def _line(
    axes: Axes, records: Sequence[Record], xy: tuple[str, str], style: str, label: str, *, beneath: bool = False
) -> None:
    """Draw the median over seeds; ``beneath``: broad, to be seen where another line lies on it."""
    x, y = xy
    by_seed: dict[str, dict[int, float]] = {}
    for record in records:
        by_seed.setdefault(record["seed"], {})[int(record[x])] = max(float(record[y]), _FLOOR)
    colour, dash, marker = ARM_STYLES[style]
    places = sorted(next(iter(by_seed.values()), {}))
    if x == "step":
        for values in by_seed.values():
            axes.plot(places, [values[k] for k in places], color=colour, linewidth=0.3, alpha=0.5)
    middle = [median(values[k] for values in by_seed.values()) for k in places]
    every = max(1, len(places) // 8)
    width, size = (2.4, 4.0) if beneath else (0.9, 2.4)
    axes.plot(
        places, middle, color=colour, linestyle=dash, linewidth=width,
        marker=marker, markersize=size, markevery=every, label=label,
    )  # fmt: skip


def _of(records: Sequence[Record], arm: str, checkpoint: str = "", deferred: str = "") -> list[Record]:
    key = (arm, checkpoint, deferred)
    return [r for r in records if (r["arm"], r["checkpoint"], r["deferred_batch_norm"]) == key]


def _losses(axes: Axes, steps: Sequence[Record]) -> None:
    _line(axes, _of(steps, "plain"), ("step", "loss"), "plain", "plain", beneath=True)
    _line(axes, _of(steps, "accumulated"), ("step", "loss"), "accumulated", "accumulated micro-batches", beneath=True)
    _line(axes, _of(steps, "pipeline", "except_last", "True"), ("step", "loss"), "deferred", "pipeline")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")


def _gradients(axes: Axes, steps: Sequence[Record]) -> None:
    pipeline = _of(steps, "pipeline", "except_last", "True")
    _line(axes, pipeline, ("step", "gradient_difference_plain"), "plain", "to plain")
    _line(axes, pipeline, ("step", "gradient_difference_accumulated"), "accumulated", "to accumulated micro-batches")
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR / 10, 1e3)
    axes.set_yticks([_FLOOR, 1e-12, 1e-6, 1], ["exact 0", "1e-12", "1e-6", "1"])
    axes.minorticks_off()
    axes.set_xlabel("step")


def _statistics(axes: Axes, layers: Sequence[Record]) -> None:
    first = [record for record in layers if record["step"] == "0"]
    for mode in ("always", "except_last", "never"):
        records = _of(first, "pipeline", mode, "False")
        _line(axes, records, ("layer", "variance_difference"), mode, mode)
    records = _of(first, "pipeline", "except_last", "True")
    _line(axes, records, ("layer", "variance_difference"), "deferred", "deferred")
    axes.set_yscale("log")
    axes.set_ylim(1e-8, 10)
    axes.set_yticks([1e-8, 1e-6, 1e-4, 1e-2, 1], ["1e-8", "1e-6", "1e-4", "1e-2", "1"])
    axes.minorticks_off()
    axes.set_xlabel("layer, from the image on (modes: not deferred)")
