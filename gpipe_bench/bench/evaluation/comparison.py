"""Values of one evidence against those of another, and what each component contributes: tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpipe_bench.components import PUBLISHED
from gpipe_bench.results.labels import autograd_words
from gpipe_bench.results.outcomes import THROUGHPUT, Group
from gpipe_bench.results.shapley import Share
from gpipe_bench.util.console import Column, Grid

_METRICS: Final[Mapping[str, tuple[str, str]]] = {
    THROUGHPUT: ("samples/s", ".1f"),
    "peak_reserved_gib": ("memory GiB", ".1f"),
    "utilization_fraction": ("busy", ".0%"),
}


def comparison_table(group: Group, other: Group) -> Grid:
    """The value of another evidence, that of the group, and their difference, of every variant that was published.

    Args:
        group: simulated or emulated.
        other: published; of an emulated group also simulated.
    """
    kinds = (other.head.evidence, group.head.evidence, "error" if other.head.evidence == "published" else "differs")
    columns = [Column(f"{name}\n{kind}") for name, _ in _METRICS.values() for kind in kinds]
    engine = f" ({autograd_words(other.head)})" if other.head.flavour else ""
    title = f"{group.head.evidence} on {group.head.profile}, against the {other.head.evidence} values{engine}"
    table = Grid([Column("variant", text=True), *columns], title)
    variant: str
    for variant in PUBLISHED:
        if variant not in group.outcomes or variant not in other.outcomes:
            continue
        ours, theirs, words = group.outcomes[variant], other.outcomes[variant], [variant]
        for column, (_, form) in _METRICS.items():
            old, new = theirs.middle(column), ours.middle(column)
            words += [_word(old, form), _word(new, form) or _failure(ours.failed and ours.failed[0].status)]
            words.append("" if old is None or new is None else f"{new / old - 1:+.1%}")
        table.add(*words)
    return table


def shares_table(group: Group, scale: float = 1.0, unit: str = "GiB") -> Grid | None:
    """What each component contributes on the mean over all orders; None where a combination has no throughput.

    Args:
        group: comparable rows.
        scale: from GiB to ``unit``.
        unit: of memory.
    """
    reserved = all(outcome.middle("peak_reserved_gib") is not None for outcome in group.outcomes.values())
    memory = "peak_reserved_gib" if reserved else "peak_allocated_gib"
    speed, size = group.shares(THROUGHPUT), group.shares(memory, scale)
    if not speed:
        return None
    names = ("samples/s\n[least, most]", f"memory {unit}\n[least, most]")
    columns = [Column("component", text=True), *map(Column, names)]
    engine = f", {autograd_words(group.head)}" if group.head.flavour else ""
    table = Grid(columns, f"share of each component, {group.head.evidence}{engine} (Shapley)")
    for name, share in speed.items():
        table.add(name, _range(share), _range(size[name]) if size else "")
    return table


def _word(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _failure(status: object) -> str:
    return str(status) if status else ""


def _range(share: Share) -> str:
    return f"{share.value:+.1f} [{share.low:+.1f}, {share.high:+.1f}]"
