"""Training with and without the pipeline: gradients, and what the last loss and the accuracy say of a difference.

Arms of which a claim is the same to the bit share a line: a pipeline computes the same in every checkpoint mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import Figure, Panel, Rows, Selection, across, heading, legend, note
from gpipe_bench.figures.style import INK, OKABE_ITO, RULE
from gpipe_bench.results.tables import plain_records, read_table
from gpipe_bench.results.transparency_rows import (
    CLAIM_COLUMNS,
    LAYER_COLUMNS,
    STEP_COLUMNS,
    TransparencyRow,
    arm_label,
)

_TO: Final = ("plain", "accumulated")
"""What gradients are compared with: the plain model, and micro-batches whose gradients add up without a pipeline."""

_FLOOR: Final = 1e-18
_COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "": TransparencyRow.columns(),
    "_steps": STEP_COLUMNS,
    "_layers": LAYER_COLUMNS,
    "_verdict": CLAIM_COLUMNS,
}
_LAST_KEY: Final = {"_steps": "step", "_layers": "layer", "_verdict": "reference"}
"""The last of the columns by which lines of a companion differ; all before it count too."""

Tables = Mapping[str, pd.DataFrame]

ARM_STYLES: Final[dict[str, tuple[str, Any, str]]] = {
    "plain": (OKABE_ITO["black"], "-", "o"),
    "accumulated": (OKABE_ITO["orange"], "--", "^"),
    "always": (OKABE_ITO["vermilion"], "-", "v"),
    "except_last": (OKABE_ITO["purple"], "--", "s"),
    "never": (OKABE_ITO["sky"], ":", "D"),
    "deferred": (OKABE_ITO["blue"], "-", "o"),
}
"""Colour, line and marker of the arms that are told apart; each differs from the others in two of them."""

_NAMES: Final = {
    "loss_last_to_plain": "training loss of the last step",
    "accuracy_fraction": "accuracy, evaluation",
    "accuracy_batch_fraction": "accuracy, norms by held-out batch",
    "iou_fraction": "intersection over union",
}

_READING: Final = (
    "Thin lines: each seed; thick: their median. Marks and bars: paired differences with 95 % intervals; "
    "grey: margin of equivalence."
)
_VALUES: Final = ("estimate", "low", "high", "verdict")


def _read(rows_csv: Path, selection: Selection) -> Tables:
    """The four tables of the experiment, or what they have of one model."""
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
    model, known = selection.model, tables[""]["model"].unique()
    if model and model not in known:
        raise ConfigError([f"model must be one of {', '.join(known)}, got {model!r}; use one of them"])
    if model:
        tables = {name: table[table["model"] == model] for name, table in tables.items()}
    if not any(tables[""]["status"] == "ok"):
        raise ConfigError([f"table must have a row that is ok, got none in {rows_csv}; read their reasons"])
    return tables


def _panels(tables: Tables, width_in: float) -> Rows:
    good = tables[""][tables[""]["status"] == "ok"]
    models = good["model"].unique()
    return across(
        _model(model, {name: table[table["model"] == model] for name, table in tables.items()}, width_in)
        for model in models
    )


def _model(model: str, tables: Tables, width_in: float) -> Rows:
    rows = tables[""]
    (head,) = plain_records(rows[rows["status"] == "ok"].head(1))
    seeds = len(rows["seed"].unique())
    setting = f"batch {head['batch_size']}, {head['chunks']} chunks, {head['partitions']} partitions, {seeds} seeds"
    setting = f"{head['data']}; {head['model_args'].replace(';', ', ')}; {setting}"
    steps, layers, claims = (
        table[(table["precision"] == "float32") & (table["normalisation"] == "batch")]
        for table in (tables["_steps"], tables["_layers"], tables["_verdict"])
    )
    # Without running statistics there is nothing to defer: the runs that ask for it repeat the others.
    claims = claims if len(layers) else claims[~claims["deferred_batch_norm"].fillna(False)]
    title = finding(model, claims)
    words = "No batch normalisation in this model: deferring it changes nothing, and is left out."
    return [
        heading(title, [head["evidence"]], setting, width_in),
        note("Gradients of the pipeline, difference at each step:", width_in, colour=INK, bold=True),
        [Panel(_gradients, steps, 0.75)],
        legend([_handle(style, f"to {style} {'micro-batches' if style != 'plain' else ''}") for style in _TO], 2),
        *_claims(claims, width_in),
        *([note(words, width_in)] if layers.empty else []),
        note(_READING, width_in),
    ]


def finding(model: str, claims: pd.DataFrame) -> str:
    """In how many claims the gradients of the pipeline are those of accumulated micro-batches, bit for bit."""
    own = claims[(claims["arm"] == "pipeline") & (claims["quantity"] == "gradient_difference_accumulated_largest")]
    exact = int((own["verdict"] == "exact").sum())
    if not len(own):
        return f"{model}: training with and without the pipeline"
    if exact == len(own):
        return f"{model}: the pipeline gives the gradients of accumulated micro-batches, bit for bit"
    return f"{model}: gradients are those of accumulated micro-batches in {exact} of {len(own)} arms"


def _claims(claims: pd.DataFrame, width_in: float) -> Rows:
    """A panel for each quantity in which arms are compared with the plain model."""
    present = [name for name in _NAMES if name in set(claims["quantity"])]
    if "iou_fraction" in present and "accuracy_batch_fraction" in present:
        present.remove("accuracy_batch_fraction")
    # One seed gives no interval: the estimate stands for both of its ends.
    ends = {end: claims[end].fillna(claims["estimate"]) for end in ("low", "high")}
    found: Rows = []
    for name in present:
        own = claims.assign(**ends)[claims["quantity"] == name]
        lines = _lines(own)
        reach = max(own["margin"].iloc[0], *own[["low", "high"]].abs().max()) * 1.15
        draw = partial(_draw_claims, reach=reach)
        found.append(note(f"Minus plain: {_NAMES[name]}", width_in, colour=INK, bold=True))
        found.append([Panel(draw, lines, 0.125 * len(lines) + 0.06)])
    return found


def _draw_claims(axes: Axes, lines: Mapping[str, Mapping[str, Any]], reach: float) -> None:
    margin = next(iter(lines.values()))["margin"]
    axes.axvspan(-margin, margin, color="#E8E8E8", linewidth=0)
    axes.axvline(0, color=INK, linewidth=0.4)
    for y, claim in enumerate(lines.values()):
        colour, _, marker = ARM_STYLES[_style(claim)]
        axes.plot([claim["low"], claim["high"]], [y, y], color=colour)
        axes.plot(claim["estimate"], y, marker, color=colour, markersize=3.2)
        axes.text(1.02, y, claim["verdict"], transform=axes.get_yaxis_transform(), va="center_baseline")
    axes.set_yticks(range(len(lines)), list(lines))
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(-reach, reach), ylim=(len(lines) - 0.5, -0.5))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, symmetric=True))


def _lines(claims: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """A claim per line by its label."""
    modes = len(claims["checkpoint"][claims["arm"] == "pipeline"].unique())
    both = bool(claims["deferred_batch_norm"].any())
    alike = claims.groupby(["arm", "deferred_batch_norm", *_VALUES], sort=False, dropna=False)
    return {_label(own, modes, both=both): plain_records(own.head(1))[0] for _, own in alike}


def _label(claims: pd.DataFrame, modes: int, *, both: bool) -> str:
    """The arm; a pipeline by its checkpoint modes unless they are all alike, and by deferral where some defer."""
    (head,) = plain_records(claims.head(1))
    if head["arm"] != "pipeline":
        return arm_label(head["arm"], "", "")
    kind = ", deferred" if head["deferred_batch_norm"] else ", not deferred" if both else ""
    return ("pipeline" if len(claims) == modes > 1 else ", ".join(claims["checkpoint"])) + kind


def _style(claim: Mapping[str, Any]) -> str:
    if claim["arm"] != "pipeline":
        return str(claim["arm"])
    return "deferred" if claim["deferred_batch_norm"] else str(claim["checkpoint"])


def _handle(style: str, label: str) -> Line2D:
    colour, dash, marker = ARM_STYLES[style]
    return Line2D([], [], color=colour, linestyle=dash, marker=marker, markersize=2.4, label=label)


def _gradients(axes: Axes, steps: pd.DataFrame) -> None:
    """Difference of the gradients from each reference: median over seeds, and each seed as a thin line."""
    own = (steps["arm"] == "pipeline") & (steps["checkpoint"] == "except_last")
    records = steps[own & steps["deferred_batch_norm"].fillna(False)]
    for style in _TO:
        column = f"gradient_difference_{style}"
        by_seed = records.pivot_table(index="step", columns="seed", values=column, aggfunc="first").clip(lower=_FLOOR)
        for seed in by_seed:
            axes.plot(by_seed.index, by_seed[seed], color=ARM_STYLES[style][0], linewidth=0.3, alpha=0.5)
        line = _handle(style, "")
        line.set_data(by_seed.index, by_seed.median(axis=1))
        line.set_markevery(max(1, len(by_seed) // 8))
        axes.add_line(line)
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR / 10, 1e3)
    axes.set_yticks([_FLOOR, 1e-12, 1e-6, 1], ["exact 0", "1e-12", "1e-6", "1"])
    axes.minorticks_off()
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    axes.set_ylabel("relative\ndifference")
    axes.set_xlabel("step")


FIGURE: Final = Figure(
    name="transparency",
    caption=(
        "Training with and without the pipeline, on the same images and from the same weights: largest difference of "
        "the gradients in each step, then loss and accuracy minus those of the plain model, with 95 % intervals of "
        "paired differences; grey: margin of equivalence. 'pipeline': all checkpoint modes, the same to the bit."
    ),
    sources=("", "_steps", "_layers", "_verdict"),
    read=_read,
    panels=_panels,
)
