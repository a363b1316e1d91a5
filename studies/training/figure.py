"""The figure of the study: losses, gradients, running statistics, and claims beside the plain model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.style import INK, OKABE_ITO, RULE, draw
from gpipe_bench.results.tables import plain_records, read_table
from gpipe_bench.results.transparency_rows import CLAIM_COLUMNS, LAYER_COLUMNS, STEP_COLUMNS, TransparencyRow, arm_label
from studies.strips import Strip, stacked

STYLES: Final = {
    "plain": (OKABE_ITO["black"], "-", "o"),
    "accumulated": (OKABE_ITO["orange"], "--", "^"),
    "always": (OKABE_ITO["vermilion"], "-", "v"),
    "except_last": (OKABE_ITO["purple"], "--", "s"),
    "never": (OKABE_ITO["sky"], ":", "D"),
    "deferred": (OKABE_ITO["blue"], "-", "o"),
}
"""Colour, line and marker of the arms that are told apart."""

_COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "": TransparencyRow.columns(), "_steps": STEP_COLUMNS, "_layers": LAYER_COLUMNS, "_verdict": CLAIM_COLUMNS,
}  # fmt: skip
_QUANTITIES: Final = {
    "loss_last_to_plain": "training loss of the last step",
    "accuracy_fraction": "accuracy, evaluation",
    "accuracy_batch_fraction": "accuracy, norms by held-out batch",
    "iou_fraction": "intersection over union",
}
_FLOOR: Final = 1e-18
_NOTES: Final = (
    "Lines: medians of the seeds; thin: each. Bars: 95% intervals of",
    "paired differences; grey: margin. 'pipeline': all checkpoint",
    "modes, the same to the bit.",
)
_NO_NORMS: Final = "No batch normalisation in this model: nothing to defer."
_BROAD: Final = ("plain", "accumulated micro-batches")
Tables = dict[str, pd.DataFrame]


def draw_training(rows_csv: Path, model: str, out_stem: Path) -> list[Path]:
    """Draw one model of the tables whose rows are in ``rows_csv``; gives the paths: SVG, PDF, PNG.

    Raises:
        ConfigError: a table cannot be read or lacks a column, or has no row of the model that is ok.
        OutputError: the figure cannot be written.
    """
    tables: Tables = {}
    for suffix, columns in _COLUMNS.items():
        path = rows_csv.with_name(f"{rows_csv.stem}{suffix}{rows_csv.suffix}")
        records, kind = None if suffix else TransparencyRow, f"transparency{suffix.replace('_', '-')}"
        table = read_table(path, columns, records, kind=kind, empty=suffix == "_layers")
        tables[suffix] = table[table["model"] == model]
    rows = tables[""]
    if not any(rows["status"] == "ok"):
        raise ConfigError([f"table must have a row of {model} that is ok, got none in {rows_csv}; read their reasons"])
    return draw(training_figure, tables, out_stem)


def draw_reference(out: Path = Path("figures/reference")) -> Iterator[list[Path]]:
    """Draw every model of every committed table below ``out``; gives the paths of each figure."""
    for table in sorted(REFERENCE_FOLDER.glob("measured/*/transparency.csv")):
        for model in ("amoebanet-d", "unet"):
            yield draw_training(table, model, out / f"measured-{table.parent.name}" / f"transparency_{model}")


def training_figure(tables: Tables) -> Figure:
    """The figure of the tables of one model, to be called inside :func:`gpipe_bench.figures.style.drawing`."""
    rows = tables[""][tables[""]["status"] == "ok"]
    steps, layers, claims = (
        table[(table["precision"] == "float32") & (table["normalisation"] == "batch")]
        for table in (tables["_steps"], tables["_layers"], tables["_verdict"])
    )
    # Without running statistics there is nothing to defer: the runs that ask for it repeat the others.
    claims = claims if len(layers) else claims[~claims["deferred_batch_norm"].fillna(False).astype(bool)]
    claimed = {name: _lines(claims[claims["quantity"] == name]) for name in _QUANTITIES}
    claimed = {name: lines for name, lines in claimed.items() if lines}
    (head,) = plain_records(rows.head(1))
    size = f"{head['chunks']} chunks, {head['partitions']} partitions, {len(rows['seed'].unique())} seeds"
    top = [f"{head['model']}, with and without pipeline", str(head["data"]), f"batch {head['batch_size']}, {size}"]
    strips = [
        Strip("Training loss", 0.7, above_in=0.16, below_in=0.33),
        Strip("Gradient difference at each step (relative)", 0.65, above_in=0.16, below_in=0.33),
    ]
    if len(layers):
        title = "Running variance after step 1, difference to plain"
        strips.append(Strip(title, 0.75, above_in=0.16, below_in=0.33))
    strips += [
        Strip(f"Minus plain: {_QUANTITIES[name]}", 0.06 + 0.125 * len(lines), left_in=1.37, right_in=0.9)
        for name, lines in claimed.items()
    ]
    figure, axes = stacked(top, str(head["evidence"]), strips, _NOTES if len(layers) else [*_NOTES, _NO_NORMS])
    _losses(axes[0][0], steps)
    _gradients(axes[1][0], steps)
    if len(layers):
        _statistics(axes[2][0], layers)
    for lines, (own,) in zip(reversed(claimed.values()), reversed(axes), strict=False):
        _claims(own, lines)
    return figure


def _line(axes: Axes, records: pd.DataFrame, xy: tuple[str, str], style: str, label: str) -> None:
    """The median over seeds, each seed thin beside it; those that others lie on are broad."""
    x, y = xy
    colour, dash, marker = STYLES[style]
    by_seed = records.pivot_table(index=x, columns="seed", values=y, aggfunc="first").clip(lower=_FLOOR)
    if x == "step":
        axes.plot(by_seed.index, by_seed, color=colour, linewidth=0.3, alpha=0.5)
    axes.plot(
        by_seed.index, by_seed.median(axis=1), color=colour, linestyle=dash, linewidth=2.4 if label in _BROAD else 0.9,
        marker=marker, markersize=2.4, markevery=max(1, len(by_seed) // 8), label=label,
    )  # fmt: skip


def _of(records: pd.DataFrame, arm: str, checkpoint: str = "", *, deferred: bool = False) -> pd.DataFrame:
    own = (records["arm"] == arm) & (records["checkpoint"].fillna("") == checkpoint)
    return records[own & (records["deferred_batch_norm"].fillna(False).astype(bool) == deferred)]


def _finish(axes: Axes, xlabel: str, ticks: dict[float, str] | None = None) -> None:
    """Legend and grid; with ``ticks`` the scale is logarithmic."""
    axes.set_xlabel(xlabel)
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 0.98), ncols=4, borderpad=0, borderaxespad=0.1, columnspacing=0.8,
        handlelength=1.5, handletextpad=0.3,
    )  # fmt: skip
    if ticks:
        axes.set_yscale("log")
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.minorticks_off()


def _losses(axes: Axes, steps: pd.DataFrame) -> None:
    _line(axes, _of(steps, "plain"), ("step", "loss"), "plain", "plain")
    _line(axes, _of(steps, "accumulated"), ("step", "loss"), "accumulated", "accumulated micro-batches")
    _line(axes, _of(steps, "pipeline", "except_last", deferred=True), ("step", "loss"), "deferred", "pipeline")
    axes.set_ylim(bottom=0)
    _finish(axes, "step")


def _gradients(axes: Axes, steps: pd.DataFrame) -> None:
    pipeline = _of(steps, "pipeline", "except_last", deferred=True)
    _line(axes, pipeline, ("step", "gradient_difference_plain"), "plain", "to plain")
    _line(axes, pipeline, ("step", "gradient_difference_accumulated"), "accumulated", "to accumulated micro-batches")
    _finish(
        axes, "step",
        {_FLOOR: "exact 0", 1e-12: "1e-12", 1e-6: "1e-6", 1: "1"},
    )  # fmt: skip
    axes.set_ylim(_FLOOR / 10, 1e3)


def _statistics(axes: Axes, layers: pd.DataFrame) -> None:
    first = layers[layers["step"] == 0]
    for mode in ("always", "except_last", "never"):
        _line(axes, _of(first, "pipeline", mode), ("layer", "variance_difference"), mode, mode)
    deferred = _of(first, "pipeline", "except_last", deferred=True)
    _line(axes, deferred, ("layer", "variance_difference"), "deferred", "deferred")
    _finish(
        axes,
        "layer, from the image on (modes: not deferred)",
        {1e-8: "1e-8", 1e-6: "1e-6", 1e-4: "1e-4", 1e-2: "1e-2", 1: "1"},
    )
    axes.set_ylim(1e-8, 10)


def _lines(claims: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """A claim per line by its label; arms of which a claim is the same to the bit share one."""
    if claims.empty:
        return {}
    modes = len(claims["checkpoint"][claims["arm"] == "pipeline"].unique())
    both = bool(claims["deferred_batch_norm"].fillna(False).astype(bool).any())
    keys = ["arm", "deferred_batch_norm", "estimate", "low", "high", "verdict"]
    alike = claims.groupby(keys, sort=False, dropna=False)
    return {_label(own, modes, both=both): plain_records(own.head(1))[0] for _, own in alike}


def _label(claims: pd.DataFrame, modes: int, *, both: bool) -> str:
    (head,) = plain_records(claims.head(1))
    if head["arm"] != "pipeline":
        return arm_label(head["arm"], "", "")
    kind = ", deferred" if head["deferred_batch_norm"] else ", not deferred" if both else ""
    return ("pipeline" if len(claims) == modes > 1 else ", ".join(claims["checkpoint"])) + kind


def _claims(axes: Axes, lines: dict[str, dict[str, Any]]) -> None:
    margin = next(iter(lines.values()))["margin"]
    axes.axvspan(-margin, margin, color="#E8E8E8", linewidth=0)
    axes.axvline(0, color=INK, linewidth=0.4)
    for y, claim in enumerate(lines.values()):
        arm = claim["arm"]
        style = arm if arm != "pipeline" else "deferred" if claim["deferred_batch_norm"] else claim["checkpoint"]
        colour, _, marker = STYLES[style]
        # One seed gives no interval.
        low, high = (claim["estimate"] if claim[end] is None else claim[end] for end in ("low", "high"))
        axes.plot([low, high], [y, y], color=colour)
        axes.plot(claim["estimate"], y, marker, color=colour, markersize=3.2)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_yticks(range(len(lines)), list(lines))
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(lines)), [str(claim["verdict"]) for claim in lines.values()])
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)
    axes.margins(x=0.1)
