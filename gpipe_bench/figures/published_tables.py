"""Published tables: a line per published row, its published value beside those of other evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gpipe_bench.data import PUBLISHED_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import Figure, Panel, Rows, Selection, across, heading, legend, note
from gpipe_bench.figures.style import EVIDENCE_COLOURS, FAINT, INK, RULE
from gpipe_bench.figures.tables import read_beside
from gpipe_bench.figures.text import NAIVE, TIMES, significant
from gpipe_bench.results.rows import EVIDENCE, Row
from gpipe_bench.results.tables import frame_of, read_text

if TYPE_CHECKING:
    import pandas as pd

_SPEED: Final = "throughput_samples_per_s"
METRICS: Final = {
    _SPEED: "throughput (samples/s)",
    "peak_reserved_gib": "memory reserved, all devices (GiB)",
}
"""What is drawn, with its name on the axis: the first that the published rows have."""

_SETTING: Final = ("partitions", "chunks", "batch_size", "checkpoint", "model_args")
_LINE_IN: Final = 0.155
_GAIN: Final = 1.28
"""Place of the speed-ups beside the errors, over the width of the axes."""

_MARKS: Final[dict[str, dict[str, Any]]] = {
    "published": {"marker": "d", "markersize": 6.5, "markerfacecolor": "none", "markeredgecolor": INK},
    "simulated": {"marker": "o", "markersize": 3.6, "color": EVIDENCE_COLOURS["simulated"]},
    # Often on the simulated one, so open and larger.
    "emulated": {
        "marker": "^",
        "markersize": 6.5,
        "markerfacecolor": "none",
        "markeredgecolor": EVIDENCE_COLOURS["emulated"],
    },
    "measured": {"marker": "s", "markersize": 3.6, "color": EVIDENCE_COLOURS["measured"]},
}


@dataclass(frozen=True, slots=True)
class _Line:
    """One setting: its name, and for each kind of evidence its value or why there is none."""

    name: str
    known: dict[str, float]
    failures: dict[str, str]


def _read(path: Path, selection: Selection) -> list[Row]:
    """Rows with those beside them; refuses variants that would share a line."""
    rows = read_beside(path, selection)
    lines = frame_of(rows, Row).groupby(["evidence", "model", *_SETTING], dropna=False)
    if (most := lines["variant"].nunique().max()) > 1:
        rule = f"rows of {path} must have one variant for each setting"
        raise ConfigError([f"{rule}, got {most} for one; draw the ablation of them, or leave one of them"])
    return rows


def _panels(rows: Sequence[Row], width_in: float) -> Rows:
    kinds = [kind for kind in EVIDENCE if any(row.evidence == kind for row in rows)]
    published = [row for row in rows if row.evidence == "published"]
    printed = [name for name in METRICS if any(getattr(row, name) is not None for row in published)]
    metric, drawn = (printed or list(METRICS))[0], rows[-1].evidence
    models = sorted({row.model for row in rows})
    parts = [_model([row for row in rows if row.model == model], metric, drawn, width_in) for model in models]
    handles = [Line2D([], [], linestyle="none", label=kind, **_MARKS[kind]) for kind in kinds]
    gains = "; then both over the first row" if metric == _SPEED else ""
    # Lines of one size are told apart by their micro-batches.
    chunks = any(len({row.model_args for row in rows if row.model == model}) == 1 for model in models)
    words = f"Right: {drawn} over published, minus 1{gains}. n: partitions{', m: micro-batches' if chunks else ''}."
    naive = f" {NAIVE}" if any(row.chunks == 1 and (row.partitions or 1) > 1 for row in rows) else ""
    return [*across(parts), legend(handles, len(handles)), note(words + naive + _whole_batch(rows), width_in)]


def _whole_batch(rows: Sequence[Row]) -> str:
    """Why a small model does not fit where larger ones do; empty where none is refused for that."""
    plain = any((row.status, row.chunks, row.checkpoint) == ("oom", 1, "never") for row in rows)
    split = any(row.status == "ok" and (row.chunks or 1) > 1 and row.checkpoint != "never" for row in rows)
    words = " oom: the whole batch at once, without checkpoints; larger models run in micro-batches with checkpoints."
    return words if plain and split else ""


def _model(rows: Sequence[Row], metric: str, drawn: str, width_in: float) -> Rows:
    kinds = [kind for kind in EVIDENCE if any(row.evidence == kind for row in rows)]
    devices: dict[str, list[str]] = {}
    for kind in kinds:
        for device in dict.fromkeys(row.device for row in rows if row.evidence == kind and row.device):
            devices.setdefault(device, []).append(kind)
    sizes = len({row.model_args for row in rows}) > 1
    named = [f"{', '.join(own)}: {device}" for device, own in devices.items()] if len(devices) > 1 else devices
    words = [*named, *([f"n ({', '.join(_sizes(rows[0].model_args))}), parameters"] if sizes else [])]
    table = frame_of(rows, Row).groupby([*_SETTING], sort=False, dropna=False)
    lines = [_line(own, metric, sizes=sizes) for _, own in table]
    title = _finding(rows[0].model, METRICS[metric].partition(" ")[0], lines, drawn)
    panel = Panel(partial(_draw, drawn=drawn, label=METRICS[metric]), lines, len(lines) * _LINE_IN)
    return [heading(title, kinds, "; ".join(words), width_in), [panel]]


def _finding(model: str, what: str, lines: Sequence[_Line], drawn: str) -> str:
    """How far the values are from print; only what is drawn where nothing is printed."""
    errors = [
        line.known[drawn] / line.known["published"] - 1 for line in lines if {drawn, "published"} <= {*line.known}
    ]
    if not errors or drawn == "published":
        return f"{model}: {drawn} {what}"
    least, most = (round(100 * error, 1) for error in (min(errors), max(errors)))
    if least < 0 < most:
        far = f"from {-least:.1f}\u00a0% below to {most:.1f}\u00a0% above"
    else:
        ends = dict.fromkeys(f"{abs(end):.1f}" for end in sorted((least, most), key=abs))
        far = f"{' to '.join(ends)}\u00a0% {'above' if most > 0 else 'below'}"
    return f"{model}: {drawn} {what} is {far} the published"


def _sizes(model_args: str) -> dict[str, str]:
    """The arguments that the papers name a size of the model by."""
    known = dict(part.split("=", 1) for part in model_args.split(";"))
    return {name: known[name] for name in ("L", "B", "D", "C") if name in known}


def _parameters(model: str, sizes: dict[str, str]) -> str:
    """The number of parameters that the table of a model prints for its sizes; empty where there is none."""
    printed = read_text(PUBLISHED_FOLDER / "published.csv")
    printed = printed[(printed["metric"] == "parameters") & (printed["table"] == f"{model}-memory")]
    found = printed["value"][[_sizes(words) == sizes for words in printed["model_args"]]].astype(float)
    if found.empty:
        return ""
    unit, scale = ("B", 1e9) if found.iloc[0] >= 1e9 else ("M", 1e6)
    return f" {significant(found.iloc[0] / scale)}{unit}"


def _line(line: pd.DataFrame, metric: str, *, sizes: bool) -> _Line:
    kinds = line.groupby("evidence", sort=False)
    values, first = kinds[metric].median().dropna(), kinds["status"].first()
    failures = {str(kind): status for kind, status in first.items() if status != "ok" and kind not in values}
    head = line.iloc[0]
    known = _sizes(head["model_args"])
    size = f"({', '.join(known.values())}){_parameters(head['model'], known)}" if sizes else f"m={head['chunks']}"
    return _Line(f"n={head['partitions']} {size}", {str(kind): value for kind, value in values.items()}, failures)


def _draw(axes: Axes, lines: Sequence[_Line], drawn: str, label: str) -> None:
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_yticks(range(len(lines)), [line.name for line in lines])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)
    end = max((value for line in lines for value in line.known.values()), default=1.0) * 1.08
    axes.set_xlim(0, end)
    axes.set_xlabel(label)
    place = axes.get_yaxis_transform()
    for y, line in enumerate(lines):
        for kind, value in line.known.items():
            axes.plot(value, y, linestyle="none", zorder=4 if kind in ("published", "emulated") else 3, **_MARKS[kind])
        if {drawn, "published"} <= set(line.known):
            error = f"{line.known[drawn] / line.known['published'] - 1:+.1%}".replace("-", "\N{MINUS SIGN}")
            axes.text(1.02, y, error, transform=place, va="center_baseline")
            if label == METRICS[_SPEED] and {drawn, "published"} <= set(lines[0].known):
                gains = ", ".join(f"{line.known[kind] / lines[0].known[kind]:.2f}" for kind in ("published", drawn))
                axes.text(_GAIN, y, gains + TIMES, transform=place, va="center_baseline")
        # On the emptier side of the marks.
        x, side = (0.02, "left") if min(line.known.values(), default=end) > 0.45 * end else (0.98, "right")
        failed = "; ".join(
            f"{', '.join(kind for kind, found in line.failures.items() if found == status)}: {status}"
            for status in dict.fromkeys(line.failures.values())
        )
        axes.text(x, y, failed, transform=place, va="center_baseline", ha=side, color=FAINT, style="italic")


TABLES: Final = Figure(
    name="tables",
    caption=(
        "Each row of a published table: its published value, and the simulated, emulated or measured values of the "
        "same settings, with the speed-up over the first row. Published and simulated throughput is over an epoch, "
        "whose last batch is smaller."
    ),
    sources=("",),
    read=_read,
    panels=_panels,
)
