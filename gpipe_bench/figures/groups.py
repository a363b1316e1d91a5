"""Rows of an ablation sorted into groups that differ in their variant and repeat alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpipe_bench.components import PUBLISHED
from gpipe_bench.figures.text import TIMES, listing
from gpipe_bench.intervals import Interval, median_interval
from gpipe_bench.rows import EVIDENCE, Row

__all__ = [
    "FAILURES",
    "Group",
    "Outcome",
    "failure_notes",
    "group_rows",
    "published_beside",
    "setting_words",
    "short_reason",
]

FAILURES: Final = ("unsupported", "oom", "error", "skipped")
_CONFIGURED: Final = (
    *("evidence", "model", "model_args", "backward", "transfer", "flavour"),
    *("partitions", "chunks", "checkpoint", "batch_size", "balance"),
)
_NAMED_AT_MOST: Final = 2
_SMALL_GIB: Final = 0.25
_NBSP: Final = "\u00a0"


@dataclass(slots=True)
class Outcome:
    """All repeats of one variant in one group."""

    variant: str
    ok: list[Row] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)

    def samples(self, column: str) -> list[float]:
        """The values of a column over the repeats that ended well."""
        values = (getattr(row, column) for row in sorted(self.ok, key=lambda row: row.repeat or 0))
        return [float(value) for value in values if value is not None]

    def interval(self, column: str) -> Interval | None:
        """Median and interval of a column; None without a value."""
        samples = self.samples(column)
        return median_interval(samples) if samples else None


@dataclass(slots=True)
class Group:
    """Runs of one model on one machine with one setting: all that may be compared with each other."""

    head: Row
    outcomes: dict[str, Outcome]

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

    def ranked(self) -> tuple[list[Outcome], list[Outcome]]:
        """Outcomes with a throughput, fastest first, and those without, by kind of failure and label."""
        with_value: list[tuple[float, str, Outcome]] = []
        without: list[Outcome] = []
        for outcome in self.outcomes.values():
            interval = outcome.interval("throughput_samples_per_s")
            if interval:
                with_value.append((-interval.median, outcome.variant, outcome))
            else:
                without.append(outcome)
        without.sort(key=lambda outcome: (_failure_order(outcome), outcome.variant))
        return [outcome for _, _, outcome in sorted(with_value, key=lambda item: item[:2])], without


def _failure_order(outcome: Outcome) -> int:
    return FAILURES.index(outcome.failed[0].status) if outcome.failed else len(FAILURES)


def group_rows(rows: Iterable[Row]) -> list[Group]:
    """Groups in the order published, simulated, measured, then as they come in the table.

    A run that failed may not have learnt its machine's full name; it joins every group of its setting.
    """
    groups: dict[tuple[object, ...], Group] = {}
    failed: list[Row] = []
    for row in rows:
        if row.status == "ok":
            group = groups.setdefault((*_setting(row), row.device, row.profile), Group(row, {}))
            group.outcomes.setdefault(row.variant, Outcome(row.variant)).ok.append(row)
        else:
            failed.append(row)
    for row in failed:
        key = (*_setting(row), row.device, row.profile)
        homes = [groups[key]] if key in groups else [g for g in groups.values() if _setting(g.head) == _setting(row)]
        for group in homes or [groups.setdefault(key, Group(row, {}))]:
            group.outcomes.setdefault(row.variant, Outcome(row.variant)).failed.append(row)
    return sorted(groups.values(), key=lambda group: EVIDENCE.index(group.head.evidence))


def published_beside(group: Group, groups: Sequence[Group]) -> Group | None:
    """The published values of the same pipeline, to be shown beside a simulated group; None without any."""
    if group.head.evidence != "simulated":
        return None
    same = [name for name in _CONFIGURED if name not in ("evidence", "transfer", "flavour")]
    heads = [other for other in groups if other.head.evidence == "published"]
    return next((o for o in heads if all(getattr(o.head, name) == getattr(group.head, name) for name in same)), None)


def _setting(row: Row) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in _CONFIGURED)


def setting_words(row: Row) -> str:
    """The setting of a row in words: arguments of the model, machine, pipeline."""
    machine = row.device or row.profile
    if machine and row.device_count and row.device_count > 1:
        machine = f"{row.device_count}{_NBSP}{TIMES}{_NBSP}{machine}"
    pipeline = [
        f"{row.partitions}{_NBSP}partitions" if row.partitions else "",
        f"{row.chunks}{_NBSP}chunks" if row.chunks else "",
        f"batch{_NBSP}{row.batch_size}" if row.batch_size else "",
        f"checkpoint{_NBSP}{row.checkpoint}" if row.checkpoint else "",
        "" if row.backward in ("", "autograd") else f"backward{_NBSP}{row.backward}",
        "" if row.transfer in ("", "direct") else f"transfer{_NBSP}{row.transfer}",
        f"autograd of PyTorch{_NBSP}1.3" if row.flavour == "published" else "",
    ]
    parts = [row.model_args.replace(";", ", "), machine, ", ".join(filter(None, pipeline))]
    return "; ".join(filter(None, parts))


def short_reason(reason: str, limit: int = 90) -> str:
    """The first clause of a reason, the part that variants have in common."""
    clause = re.split(r"[;\n]", reason.strip(), maxsplit=1)[0].strip()
    return clause if len(clause) <= limit else clause[: limit - 1].rstrip() + "…"


def failure_notes(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """One ``(status, sentence)`` for each kind of failure and reason among the outcomes."""
    causes: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for outcome in sorted(outcomes, key=_variant_order):
        total = len(outcome.ok) + len(outcome.failed)
        for cause, count in Counter(_cause(row) for row in outcome.failed).items():
            part = f" ({count} of {total} repeats)" if count < total else ""
            first = next(row for row in outcome.failed if _cause(row) == cause)
            causes.setdefault(cause, (short_reason(first.reason), []))[1].append(outcome.variant + part)
    ordered = sorted(causes.items(), key=lambda item: (FAILURES.index(item[0][0]), item[0][1]))
    return [(status, f"{status}, {_named(names)}: {reason}") for (status, _), (reason, names) in ordered]


def _cause(row: Row) -> tuple[str, str]:
    """What failed runs have in common: reasons that differ in their numbers alone are one cause."""
    return row.status, re.sub(r"[\d.]+", "#", short_reason(row.reason))


def _named(names: Sequence[str]) -> str:
    return listing(names) if len(names) <= _NAMED_AT_MOST else f"{len(names)} variants"


def _variant_order(outcome: Outcome) -> tuple[int, str]:
    published = PUBLISHED.index(outcome.variant) if outcome.variant in PUBLISHED else len(PUBLISHED)
    return published, outcome.variant
