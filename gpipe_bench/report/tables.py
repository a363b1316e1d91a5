"""The tables of the page: the answer, and CSV files.

The answer has throughput and memory of each published variant, a line per kind of evidence and machine; on a CPU each
way to run the model stands beside the plain loop. Of CSV files there are medians over repeats, no column that says
nothing, and numbers of three digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pandas as pd

from gpipe_bench.components import PUBLISHED
from gpipe_bench.figures.groups import ordered_groups, setting_words
from gpipe_bench.figures.text import TIMES, listing, significant
from gpipe_bench.results.labels import ONE_THREAD
from gpipe_bench.results.outcomes import THROUGHPUT, CpuGroup, Group, Outcome
from gpipe_bench.results.rows import Row

if TYPE_CHECKING:
    from collections.abc import Hashable

_HIDDEN: Final = (
    *("config_sha256", "commit", "dirty", "started_utc", "schema_version", "cell", "case", "seed", "experiment"),
    *("python", "driver", "cuda", "source", "package_version", "clock_error_us", "gradient_tolerance", "steps"),
    *(
        "clock_cycle",
        "fork_join",
        "copy_streams",
        "portals",
        "early_recompute",
        "rounds",
        "limit_ms",
        "cores",
        "reason",
    ),
)
"""Columns that the provenance has, or the file alone."""

_LINES_AT_MOST: Final = 40
_SMALL: Final = 1e-3
_LONG: Final = 30
_LONGEST: Final = 90
_FRACTION: Final = "_fraction"


_ON_A_CPU: Final = "Ways to run on a CPU: throughput over the plain loop, and peak memory"
_ON_A_CPU_NOTE: Final = (
    f"All ways run with {ONE_THREAD}. Where the reference rows ran, the plain module with all cores in each "
    "operator is faster: docs/peers.md."
)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a table: its text, and what the pointer finds on it."""

    text: str
    hint: str = ""


@dataclass(slots=True)
class PageTable:
    """A table as the page shows it.

    Attributes:
        title: shown above it.
        evidence: of all of its lines; empty where they differ or have none.
        header: names of the columns.
        lines: a field per column in each.
        facts: what every line says alike.
        total: how many lines the file gives; ``lines`` are the first of them.
        note: what a reader of the table must know.
    """

    title: str
    evidence: str
    header: list[str]
    lines: list[list[Field]]
    facts: list[str] = field(default_factory=list)
    total: int = 0
    note: str = ""


def page_table(title: str, table: pd.DataFrame) -> PageTable:
    """A CSV file, read as text, as a table; of a long one the beginning.

    Repeats of a cell become one line with their number and medians. Columns that are the same in every line become
    facts. Lines with a verdict other than ok come first.
    """
    evidence = [*table["evidence"].unique()] if "evidence" in table else []
    shown = table.drop(columns=[name for name in _HIDDEN if name in table])
    if "verdict" in shown:
        shown = shown.sort_values("verdict", key=lambda verdicts: verdicts == "ok", kind="stable")
    shown = _medians(shown) if "repeat" in shown else shown
    total = len(shown)
    alike = [name for name in shown if len(shown) > 1 and len({*shown[name]}) == 1]
    facts = [f"{_words(name)} {shown[name].iloc[0]}" for name in alike if shown[name].iloc[0] and name != "evidence"]
    shown = shown.drop(columns=alike).head(_LINES_AT_MOST)
    lines = [[_field(name, text) for name, text in zip(shown, line, strict=True)] for line in shown.to_numpy()]
    return PageTable(title, evidence[0] if len(evidence) == 1 else "", [*map(_words, shown)], lines, facts, total)


def _medians(table: pd.DataFrame) -> pd.DataFrame:
    """One line per cell: columns with a fraction in any of their numbers are values, all others name the cell."""
    values = [name for name in table if table[name].str.contains(r"^-?\d+\.\d|^-?\d[\d.]*e", regex=True).any()]
    keys: list[Hashable] = [name for name in table if name not in (*values, "repeat")]
    numbers = table.assign(**{str(name): pd.to_numeric(table[name], errors="coerce") for name in values})
    grouped = numbers.groupby(keys, sort=False, dropna=False)
    medians = grouped[values].median().map(lambda value: "" if pd.isna(value) else repr(float(value)))
    counts = grouped.size().astype(str).rename("n")
    return pd.concat([counts, medians], axis=1).reset_index()[[*keys, "n", *values]]


def _words(name: Hashable) -> str:
    text = str(name)
    return f"{text.removesuffix(_FRACTION)} %".replace("_", " ") if text.endswith(_FRACTION) else text.replace("_", " ")


def _field(name: Hashable, text: str) -> Field:
    try:
        value = float(text)
    except ValueError:
        return Field(text) if len(text) <= _LONG else Field(f"{text[:_LONG]}…", hint=text[:_LONGEST])
    scaled = 100 * value if str(name).endswith(_FRACTION) else value
    short = significant(scaled) if abs(scaled) >= _SMALL or scaled == 0 else f"{scaled:.2e}"
    return Field(text if scaled == value and value.is_integer() else short)


def answers(rows: Sequence[Row]) -> list[PageTable]:
    """The tables of all ablations: one of the published variants, and one of the ways to run on a CPU."""
    groups = ordered_groups(rows)
    on_cpu = [group for group in groups if isinstance(group, CpuGroup)]
    others = [group for group in groups if group not in on_cpu and len(group.outcomes.keys() & set(PUBLISHED)) > 1]
    found = []
    if others:
        found.append(_table("Published variants: throughput and peak memory", others, list(PUBLISHED)))
    if on_cpu:
        ways = dict.fromkeys(outcome.variant for group in on_cpu for outcome in group.ordered())
        found.append(_table(_ON_A_CPU, on_cpu, list(ways)))
        found[-1].note = _ON_A_CPU_NOTE
    return found


def headline(rows: Sequence[Row]) -> str:
    """The answer in one sentence: what all published components bring, else the best way to run on a CPU.

    Gains of one kind of evidence differ by autograd engine and hardware, so the sentence names both.
    """
    groups = ordered_groups(rows)
    gains: dict[str, list[str]] = {}
    model, first, last = "", PUBLISHED[0], PUBLISHED[-1]
    for group in (group for group in groups if not isinstance(group, CpuGroup)):
        ends = [group.outcomes[name].middle(THROUGHPUT) for name in (first, last) if name in group.outcomes]
        model = model or group.head.model
        if len(ends) == 2 and ends[0] and ends[1] and group.head.model == model:
            words = f"{ends[1] / ends[0]:.2f} ({group.head.evidence})"
            gains.setdefault(_place(group), []).append(words)
    if gains:
        where = [f"{listing(words)} times on {place}" for place, words in gains.items()]
        parts = "ordered backward passes, copy streams and portals"
        return f"With {parts}, a pipeline trains {model} faster: {'; '.join(where)}."
    for group in groups:
        ratios = {one.variant: ratio.median for one in group.ordered() if (ratio := group.ratio(one))}
        if isinstance(group, CpuGroup) and ratios:
            best = max(ratios, key=lambda name: ratios[name])
            speed = f"{best} trains {group.head.model} {ratios[best]:.2f} times as fast as a plain loop"
            return f"On this CPU, with {ONE_THREAD}, {speed}."
    return ""


def _place(group: Group) -> str:
    """The device and the autograd engine of a group."""
    torch = "1.3" if "published" in (group.head.flavour, group.head.evidence) else "2"
    return f"{(group.head.device or group.head.profile).removeprefix('cuda ')}, PyTorch {torch}"


def _table(title: str, groups: Sequence[Group], variants: Sequence[str]) -> PageTable:
    lines = []
    for group in groups:
        cells = [_cell(group, group.outcomes.get(variant)) for variant in variants]
        name = f"{group.head.model} on {_place(group)}"
        lines.append([Field(group.head.evidence), Field(name, hint=setting_words(group.head)), *cells])
    return PageTable(title, "", ["evidence", "what and where", *variants], lines)


def _cell(group: Group, outcome: Outcome | None) -> Field:
    """Throughput, over that of the baseline, and memory of one variant; why there is none."""
    if outcome is None:
        return Field("")
    speed, (scale, unit) = outcome.middle(THROUGHPUT), group.memory_scale
    if speed is None:
        return Field(", ".join(dict.fromkeys(row.status for row in outcome.failed)))
    words = [f"{significant(speed)} samples/s"]
    if ratio := group.ratio(outcome):
        ends = "" if math.isnan(ratio.low) else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
        words.append(f"{ratio.median:.2f}{TIMES}{ends}{' noisy' if group.noisy(outcome) else ''}")
    memory, base = outcome.middle(group.memory_column), group.baseline
    if memory is not None:
        words.append(f"{significant(scale * memory)} {unit}")
        least = base.middle(group.memory_column) if base and base is not outcome else None
        words[-1] += f" ({memory / least:.2f}{TIMES})" if least else ""
    return Field("\n".join(words))
