"""Rows sorted for a table: groups that differ in variant and repeat alone, and in each the outcome of every variant."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from gpipe_bench.bench.evaluation.statistics import compare_samples, enough_repeats
from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.intervals import Interval, median_interval, ratio_interval
from gpipe_bench.rows import Row

__all__ = ["Outcome", "OutcomeGroup", "group_outcomes", "published_beside"]

THROUGHPUT: Final = "throughput_samples_per_s"
_BASELINE: Final = "baseline"
_SETTING: Final = (
    *("evidence", "model", "model_args", "backward", "transfer", "flavour", "partitions", "chunks", "checkpoint"),
    *("batch_size", "balance", "seed"),
)


@dataclass(slots=True)
class Outcome:
    """All repeats of one variant."""

    variant: str
    ok: list[Row] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)

    def samples(self, column: str) -> list[float]:
        """The values of a column, one per repeat that ended well and has one."""
        values = [getattr(row, column) for row in self.ok]
        return [float(value) for value in values if value is not None]

    def interval(self, column: str) -> Interval | None:
        """Median and 95 % interval of a column; None without a value."""
        samples = self.samples(column)
        return median_interval(samples) if samples else None

    def middle(self, column: str) -> float | None:
        """Median of a column; None without a value."""
        samples = self.samples(column)
        return median(samples) if samples else None

    def ratio(self, reference: Outcome | None) -> Interval | None:
        """Throughput over that of another variant; None where either has none, and of a variant to itself."""
        ours, base = self.samples(THROUGHPUT), reference.samples(THROUGHPUT) if reference else []
        return ratio_interval(ours, base) if ours and base and reference is not self else None

    def differs(self, reference: Outcome | None) -> bool:
        """Whether a difference in throughput from another variant is shown."""
        ours, base = self.samples(THROUGHPUT), reference.samples(THROUGHPUT) if reference else []
        return enough_repeats(len(ours), len(base)) and compare_samples(ours, base).verdict == "differs"


@dataclass(slots=True)
class OutcomeGroup:
    """Runs of one model with one setting on one machine: what may be compared with each other."""

    head: Row
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def baseline(self) -> Outcome | None:
        """What ratios refer to."""
        return self.outcomes.get(_BASELINE)

    def ordered(self) -> list[Outcome]:
        """The published variants in the order of publication, then the others in that of the factorial."""
        order = [*PUBLISHED, *(components.label for components in Components.factorial())]
        return sorted(self.outcomes.values(), key=lambda outcome: order.index(outcome.variant))


def group_outcomes(rows: Iterable[Row]) -> list[OutcomeGroup]:
    """The groups of ``rows``, in the order in which they begin.

    A failed run may know less about its machine than the others: it joins every group of its setting and device type.
    """
    ordered = sorted(rows, key=lambda row: row.status != "ok")
    groups: dict[tuple[object, ...], OutcomeGroup] = {}
    for row in ordered:
        setting = tuple(getattr(row, name) for name in _SETTING)
        kind = row.device.split(" ")[0]
        key = (*setting, kind, row.device, row.profile)
        homes = [groups[known] for known in groups if known[: len(setting) + 1] == (*setting, kind)]
        if row.status == "ok" or not homes:
            homes = [groups.setdefault(key, OutcomeGroup(row))]
        for group in homes:
            outcome = group.outcomes.setdefault(row.variant, Outcome(row.variant))
            (outcome.ok if row.status == "ok" else outcome.failed).append(row)
    return list(groups.values())


def published_beside(group: OutcomeGroup, groups: Iterable[OutcomeGroup]) -> OutcomeGroup | None:
    """The published values of the same pipeline, to be set against a simulated group; None without any."""
    if group.head.evidence != "simulated":
        return None
    same = [name for name in _SETTING if name not in ("evidence", "transfer", "flavour", "seed")]
    printed = [other for other in groups if other.head.evidence == "published"]
    return next((o for o in printed if all(getattr(o.head, name) == getattr(group.head, name) for name in same)), None)
