"""Rows sorted into groups of comparable runs, and in each the outcome of every variant.

The runs of a group differ in their variant and repeat alone. Those of an ablation on a CPU differ in the way that the
model is run: the plain loop, the micro-batch loop, the paper's executor, a schedule of the runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import ClassVar, Final

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.results.intervals import Interval, median_interval, paired_ratios, ratio_interval
from gpipe_bench.results.labels import LOOP, MICROBATCH_LOOP, PAPER, run_as
from gpipe_bench.results.rows import Row
from gpipe_bench.results.shapley import Share, shapley_shares
from gpipe_bench.schedules import SCHEDULES

FAILURES: Final = ("unsupported", "oom", "error", "skipped")
THROUGHPUT: Final = "throughput_samples_per_s"
_BASELINE: Final = "baseline"
_ON_A_CPU: Final = "dep-x-ptl"
_CPU_SETTING: Final = ("model", "model_args", "batch_size", "seed", "device", "profile")
SCATTER: Final = 0.2
"""Width of the interval of a ratio, over the ratio, from which on it is noisy."""

_SMALL_GIB: Final = 0.25
_SETTING: Final = (
    *("evidence", "model", "model_args", "backward", "schedule", "transfer", "flavour"),
    *("partitions", "chunks", "checkpoint", "batch_size", "balance", "processes", "hosts"),
    *("steps_overlap", "precision", "optimizer"),
)


_UNSAID: Final = ("evidence", "transfer", "flavour", "steps_overlap", "precision", "optimizer")
"""What published rows do not say, or say otherwise than those beside them."""

_NOT_PRINTED: Final = (*_UNSAID, "backward")


@dataclass(slots=True)
class Outcome:
    """All repeats of one variant in one group."""

    variant: str
    ok: list[Row] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)

    def samples(self, column: str) -> list[float]:
        """The values of a column, one per repeat that ended well and has one, in the order of the repeats."""
        values = (getattr(row, column) for row in sorted(self.ok, key=lambda row: row.repeat or 0))
        return [float(value) for value in values if value is not None]

    def interval(self, column: str) -> Interval | None:
        """Median and 95 % interval of a column; None without a value."""
        samples = self.samples(column)
        return median_interval(samples) if samples else None

    def middle(self, column: str) -> float | None:
        """Median of a column; None without a value."""
        samples = self.samples(column)
        return median(samples) if samples else None

    def by_repeat(self) -> dict[int, float]:
        """The throughput of each repeat that ended well."""
        known = ((row.repeat or 0, row.throughput_samples_per_s) for row in self.ok)
        return {repeat: value for repeat, value in known if value is not None}


@dataclass(slots=True)
class Group:
    """Runs of one model on one machine with one setting: all that may be compared with each other."""

    REFERENCE: ClassVar[str] = _BASELINE

    head: Row
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def baseline(self) -> Outcome | None:
        """What ratios refer to."""
        return self.outcomes.get(self.REFERENCE)

    @property
    def memory_column(self) -> str:
        """What memory is taken from: reserved, as in print, where every run has it; else live tensor bytes."""
        rows = [row for outcome in self.outcomes.values() for row in outcome.ok]
        reserved = bool(rows) and all(row.peak_reserved_gib is not None for row in rows)
        return "peak_reserved_gib" if reserved else "peak_allocated_gib"

    @property
    def memory_scale(self) -> tuple[float, str]:
        """Factor and unit that keep memory legible: GiB, or MiB where all of it is small."""
        values = [value for outcome in self.outcomes.values() for value in outcome.samples(self.memory_column)]
        return (1024.0, "MiB") if values and max(values) < _SMALL_GIB else (1.0, "GiB")

    @property
    def repeats(self) -> tuple[int, int]:
        """Fewest and most repeats that ended well among the variants that have any."""
        counts = [len(outcome.ok) for outcome in self.outcomes.values() if outcome.ok] or [0]
        return min(counts), max(counts)

    def ratio(self, outcome: Outcome) -> Interval | None:
        """Throughput over that of the baseline; None where either has none, and of the baseline itself."""
        ours, base = outcome.samples(THROUGHPUT), self.baseline.samples(THROUGHPUT) if self.baseline else []
        return ratio_interval(ours, base) if ours and base and outcome is not self.baseline else None

    def noisy(self, outcome: Outcome) -> bool:
        """Whether the measured ratio scatters too much to be compared with others."""
        ratio = self.ratio(outcome) if self.head.evidence == "measured" else None
        return ratio is not None and ratio.high - ratio.low > SCATTER * ratio.median

    @property
    def switched(self) -> tuple[str, ...]:
        """The components that variants switch: ``shared`` only where one of them does."""
        return Components.switched(shared=not all(Components.from_label(label).shared for label in self.outcomes))

    def shares(self, column: str, scale: float = 1.0) -> dict[str, Share]:
        """What each component contributes to a column, times ``scale``; empty where a combination has no value."""
        if "" in self.outcomes:  # rows of whole programs, which have no components
            return {}
        middles = {outcome.variant: outcome.middle(column) for outcome in self.outcomes.values()}
        known = {variant: scale * value for variant, value in middles.items() if value is not None}
        names = self.switched
        if not all(components.label in known for components in Components.factorial(shared="shared" in names)):
            return {}
        return shapley_shares(names, lambda on: known[Components(**{name: name in on for name in names}).label])

    def ordered(self) -> list[Outcome]:
        """The published variants in the order of publication, then the others in that of the factorial."""
        factorial = (components.label for components in Components.factorial(shared=True))
        order = dict.fromkeys([*PUBLISHED, *factorial, *self.outcomes])
        return [self.outcomes[name] for name in order if name in self.outcomes]

    def ranked(self) -> list[Outcome]:
        """Outcomes with a throughput, fastest first, then those without, by kind of failure and label."""
        middles = {variant: outcome.middle(THROUGHPUT) for variant, outcome in sorted(self.outcomes.items())}
        fast = sorted((-middle, variant) for variant, middle in middles.items() if middle is not None)
        without = [self.outcomes[variant] for variant, middle in middles.items() if middle is None]
        return [*(self.outcomes[variant] for _, variant in fast), *sorted(without, key=_failure_order)]


class CpuGroup(Group):
    """Runs of one model and batch on a CPU, by the way in which it is run; ratios refer to the plain loop."""

    REFERENCE: ClassVar[str] = LOOP

    @property
    def in_turns(self) -> bool:
        """Whether each repeat of all ways began before the next one of any: values of a repeat are neighbours in time.

        So it is where they took turns; not in older tables, in which one way was run after the other.
        """
        began: dict[int, list[str]] = {}
        for row in (row for outcome in self.outcomes.values() for row in outcome.ok):
            began.setdefault(row.repeat or 0, []).append(row.started_utc)
        rounds = [began[repeat] for repeat in sorted(began)]
        return all("" not in times for times in rounds) and all(
            max(before) <= min(after) for before, after in pairwise(rounds)
        )

    def ratios(self, outcome: Outcome) -> list[float]:
        """The throughput of each repeat over that of the plain loop: of the same repeat where they took turns."""
        middle = self.baseline.middle(THROUGHPUT) if self.baseline else None
        if self.baseline is None or middle is None:
            return []
        if self.in_turns:
            return paired_ratios(outcome.by_repeat(), self.baseline.by_repeat())
        return [value / middle for value in outcome.samples(THROUGHPUT)]

    def ratio(self, outcome: Outcome) -> Interval | None:
        """Throughput over that of the plain loop; the median of :meth:`ratios` where they took turns."""
        if outcome is self.baseline or not self.in_turns:
            return Group.ratio(self, outcome)
        ratios = self.ratios(outcome)
        return median_interval(ratios) if ratios else None

    def shares(self, column: str, scale: float = 1.0) -> dict[str, Share]:  # noqa: ARG002 - see Group
        """None: ways to run a model are no combinations of components."""
        return {}

    def ordered(self) -> list[Outcome]:
        """The loops, the paper's executor and its other variants, then the schedules."""
        others = [name for name in self.outcomes if name not in SCHEDULES]
        order = dict.fromkeys([LOOP, MICROBATCH_LOOP, PAPER, *others, *SCHEDULES])
        return [self.outcomes[name] for name in order if name in self.outcomes]


def typical(rows: Sequence[Row]) -> Row:
    """Of some repeats the one whose step time is nearest to their median; the first of equally near ones."""
    middle = median(row.step_time_ms or 0.0 for row in rows)
    return min(rows, key=lambda row: (abs((row.step_time_ms or 0.0) - middle), row.repeat or 0))


def way_of(row: Row) -> str:
    """How a row of a CPU's ablation was run; empty for every other row."""
    if (row.experiment, row.evidence, row.device.partition(" ")[0]) != ("ablation", "measured", "cpu"):
        return ""
    way = run_as(row)
    return row.variant if way == PAPER and row.variant != _ON_A_CPU else way


def _cpu_groups(rows: Sequence[Row]) -> tuple[list[Group], list[Row]]:
    """The ablations on a CPU in which the plain loop was run, and all other rows."""
    ways = [way_of(row) for row in rows]
    keys = [tuple(getattr(row, name) for name in _CPU_SETTING) for row in rows]
    looped = {key for key, way in zip(keys, ways, strict=True) if way == LOOP}
    groups: dict[tuple[object, ...], Group] = {}
    rest = []
    for row, way, key in zip(rows, ways, keys, strict=True):
        if way and key in looped:
            outcome = groups.setdefault(key, CpuGroup(row)).outcomes.setdefault(way, Outcome(way))
            (outcome.ok if row.status == "ok" else outcome.failed).append(row)
        else:
            rest.append(row)
    return list(groups.values()), rest


def _failure_order(outcome: Outcome) -> int:
    return FAILURES.index(outcome.failed[0].status) if outcome.failed else len(FAILURES)


def group_rows(rows: Iterable[Row], *, seeds: bool = False) -> list[Group]:
    """The groups of ``rows``, in the order in which they begin.

    Ablations on a CPU come last. A run that failed may not have learnt its machine's full name: it joins every group of
    its setting and device type.

    Args:
        rows: of one or more experiments.
        seeds: whether runs of different seeds are apart.
    """
    names = (*_SETTING, "seed") if seeds else _SETTING
    on_cpu, others = _cpu_groups(list(rows))
    groups: dict[tuple[object, ...], Group] = {}
    for row in sorted(others, key=lambda row: row.status != "ok"):
        setting = tuple(getattr(row, name) for name in names)
        key = (*setting, row.device, row.profile)
        chosen = [group for known, group in groups.items() if known[:-2] == setting and _may_be_of(row, group)]
        if row.status == "ok" or key in groups or not chosen:
            chosen = [groups.setdefault(key, Group(row))]
        for group in chosen:
            outcome = group.outcomes.setdefault(row.variant, Outcome(row.variant))
            (outcome.ok if row.status == "ok" else outcome.failed).append(row)
    return [*groups.values(), *on_cpu]


def _may_be_of(row: Row, group: Group) -> bool:
    return not row.device or row.device.split(" ")[0] == group.head.device.split(" ")[0]


def groups_beside(group: Group, groups: Iterable[Group]) -> list[Group]:
    """What is set against a group, none where it stands alone.

    Of a simulated group the published values of the same pipeline; of an emulated one these, and what the simulator
    says of it with the autograd engine of today.
    """
    kind, found = group.head.evidence, list(groups)
    if kind not in ("simulated", "emulated"):
        return []
    same = [name for name in _SETTING if name not in _UNSAID]
    others = [other for other in found if all(getattr(other.head, name) == getattr(group.head, name) for name in same)]
    beside = [other for other in others if other.head.evidence == "published"][:1]
    return beside + ([other for other in others if _is_twin(other.head, group.head)] if kind == "emulated" else [])


def shown_groups(groups: Sequence[Group]) -> list[tuple[Group, list[Group]]]:
    """The groups that do not only stand beside another one, in their order, each with those beside it."""
    pairs = [(group, groups_beside(group, groups)) for group in groups]
    taken = [id(other) for _, beside in pairs for other in beside]
    return [(group, beside) for group, beside in pairs if id(group) not in taken]


def printed_beside(rows: Iterable[Row], published: Iterable[Row]) -> list[Row]:
    """The published rows of the settings that occur in ``rows``, whatever the devices."""
    asked = {_printed_setting(row) for row in rows}
    return [row for row in published if _printed_setting(row) in asked]


def _printed_setting(row: Row) -> tuple[object, ...]:
    return (row.variant, *(getattr(row, name) for name in _SETTING if name not in _NOT_PRINTED))


def _is_twin(simulated: Row, emulated: Row) -> bool:
    alike = ("transfer", "profile", "steps_overlap", "precision", "optimizer")
    known = simulated.evidence, simulated.flavour, *(getattr(simulated, name) for name in alike)
    return known == ("simulated", "current", *(getattr(emulated, name) for name in alike))
