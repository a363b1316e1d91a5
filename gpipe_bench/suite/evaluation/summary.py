"""The table in the terminal: every variant, or way to run on a CPU, with repeats, medians, intervals and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from gpipe_bench.components import PUBLISHED
from gpipe_bench.results.configurations import CONFIGURATIONS
from gpipe_bench.results.intervals import Interval, differ
from gpipe_bench.results.labels import autograd_words, training_words
from gpipe_bench.results.outcomes import SCATTER, THROUGHPUT, Outcome, group_rows, shown_groups
from gpipe_bench.results.outcomes import Group as OutcomeGroup
from gpipe_bench.results.rows import Row
from gpipe_bench.results.shapley import Share
from gpipe_bench.results.tables import COMPANIONS, companion_path
from gpipe_bench.util.console import Column, Grid, output

_METRICS: Final[Mapping[str, tuple[str, str]]] = {
    THROUGHPUT: ("samples/s", ".1f"),
    "peak_reserved_gib": ("memory GiB", ".1f"),
    "utilization_fraction": ("busy", ".0%"),
}
_SHARES: Final = {
    "busy": "utilization_fraction",
    "bubble": "bubble_fraction",
    "ideal": "ideal_bubble",
    "imbal.": "imbalance_fraction",
    "copy": "copy_fraction",
    "recomp.": "recompute_fraction",
}
_STYLES: Final = {"unsupported": "dim", "skipped": "yellow", "oom": "bold red", "error": "bold red"}
_LOUD: Final = ("error", "oom", "skipped")
_READING: Final = (
    "n repeats or emulated steps; median [bootstrapped 95 % interval, which spans all repeats when they are few]; "
    "* differs from 1 (Mann-Whitney, p <= 0.05, from 4 repeats on); noisy: the interval of a measured ratio is wider "
    f"than {SCATTER:.0%}; ideal: bubble of a balanced pipeline with free copies."
)


def print_summary(rows: Iterable[Row], files: Sequence[Path] = (), console: Console | None = None) -> None:
    """Print the tables of ``rows``, then what failed and where the files are.

    Args:
        rows: rows of one or more experiments.
        files: paths to list below.
        console: where to print; by default standard output.
    """
    console = console or output()
    console.print(summary(list(rows)))
    if files:
        console.print(Text("\n".join(["Files", *(f"  {path}" for path in files)])), soft_wrap=True)


def summary(rows: Sequence[Row]) -> RenderableType:
    """The tables of ``rows``, each with the reasons of failures below it."""
    parts: list[RenderableType] = []
    groups = group_rows(rows, seeds=True)
    shown = shown_groups(groups)
    for group, _ in shown:
        notes = _Notes()
        parts += [_table(group, notes), *notes.render(), Text()]
    for group, beside in shown:
        for other in beside:
            parts += [_beside(group, other), Text()]
        if shares := _shares(group):
            parts += [shares, Text()]
    return Group(*parts, _verdict([row for row in rows if row.evidence != "published"]))


def result_files(rows: Path) -> list[Path]:
    """The files that belong to the table at ``rows``, ``<folder>/results/<experiment>.csv``, and are there.

    Companions lie beside it, traces in ``traces/<experiment>`` beside it, figures in ``figures`` beside ``results``.
    """
    companions = [companion_path(rows, name) for name in (*COMPANIONS, CONFIGURATIONS)]
    traces = sorted((rows.parent / "traces" / rows.stem).glob("*.json"))
    folder = rows.parent.parent / "figures"
    names = (rows.stem, f"{rows.stem}_*")
    figures = sorted(path for name in names for path in folder.glob(f"{name}.*"))
    return [path for path in (rows, *companions, *figures, *traces) if path.is_file()]


class _Notes:
    """Numbered footnotes; failures with one cause share a number."""

    def __init__(self) -> None:
        self._causes: dict[tuple[str, str], int] = {}

    def number(self, row: Row) -> int:
        """The footnote of a failed row; what is unsupported has the clause before the first ``;`` as its cause."""
        cause = row.reason if row.status in _LOUD else row.reason.partition(";")[0]
        return self._causes.setdefault((row.status, cause), len(self._causes) + 1)

    def render(self) -> list[Text]:
        """The lines below the table; nothing where all went well."""
        text = Text()
        for (status, cause), number in self._causes.items():
            text.append(f"[{number}] {status}: {cause}\n", style=_STYLES[status])
        text.rstrip()
        return [text] if text else []


def _table(group: OutcomeGroup, notes: _Notes) -> Grid:
    scale, unit = group.memory_scale
    interval = "\n[95 % CI]" if group.repeats[1] > 1 else ""
    reserved = " (reserved)" if any(one.samples("peak_reserved_gib") for one in group.outcomes.values()) else ""
    names = ("n", f"samples/s{interval}", f"x {group.REFERENCE}{interval}", f"memory\n{unit}{reserved}", *_SHARES)
    columns = [Column(name, starts_part=name == next(iter(_SHARES))) for name in names]
    columns = [Column("variant", text=True), *columns, Column("status", text=True)]
    table = Grid(columns, _title(group.head))
    for outcome in group.ordered():
        status = [*(["ok"] if outcome.ok else []), *(f"{row.status} [{notes.number(row)}]" for row in outcome.failed)]
        table.add(
            outcome.variant,
            str(len(outcome.ok)),
            _interval(outcome.interval(THROUGHPUT)),
            _ratio(outcome, group),
            _memory(outcome, scale),
            *(_word(outcome.middle(column), ".0%") for column in _SHARES.values()),
            ", ".join(dict.fromkeys(status)),
            style="" if outcome.ok else _STYLES[outcome.failed[0].status],
        )
    return table


def _beside(group: OutcomeGroup, other: OutcomeGroup) -> Grid:
    """The value of another evidence, that of the group, and their difference, of every variant that was published.

    Args:
        group: simulated or emulated.
        other: published; of an emulated group also simulated.
    """
    kinds = (other.head.evidence, group.head.evidence, "error" if other.head.evidence == "published" else "differs")
    columns = [Column(f"{name}\n{kind}") for name, _ in _METRICS.values() for kind in kinds]
    values = f"{other.head.evidence} values{autograd_words(other.head)}"
    title = f"{group.head.evidence} on {group.head.profile}, against the {values}"
    table = Grid([Column("variant", text=True), *columns], title)
    variant: str
    for variant in PUBLISHED:
        if variant not in group.outcomes or variant not in other.outcomes:
            continue
        ours, theirs, words = group.outcomes[variant], other.outcomes[variant], [variant]
        for column, (_, form) in _METRICS.items():
            old, new = theirs.middle(column), ours.middle(column)
            words += [_word(old, form), _word(new, form) or (ours.failed[0].status if ours.failed else "")]
            words.append("" if old is None or new is None else f"{new / old - 1:+.1%}")
        table.add(*words)
    return table


def _shares(group: OutcomeGroup) -> Grid | None:
    """What each component contributes on the mean over all orders; None where a combination has no throughput."""
    scale, unit = group.memory_scale
    speed, size = group.shares(THROUGHPUT), group.shares(group.memory_column, scale)
    if not speed:
        return None
    names = ("samples/s\n[least, most]", f"memory {unit}\n[least, most]")
    columns = [Column("component", text=True), *map(Column, names)]
    table = Grid(columns, f"share of each component, {group.head.evidence}{autograd_words(group.head)} (Shapley)")
    for name, share in speed.items():
        table.add(name, _range(share), _range(size[name]) if size else "")
    return table


def _word(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _range(share: Share) -> str:
    return f"{share.value:+.1f} [{share.low:+.1f}, {share.high:+.1f}]"


def _title(row: Row) -> str:
    """All that tells a group from the others."""
    machine = f"{row.device_count} x {row.device}" if (row.device_count or 1) > 1 else row.device
    balance = f" ({row.balance})" if row.balance else ""
    modes = [f"checkpoint {row.checkpoint}" if row.checkpoint else "", f"{row.transfer} transfer"]
    modes += [f"{row.backward} backward" if row.backward != "autograd" else ""]
    modes += [f"schedule {row.schedule}" if row.schedule != "gpipe" else "", f"seed {row.seed}" if row.seed else ""]
    modes += [training_words(row)]
    sizes = (f"{row.partitions} partitions{balance}", f"{row.chunks} chunks", f"batch {row.batch_size}")
    pipeline = ", ".join(filter(None, (*sizes, *modes)))
    where = f"{machine}{autograd_words(row)}"
    return f"{row.experiment or 'rows'}, {row.evidence}: {row.model} ({row.model_args}); {pipeline}; {where}"


def _memory(outcome: Outcome, scale: float) -> str:
    """Peak of live tensor bytes, and of reserved bytes where there is an allocator."""
    allocated, reserved = outcome.middle("peak_allocated_gib"), outcome.middle("peak_reserved_gib")
    if allocated is None:
        return ""
    return f"{allocated * scale:.1f}" + ("" if reserved is None else f" ({reserved * scale:.1f})")


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return ""
    if interval.n == 1:
        return _digits(interval.median)
    return f"{_digits(interval.median)} [{_digits(interval.low)}, {_digits(interval.high)}]"


def _ratio(outcome: Outcome, group: OutcomeGroup) -> str:
    if outcome is group.baseline and outcome.ok:
        return "1"
    sides = outcome.samples(THROUGHPUT), group.baseline.samples(THROUGHPUT) if group.baseline else []
    words = _interval(group.ratio(outcome)) + ("*" if differ(*sides) else "")
    return f"{words} noisy" if group.noisy(outcome) else words


def _digits(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _verdict(rows: Sequence[Row]) -> Text:
    """What failed, so that nobody takes a table with holes for a complete one, and how to read the numbers."""
    counts = Counter(row.status for row in rows)
    kinds = Counter(row.evidence for row in rows)
    runs = f"{len(rows)} runs" + (f" ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})" if rows else "")
    text = Text(f"{runs}: {', '.join(f'{count} {status}' for status, count in counts.items())}. {_READING}")
    loud = [status for status in _LOUD if counts[status]]
    if loud:
        text.append(
            f"\nFAILED: {', '.join(f'{counts[status]} {status}' for status in loud)}; reasons above", "bold red"
        )
    return text
