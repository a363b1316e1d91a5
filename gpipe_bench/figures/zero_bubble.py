"""What Zero Bubble prints of four schedules, beside what arithmetic gives from the times of one partition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gpipe_bench.figures.base import PAGE_IN, Figure, Panel, Rows, Selection, heading, legend, note
from gpipe_bench.figures.schedules import mark_style
from gpipe_bench.figures.style import FAINT, RULE
from gpipe_bench.schedules.printed import PrintedStep, over_1f1b, printed_steps

_HEIGHT_IN: Final = 1.7


def _read(path: Path, _: Selection) -> list[PrintedStep]:
    return list(printed_steps(path))


def _panels(steps: Sequence[PrintedStep], width_in: float) -> Rows:
    names = dict.fromkeys(step.schedule for step in steps)
    words = (
        "Twelve settings of GPT-3 on 8 to 32 A100s (arXiv 2401.10241, Tables 4, 5 and 9). On the line both are equal. "
        "Printed, measured: by the paper. Computed: by us, from T_F, T_B, T_W and the time of a transfer that it "
        "prints; nothing is fitted."
    )
    return [
        heading(_finding(steps), ["published", "computed"], "", width_in),
        [Panel(_draw_bubbles, steps, _HEIGHT_IN), Panel(_draw_speeds, steps, _HEIGHT_IN),
         Panel(_draw_gains, steps, _HEIGHT_IN)],
        legend([Line2D([], [], label=name, **mark_style(name)) for name in names], len(names)),
        note(words, width_in),
    ]  # fmt: skip


def _finding(steps: Sequence[PrintedStep]) -> str:
    """How far arithmetic is from what is printed."""
    bubble = max(abs(step.printed_bubble - step.bubble) for step in steps)
    errors = [100 * (step.error_fraction or 0.0) for step in steps if step.measured is not None]
    points = f"{100 * bubble:.1f}".removesuffix(".0")
    words = f"Arithmetic gives Zero Bubble's printed bubbles within {points} percentage points"
    return f"{words}, and throughputs {min(errors):.0f} to {max(errors):.0f}\u00a0% above its measured ones"


def _draw_bubbles(axes: Axes, steps: Sequence[PrintedStep]) -> None:
    points = [(step.schedule, 100 * step.printed_bubble, 100 * step.bubble) for step in steps]
    _draw_pairs(axes, points, 0, ("printed (%)", "computed (%)"), "bubble")


def _draw_gains(axes: Axes, steps: Sequence[PrintedStep]) -> None:
    gains = [step for name in dict.fromkeys(one.schedule for one in steps) for step in over_1f1b(steps, name)]
    points = [(step.schedule, step.measured or 0.0, step.computed) for step in gains if step.schedule != "1f1b"]
    _draw_pairs(axes, points, 1, ("measured", "computed"), "throughput over 1f1b")


def _draw_speeds(axes: Axes, steps: Sequence[PrintedStep]) -> None:
    known = [step for step in steps if step.measured is not None]
    settings = list(dict.fromkeys(step.setting for step in known))
    for step in known:
        error = 100 * (step.error_fraction or 0.0)
        axes.plot([settings.index(step.setting)], [error], **mark_style(step.schedule))
    axes.set_xticks(range(len(settings)), settings, rotation=90)
    axes.set(xlim=(-0.6, len(settings) - 0.4), ylim=(0, None), ylabel="computed above measured (%)")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    _finish(axes, "throughput")


def _draw_pairs(
    axes: Axes, points: Sequence[tuple[str, float, float]], start: float, labels: tuple[str, str], title: str
) -> None:
    end = max(max(x, y) for _, x, y in points)
    end += 0.05 * (end - start)
    axes.plot([start, end], [start, end], linewidth=0.6, color=FAINT)
    for name, x, y in points:
        axes.plot([x], [y], **mark_style(name), clip_on=False)
    axes.set(xlim=(start, end), ylim=(start, end), xlabel=labels[0], ylabel=labels[1])
    _finish(axes, title)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize="medium", pad=3)
    axes.grid(axis="y", linewidth=0.3, color=RULE)
    axes.set_axisbelow(True)


ZERO_BUBBLE: Final = Figure(
    name="zero_bubble",
    caption=(
        "Bubbles and throughputs that Zero Bubble prints for four schedules, and what we compute "
        "from the times of one partition that it prints. Every mark is a pair of a printed and a computed value."
    ),
    sources=("",),
    read=_read,
    panels=_panels,
    width_in=PAGE_IN,
)
