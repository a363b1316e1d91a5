"""Bubbles and throughputs of four schedules on 8 to 32 A100s, as printed, beside the arithmetic of schedules.

    gpipe-bench predictions --table zero-bubble

Zero Bubble (Qi et al., arXiv 2401.10241) prints the times of one partition (Table 9), the bubbles that it computes
(Table 5) and the throughputs that it measured (Table 4), for GPT-3 in four sizes. From the times alone
:func:`gpipe_bench.schedules.timing` gives both; nothing is fitted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Final

from gpipe_bench.data import PUBLISHED_FOLDER
from gpipe_bench.results.tables import plain_records, read_table
from gpipe_bench.schedules.table import named_schedule
from gpipe_bench.schedules.timing import Durations, Timing, timing

TABLE: Final = "zero-bubble"
"""What ``predictions`` calls it, and the column ``table`` of the printed values."""

_COLUMNS: Final = "table", "experiment", "model_args", "partitions", "chunks", "metric", "value"
_BUBBLE: Final = "span_bubble_fraction"
_THROUGHPUT: Final = "throughput_samples_per_s_per_device"
_LAYERS: Final = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}
"""Layers of a device, embedding and head included: interleaved 1F1B has a partition for each."""
_SCHEDULES: Final = {"1f1b": "1f1b", "interleaved": "interleaved", "zb_h1": "zb_1p", "zb_h2": "zb_h2"}
"""For each schedule what is printed. ZB-1p has the bubbles of ZB-H1 in all settings; ZB-H2 was not measured."""


@dataclass(frozen=True, slots=True)
class PrintedStep:
    """One schedule in one setting.

    Attributes:
        setting: size of the model and micro-batches, as ``1.5B-m24``.
        schedule: its name here.
        printed_bubble: within the longest span of a device, see :attr:`gpipe_bench.schedules.Timing.span_bubble`.
        bubble: the same, computed here.
        measured: samples per second and device; None where it was not.
        computed: the same, from the longest span.
    """

    setting: str
    schedule: str
    printed_bubble: float
    bubble: float
    measured: float | None
    computed: float

    @property
    def error_fraction(self) -> float | None:
        """Computed over measured throughput, minus 1."""
        return None if self.measured is None else self.computed / self.measured - 1


def printed_steps(table: Path = PUBLISHED_FOLDER / "published.csv") -> Iterator[PrintedStep]:
    """All settings of the paper with four of its schedules.

    Args:
        table: the printed values of all papers.
    """
    settings: defaultdict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    sizes: dict[str, tuple[int, int, int]] = {}
    printed = read_table(table, _COLUMNS)
    for row in plain_records(printed[printed["table"] == TABLE]):
        model, m, *schedule = row["experiment"].split("-")
        settings[f"{model}-{m}"]["".join(schedule), row["metric"]] = row["value"]
        samples = int(row["model_args"].rpartition("=")[2])
        sizes[f"{model}-{m}"] = row["partitions"], row["chunks"], samples
    for setting, values in settings.items():
        p, m, samples = sizes[setting]
        for schedule, theirs in _SCHEDULES.items():
            found = _timed(schedule, values, p, m, _LAYERS[setting.partition("-")[0]])
            throughput = 1000 * samples * m / (p * max(found.spans))
            bubble = values[theirs, _BUBBLE]
            yield PrintedStep(
                setting, schedule, bubble, found.span_bubble, values.get((theirs, _THROUGHPUT)), throughput
            )


def _timed(schedule: str, values: dict[tuple[str, str], float], p: int, m: int, layers: int) -> Timing:
    v = layers if schedule == "interleaved" else 1
    times = (values["", name] / v for name in ("t_f_ms", "t_b_ms", "t_w_ms"))
    return timing(named_schedule(schedule, m, v * p, p), Durations(*times), values["", "t_comm_ms"])


def print_steps() -> None:
    """Print a line for each schedule and setting, and the mean errors, of ratios between schedules, too."""
    line = "{:<12}  {:<11}  {:>14}  {:>8}  {:>21}  {:>9}  {:>7}"
    print(line.format("setting", "schedule", "bubble printed", "computed", "samples/s per device", "computed", "error"))
    steps = list(printed_steps())
    for step in steps:
        bubbles = f"{step.printed_bubble:.4f}", f"{step.bubble:.4f}"
        measured = "" if step.measured is None else f"{step.measured:.2f}"
        error = "" if step.error_fraction is None else f"{100 * step.error_fraction:+.1f} %"
        print(line.format(step.setting, step.schedule, *bubbles, measured, f"{step.computed:.2f}", error))
    equal = sum(f"{step.bubble:.4f}" == f"{step.printed_bubble:.4f}" for step in steps)
    print(f"bubbles equal to four digits: {equal} of {len(steps)}")
    known = list(dict.fromkeys(step.schedule for step in steps if step.measured is not None))
    for schedule in known:
        print(f"{schedule}: {_mean_error(steps, schedule)}")
    for schedule in known[1:]:
        print(f"{schedule} over 1f1b: {_mean_error(over_1f1b(steps, schedule), schedule)}")


def over_1f1b(steps: Iterable[PrintedStep], schedule: str) -> Iterator[PrintedStep]:
    """Throughputs of a schedule over those of 1F1B in the same setting."""
    known = list(steps)
    base = {step.setting: step for step in known if step.schedule == "1f1b"}
    for step in known:
        one = base[step.setting]
        if step.schedule == schedule and step.measured is not None and one.measured is not None:
            speeds = step.measured / one.measured, step.computed / one.computed
            yield PrintedStep(step.setting, schedule, step.printed_bubble, step.bubble, *speeds)


def _mean_error(steps: Iterable[PrintedStep], schedule: str) -> str:
    known = (step.error_fraction for step in steps if step.schedule == schedule)
    errors = [abs(error) for error in known if error is not None]
    size = f"{100 * mean(errors):.2f} % of {len(errors)} throughputs"
    return f"mean absolute error {size}, largest {100 * max(errors):.1f} %"
