"""Findings of an ablation: what each component brings, step by step and over all combinations; a CPU's pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import exp, fsum, log
from typing import Final

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.figures.groups import ordered_groups
from gpipe_bench.figures.text import TIMES, significant
from gpipe_bench.report.findings.cpu import cpu_sentences
from gpipe_bench.report.findings.finding import NBSP, Finding, percent, setting
from gpipe_bench.results.outcomes import CpuGroup, Group, shown_groups
from gpipe_bench.results.rows import Row

_SPEED: Final = "throughput_samples_per_s"
_FEWEST_PAIRS: Final = 2
_NOTHING: Final = 5e-4
_KINDS: Final = (
    "Faster in every setting",
    "Slower in every setting",
    "Depends on the other components",
    "No effect in any setting",
)
_NAMES: Final = {
    "clock_cycle": "the clock-cycle order of tasks",
    "fork_join": "ordering the backward pass (Fork and Join)",
    "copy_streams": "copy streams",
    "portals": "portals",
    "early_recompute": "early recomputation",
}


@dataclass(frozen=True, slots=True)
class Effect:
    """Throughput with a component over throughput without it, over all pairs of combinations that differ in it alone.

    Attributes:
        component: its attribute of :class:`Components`.
        mean: geometric mean over the pairs.
        low: the least.
        high: the most.
        pairs: how many there are.
    """

    component: str
    mean: float
    low: float
    high: float
    pairs: int


def ablation_findings(rows: Sequence[Row], section: str) -> Iterator[Finding]:
    """A finding per group of runs that differ in their components; published values stand beside other ones."""
    for group, beside in shown_groups(ordered_groups(rows)):
        published = next((other for other in beside if other.head.evidence == "published"), None)
        if isinstance(group, CpuGroup):
            topic, sentences = "Pipelines on a CPU", tuple(cpu_sentences(group))
        else:
            topic, sentences = "Components", tuple(_sentences(group, published))
        if sentences:
            kinds = ("published", group.head.evidence) if published else (group.head.evidence,)
            yield Finding(topic, kinds, setting(group.head), sentences, section)


def effects(group: Group) -> list[Effect]:
    """The effect of every component that has two pairs or more."""
    speeds = {
        Components.from_label(label): interval.median
        for label, outcome in group.outcomes.items()
        if (interval := outcome.interval(_SPEED))
    }
    found = []
    for field in fields(Components):
        without = [components for components in speeds if not getattr(components, field.name)]
        ratios = [speeds[on] / speeds[off] for off in without if (on := replace(off, **{field.name: True})) in speeds]
        if len(ratios) >= _FEWEST_PAIRS:
            mean = exp(fsum(map(log, ratios)) / len(ratios))
            found.append(Effect(field.name, mean, min(ratios), max(ratios), len(ratios)))
    return found


def _sentences(group: Group, published: Group | None) -> Iterator[str]:
    yield from _whole(group, published)
    found = effects(group)
    kinds: dict[str, list[str]] = {}
    for effect in found:
        kinds.setdefault(_kind(effect), []).append(_effect_words(effect))
    if steps := _steps(group, published):
        yield f"Step by step, as components are added, throughput changes: {', '.join(steps)}."
    yield from (f"{words}: {'; '.join(kinds[words])}." for words in _KINDS if words in kinds)
    if found:
        pairs = " or ".join(str(count) for count in sorted({effect.pairs for effect in found}))
        yield f"Mean and range are over {pairs} combinations of the other components.{_runs(group)}"


def _kind(effect: Effect) -> str:
    faster, slower, changing, none = _KINDS
    if max(effect.high - 1, 1 - effect.low) < _NOTHING:
        return none
    return faster if effect.low > 1 else slower if effect.high < 1 else changing


def _runs(group: Group) -> str:
    """How many repeats are behind the medians, where there are several."""
    fewest, most = group.repeats
    what = "steps" if group.head.evidence == "emulated" else "runs"
    count = str(most) if fewest == most else f"{fewest} to {most}"
    return f" Values are medians of {count} {what}." if most > 1 else ""


def _steps(group: Group, published: Group | None) -> list[str]:
    """What each component changes, added in the order of print."""
    words = []
    for before, after in pairwise(PUBLISHED):
        change = _ratio(group, _SPEED, before, after)
        if change is None:
            continue
        old, new = Components.from_label(before), Components.from_label(after)
        (name,) = (field.name for field in fields(Components) if getattr(old, field.name) != getattr(new, field.name))
        words.append(f"{_NAMES[name]} {percent(change)}{_beside(_ratio(published, _SPEED, before, after))}")
    return words


def _beside(ratio: float | None) -> str:
    return "" if ratio is None else f" (published {percent(ratio)})"


def _whole(group: Group, published: Group | None) -> Iterator[str]:
    """The change from no component to all published ones, in throughput and memory."""
    scale, unit = group.memory_scale
    memory = "peak reserved memory" if group.memory_column == "peak_reserved_gib" else "peak live memory"
    for column, name, factor, words in (
        (_SPEED, "throughput", 1.0, "samples/s"),
        (group.memory_column, memory, scale, unit),
    ):
        ends = _ends(group, column, PUBLISHED[0], PUBLISHED[-1])
        if ends is None:
            continue
        printed = _ends(published, column, PUBLISHED[0], PUBLISHED[-1])
        other = f" (published {_change(*printed, factor)})" if printed else ""
        yield f"With ordering, copy streams and portals, {name} goes from {_change(*ends, factor, words)}{other}."


def _change(old: float, new: float, scale: float, unit: str = "") -> str:
    ends = f"{significant(scale * old)} to {significant(scale * new)}{NBSP if unit else ''}{unit}"
    return f"{ends}, {new / old:.2f}{NBSP}{TIMES}"


def _effect_words(effect: Effect) -> str:
    return f"{_NAMES[effect.component]} {percent(effect.mean)} ({percent(effect.low)} to {percent(effect.high)})"


def _ends(group: Group | None, column: str, before: str, after: str) -> tuple[float, float] | None:
    found = [group.outcomes[label].interval(column) for label in (before, after) if group and label in group.outcomes]
    known = [interval.median for interval in found if interval]
    return (known[0], known[1]) if len(known) == 2 and all(known) else None


def _ratio(group: Group | None, column: str, before: str, after: str) -> float | None:
    ends = _ends(group, column, before, after)
    return ends[1] / ends[0] if ends else None
