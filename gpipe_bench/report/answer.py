"""The answer in one table: throughput and memory of each published variant, a line per kind of evidence and machine.

On a CPU, each way to run the model stands beside the plain loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from gpipe_bench.components import PUBLISHED
from gpipe_bench.figures.groups import ordered_groups, setting_words
from gpipe_bench.figures.text import TIMES, significant
from gpipe_bench.report.tables import Field, PageTable
from gpipe_bench.results.outcomes import THROUGHPUT, CpuGroup, Group, Outcome
from gpipe_bench.results.rows import Row

_ON_A_CPU: Final = (
    "Ways to run on a CPU with one thread per operator: throughput over the plain loop, and peak memory "
    "(where the reference rows ran, the plain module with all cores in each operator is faster: docs/peers.md)"
)


def answers(rows: Sequence[Row]) -> list[PageTable]:
    """The tables of all ablations: one of the published variants, and one of the ways to run on a CPU."""
    groups = ordered_groups(rows)
    on_cpu = [group for group in groups if isinstance(group, CpuGroup)]
    others = [group for group in groups if group not in on_cpu and set(group.outcomes) & set(PUBLISHED)]
    found = []
    if others:
        found.append(_table("Published variants: throughput and peak memory", others, list(PUBLISHED)))
    if on_cpu:
        ways = dict.fromkeys(outcome.variant for group in on_cpu for outcome in group.ordered())
        found.append(_table(_ON_A_CPU, on_cpu, list(ways)))
    return found


def _table(title: str, groups: Sequence[Group], variants: Sequence[str]) -> PageTable:
    lines = []
    for group in groups:
        cells = [_cell(group, group.outcomes.get(variant)) for variant in variants]
        torch = "1.3" if "published" in (group.head.flavour, group.head.evidence) else "2"
        name = f"{group.head.model} on {group.head.device or group.head.profile}, PyTorch {torch}"
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
