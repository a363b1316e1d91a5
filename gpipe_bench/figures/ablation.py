"""The ablation: the published variants above, every combination of components below; on a CPU, each way to run.

Throughput, memory and utilisation of the devices stand beside each other.

Columns of the combinations are sorted by throughput. The matrix beneath follows UpSet plots (Lex et al., IEEE TVCG
20(12), 2014): a full dot for a component that is on, a faint one for off. A run that failed keeps its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import Figure, Panel, Rows, Selection, across, heading, note
from gpipe_bench.figures.groups import SYMBOLS, failure_notes, ordered_groups, setting_words
from gpipe_bench.figures.style import EVIDENCE_COLOURS, FAINT, INK, OKABE_ITO, RULE
from gpipe_bench.figures.tables import read_beside
from gpipe_bench.figures.text import TIMES, significant, text_width_pt, times
from gpipe_bench.results.intervals import Interval
from gpipe_bench.results.labels import LOOP, MICROBATCH_LOOP, ONE_THREAD, PAPER
from gpipe_bench.results.outcomes import THROUGHPUT, CpuGroup, Group, Outcome, group_rows, shown_groups
from gpipe_bench.results.rows import Row
from gpipe_bench.util.nearest import nearest_few

_LINE_IN: Final = 0.27
_NAMES_IN: Final = 0.95
"""Width of the names of the lines beside three panels."""

_COMBINATIONS: Final = "Below: every combination of components, the fastest first; a black dot: on."
_UTILISATION: Final = "utilization_fraction"


@dataclass(frozen=True, slots=True)
class Mark:
    """Shape, colour and size in points of a median."""

    shape: str
    colour: str
    size_pt: float = 3.8


_MARKS: Final = {
    "baseline": Mark("o", OKABE_ITO["black"], 4.0),
    "dep-x-x": Mark("^", OKABE_ITO["orange"], 4.6),
    "dep-str-x": Mark("s", OKABE_ITO["blue"]),
    "dep-str-ptl": Mark("D", OKABE_ITO["vermilion"]),
    LOOP: Mark("o", OKABE_ITO["black"], 4.0),
    MICROBATCH_LOOP: Mark("D", OKABE_ITO["black"], 3.4),
    PAPER: Mark("^", OKABE_ITO["orange"], 4.6),
}
_OTHER: Final = Mark("o", "#8A8A8A", 2.6)
_SCHEDULE: Final = Mark("s", OKABE_ITO["blue"])
_BESIDE: Final[dict[str, dict[str, Any]]] = {
    "published": {"marker": "d", "markersize": 6.5, "markeredgecolor": INK},
    "simulated": {"marker": "o", "markersize": 6.0, "markeredgecolor": EVIDENCE_COLOURS["simulated"]},
}
_WORDS: Final = {
    "published": "Open diamonds: published.",
    "simulated": "Open circles: simulated, with the same autograd engine.",
}


@dataclass(frozen=True, slots=True)
class _Value:
    """What one line shows: its mark, the interval and the single repeats, and the text above; or why there is none."""

    mark: Mark
    interval: Interval | None
    samples: Sequence[float]
    text: str
    absence: str = ""
    others: Sequence[tuple[str, float]] = ()


def read_ablation(path: Path, selection: Selection) -> list[Row]:
    """Rows of one kind of evidence, with what stands beside them; refuses unknown variants and sweeps."""
    rows = read_beside(path, selection)
    if any(row.evidence == "measured" for row in rows):
        rows = [row for row in rows if row.evidence != "published"]
    labels = [components.label for components in Components.factorial(shared=True)]
    unknown = sorted({row.variant for row in rows} - set(labels))
    if unknown:
        known, rule = [*PUBLISHED, *labels], f"variant in {path} must be a label of components"
        raise ConfigError([f"{rule}, got {name!r}; {nearest_few(name, known)}" for name in unknown])
    places = {(row.partitions, row.chunks, row.batch_size) for row in rows}
    if len(places) > 1 and all(len(group.outcomes) == 1 for group in group_rows(rows)):
        rule = f"rows of {path} must have several variants of a setting"
        raise ConfigError([f"{rule}, got one for each of {len(places)} settings; draw the sweep of them"])
    return rows


def _panels(rows: Sequence[Row], width_in: float) -> Rows:
    return across(_group(group, beside, width_in) for group, beside in shown_groups(ordered_groups(rows)))


def _group(group: Group, beside: Sequence[Group], width_in: float) -> Rows:
    kinds = [*(other.head.evidence for other in beside), group.head.evidence]
    threads = f", {ONE_THREAD}" if isinstance(group, CpuGroup) else ""
    rows: Rows = [heading(_finding(group), kinds, setting_words(group.head) + threads, width_in)]
    if isinstance(group, CpuGroup):
        speeds = _Line(f"throughput\n({TIMES} {LOOP})", _ratios(group))
        rows.append(_lines([speeds, *_others(group, group.ordered(), ())], width_in))
    else:
        if set(group.outcomes) & set(PUBLISHED):
            printed = [group.outcomes.get(variant, Outcome(variant)) for variant in PUBLISHED]
            speeds = _Line("throughput\n(samples/s)", _values(printed, THROUGHPUT, 1.0, beside))
            rows.append(_lines([speeds, *_others(group, printed, beside)], width_in))
        if set(group.outcomes) - set(PUBLISHED):
            rows += _factorial(group)
    notes = failure_notes(list(group.outcomes.values()))
    below = _COMBINATIONS if set(group.outcomes) - set(PUBLISHED) and not isinstance(group, CpuGroup) else ""
    reading = " ".join(
        [_reading(group), below, *(_WORDS[other.head.evidence] for other in beside), _utilisation(group, beside)]
    )
    return [*rows, *(note(text, width_in, colour=INK) for text in notes), note(reading.strip(), width_in)]


def _finding(group: Group) -> str:
    """What the rows show: the fastest way to run over the plain loop, or all components over none."""
    model, middles = group.head.model, {name: one.middle(THROUGHPUT) for name, one in group.outcomes.items()}
    fast = {name: value for name, value in middles.items() if value is not None}
    if not fast:
        return f"{model}: no run of this group ended"
    if isinstance(group, CpuGroup):
        ratios = {one.variant: ratio.median for one in group.ordered() if (ratio := group.ratio(one))}
        if not ratios:
            return f"{model} on a CPU: ways to run it"
        best = max(ratios, key=lambda name: ratios[name])
        return f"{model} on a CPU: pipelines train up to {times(ratios[best])} as fast as the {LOOP} ({best})"
    first, last = PUBLISHED[0], PUBLISHED[-1]
    if {first, last} <= fast.keys():
        memory = [group.outcomes[name].middle(group.memory_column) for name in (first, last)]
        words = f"{model}: {last} trains {times(fast[last] / fast[first])} as fast as {first}"
        return f"{words}, in {times(memory[1] / memory[0])} its memory" if memory[0] and memory[1] else words
    best = max(fast, key=lambda name: fast[name])
    return f"{model}: {best} is the fastest of {len(fast)} variants, with {significant(fast[best])} samples/s"


@dataclass(frozen=True, slots=True)
class _Line:
    """One quantity: its name, and its value of each variant."""

    label: str
    values: dict[str, _Value]


def _lines(quantities: Sequence[_Line], width_in: float) -> Sequence[Panel]:
    """The quantities side by side, a line per variant."""
    names, width = list(quantities[0].values), (width_in - _NAMES_IN) / len(quantities)
    return [
        Panel(
            partial(_draw_lines, label=one.label, names=[] if k else names, width_in=width),
            list(one.values.values()),
            len(names) * _LINE_IN,
        )
        for k, one in enumerate(quantities)
    ]


def _others(group: Group, outcomes: Sequence[Outcome], beside: Sequence[Group]) -> list[_Line]:
    """Memory, and where rows have it the utilisation of the devices."""
    scale, unit = group.memory_scale
    kind = "reserved" if group.memory_column == "peak_reserved_gib" else "live tensors"
    found = [_Line(f"peak {kind}\n({unit})", _values(outcomes, group.memory_column, scale, beside))]
    if any(outcome.samples(_UTILISATION) for outcome in outcomes):
        found.append(_Line("device\nutilisation (%)", _values(outcomes, _UTILISATION, 100.0, beside, over=False)))
    return found


def _utilisation(group: Group, beside: Sequence[Group]) -> str:
    """What the utilisation is the share of."""
    if not any(outcome.samples(_UTILISATION) for outcome in group.outcomes.values()):
        return ""
    if group.head.evidence in ("published", "measured") and "cpu" not in group.head.device:
        return "Utilisation: samples of the driver in which a kernel ran, mean over devices."
    if group.head.evidence == "measured":
        return "Utilisation: share of the step in which a partition computed, mean over partitions."
    driver = "; published: samples of the driver" if any(one.head.evidence == "published" for one in beside) else ""
    return f"Utilisation: share of the step in which a task or a copy ran, mean over devices{driver}."


def _values(
    outcomes: Sequence[Outcome], column: str, scale: float, beside: Sequence[Group], *, over: bool = True
) -> dict[str, _Value]:
    """The values of a column, with the ratio to the first one unless ``over`` is False."""
    base, found = outcomes[0].interval(column), {}
    for outcome in outcomes:
        interval, text = outcome.interval(column), ""
        if interval:
            text = significant(scale * interval.median)
            if over and base and outcome is not outcomes[0] and base.median and outcome.variant in PUBLISHED:
                text += f" ({times(interval.median / base.median)})"
            interval = Interval(interval.n, *(scale * value for value in interval[1:]))
        others = [
            (other.head.evidence, scale * value)
            for other in beside
            if outcome.variant in other.outcomes
            for value in other.outcomes[outcome.variant].samples(column)
        ]
        samples = [scale * value for value in outcome.samples(column)]
        mark = _MARKS.get(outcome.variant, _SCHEDULE)
        found[outcome.variant] = _Value(mark, interval, samples, text, _absence(outcome), others)
    return found


def _ratios(group: CpuGroup) -> dict[str, _Value]:
    """Throughput over that of the plain loop."""
    loop, found = group.baseline, {}
    base = loop.middle(THROUGHPUT) if loop else None
    for outcome in group.ordered():
        ratio = group.ratio(outcome)
        text = f"{times(ratio.median)}{' (noisy)' if group.noisy(outcome) else ''}" if ratio else ""
        if base and outcome is loop:
            ratio, text = Interval(1, 1.0, math.nan, math.nan), f"{significant(base)} samples/s"
        mark = _MARKS.get(outcome.variant, _SCHEDULE)
        found[outcome.variant] = _Value(mark, ratio, group.ratios(outcome), text, _absence(outcome))
    return found


def _absence(outcome: Outcome) -> str:
    statuses = dict.fromkeys(row.status for row in outcome.failed)
    return ", ".join(f"{SYMBOLS[status]} {status}" for status in statuses) or ("no value" if outcome.ok else "not run")


def _draw_lines(axes: Axes, values: Sequence[_Value], label: str, names: Sequence[str], width_in: float) -> None:
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    ends = [end for value in values if value.interval for end in value.interval[1:] if not math.isnan(end)]
    ends += [one for value in values for one in (*value.samples, *(place for _, place in value.others))]
    # From zero on: how many times one is another is read off the lengths.
    axes.set_xlim(0, 1.08 * max(ends, default=0.0) or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    for y, value in enumerate(values):
        if y:
            axes.axhline(y - 0.5, linewidth=0.3, color=RULE, zorder=0)
        for kind, place in value.others:
            axes.plot(place, y + 0.14, linestyle="none", markerfacecolor="none", zorder=4, **_BESIDE[kind])
        if value.interval is None:
            style: dict[str, Any] = {"va": "center_baseline", "color": FAINT, "style": "italic"}
            axes.text(0.05, y, value.absence, transform=axes.get_yaxis_transform(), **style)
            continue
        _draw_value(axes, y, value, value.interval, width_in)
    if not ends:
        axes.set_xticks([])
    axes.set_xlabel(label)
    axes.set_yticks(range(len(values)), names or [""] * len(values))


def _draw_value(axes: Axes, y: int, value: _Value, interval: Interval, width_in: float) -> None:
    colour = value.mark.colour
    if not math.isnan(interval.low):
        axes.plot([interval.low, interval.high], [y + 0.14] * 2, color=colour, marker="|", markersize=4)
    _draw_median(axes, interval.median, y + 0.14, value.mark)
    if len(value.samples) > 1:
        style: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 0.5}
        axes.plot(value.samples, [y + 0.34] * len(value.samples), "o", markersize=2.2, clip_on=False, **style)
    end = axes.get_xlim()[1]
    # In front of a white box, so that no line runs through the digits.
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
    # No label leaves its axes.
    half = min(text_width_pt(value.text) / 72 / width_in / 2 + 0.035, 0.5)
    middle = min(max(interval.median / end, half), 1 - half) * end
    axes.text(middle, y - 0.1, value.text, ha="center", va="bottom", bbox=box)


def _draw_median(axes: Axes, x: float, y: float, mark: Mark) -> None:
    """A filled mark; a thin white rim parts it from its neighbours."""
    axes.plot(
        x, y, mark.shape, color=mark.colour, markersize=mark.size_pt, markeredgecolor="white", markeredgewidth=0.3
    )


def _factorial(group: Group) -> Rows:
    """A column per combination: throughput, memory, utilisation, and which components are on."""
    columns, (scale, unit) = group.ranked(), group.memory_scale
    memory = partial(_draw_columns, column=group.memory_column, scale=scale, label=f"memory\n({unit})")
    speed = partial(_draw_columns, column=THROUGHPUT, scale=1.0, label="throughput\n(samples/s)")
    busy = partial(_draw_columns, column=_UTILISATION, scale=100.0, label="utilised\n(%)")
    shown = [(speed, 0.7), (memory, 0.5)]
    shown += [(busy, 0.5)] if any(outcome.samples(_UTILISATION) for outcome in columns) else []
    matrix = Panel(partial(_draw_matrix, names=group.switched), columns, 0.125 * len(group.switched))
    return [*([Panel(draw, columns, height)] for draw, height in shown), [matrix]]


def _draw_columns(axes: Axes, columns: Sequence[Outcome], column: str, scale: float, label: str) -> None:
    axes.set_xlim(*_span(len(columns)))
    axes.set_xticks([])
    axes.set_ylabel(label)
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)
    # The published variants last, over their neighbours.
    for x, outcome in sorted(enumerate(columns), key=lambda place: place[1].variant in _MARKS):
        interval = outcome.interval(column)
        if interval is None:
            for row in outcome.failed[:1]:
                axes.text(x, 0.05, SYMBOLS[row.status], transform=axes.get_xaxis_transform(), ha="center", va="bottom")
            continue
        mark = _MARKS.get(outcome.variant, _OTHER)
        axes.plot([x, x], [scale * interval.low, scale * interval.high], color=mark.colour, linewidth=0.9)
        _draw_median(axes, x, scale * interval.median, mark)
    # Room above the highest mark, so that the edge of the axes cuts none.
    highest = max((scale * end for outcome in columns for end in _ends(outcome.interval(column))), default=1.0)
    axes.set_ylim(0, 1.1 * highest or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    if not any(outcome.samples(column) for outcome in columns):
        axes.set_yticks([])


def _span(columns: int) -> tuple[float, float]:
    """The axis of so many columns; the edge of the axes cuts no mark at either end."""
    room = max(0.6, 0.018 * columns)
    return -room, columns - 1 + room


def _ends(interval: Interval | None) -> list[float]:
    return [end for end in interval[1:] if not math.isnan(end)] if interval else []


def _draw_matrix(axes: Axes, columns: Sequence[Outcome], names: Sequence[str]) -> None:
    axes.set(xlim=_span(len(columns)), ylim=(len(names) - 0.5, -0.5), xticks=[])
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    # Dots of neighbours do not touch.
    size = min(2.9, 150 / len(columns))
    for y in range(0, len(names), 2):
        axes.axhspan(y - 0.5, y + 0.5, color="#F4F4F4", zorder=0)
    for x, outcome in enumerate(columns):
        components = Components.from_label(outcome.variant)
        for on, colour in ((False, RULE), (True, INK)):
            dots = [y for y, name in enumerate(names) if getattr(components, name) is on]
            axes.plot([x] * len(dots), dots, "o", color=colour, markersize=size, markeredgewidth=0)


def _reading(group: Group) -> str:
    """How many values are behind a mark, and what bars and small circles are."""
    fewest, most = group.repeats
    if most == 0:
        return "No run of this group ended."
    if most == 1:
        return f"Full marks: {group.head.evidence}, one value per variant."
    repeats = f"{most}" if fewest == most else f"{fewest} to {most}"
    what = "steps" if group.head.evidence == "emulated" else "repeats"
    # An interval of so few samples is their range, see gpipe_bench.results.intervals.
    bar = "from the least to the most of them" if most <= 5 else "95 % interval of the median"
    circles = f"small circles: single {what}"
    if isinstance(group, CpuGroup):
        pairs = "of the same repeat" if group.in_turns else "of its median"
        circles = f"small circles: each repeat over the {LOOP} {pairs}"
    return f"Mark: median of {repeats} {what}; bar: {bar}; {circles}."


ABLATION: Final = Figure(
    name="ablation",
    caption=(
        "Throughput, peak memory and device utilisation of the published variants, and of every combination of "
        "components, fastest first. On a CPU: each way to run the model, over the plain loop, which runs the whole "
        "batch in one thread."
    ),
    sources=("",),
    read=read_ablation,
    panels=_panels,
)
