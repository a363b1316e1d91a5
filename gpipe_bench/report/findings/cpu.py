"""Findings of an ablation on a CPU: each way to run the model beside the plain loop."""

from __future__ import annotations

from collections.abc import Iterator

from gpipe_bench.figures.text import TIMES, significant
from gpipe_bench.report.findings.finding import NBSP
from gpipe_bench.results.labels import LOOP
from gpipe_bench.results.outcomes import THROUGHPUT, CpuGroup, Outcome


def cpu_sentences(group: CpuGroup) -> Iterator[str]:
    """The throughput of the plain loop, and that of every other way over it, the fastest first."""
    base = group.baseline.middle(THROUGHPUT) if group.baseline else None
    if base is None:
        return
    yield (
        f"The {LOOP} (the whole batch at once in one thread, without a pipeline) reaches "
        f"{significant(base)}{NBSP}samples/s."
    )
    if words := [text for outcome in group.ranked() if (text := _words(outcome, group.baseline))]:
        few = "median and 95 % interval, which spans all runs when they are few"
        yield f"Throughput over that of the {LOOP} ({few}): {', '.join(words)}."


def _words(outcome: Outcome, loop: Outcome | None) -> str:
    ratio = outcome.ratio(loop)
    if ratio is None:
        return ""
    ends = "" if ratio.n == 1 else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{outcome.variant} {ratio.median:.2f}{NBSP}{TIMES}{ends}"
