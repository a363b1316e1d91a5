"""Findings on what did not run: how many rows failed or were skipped, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from gpipe_bench.figures.groups import short_reason
from gpipe_bench.figures.text import TIMES
from gpipe_bench.report.findings.finding import Finding, plural
from gpipe_bench.results.rows import EVIDENCE

_WORDS: Final = {
    "oom": "ran out of memory (oom)",
    "unsupported": "cannot run here (unsupported)",
    "error": "failed (error)",
    "skipped": "skipped",
}
_SHOWN: Final = 3
_QUOTES: Final = "\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"


class Run(NamedTuple):
    """What became of a run."""

    evidence: str
    status: str
    reason: str


def failure_findings(runs: Sequence[Run]) -> Iterator[Finding]:
    """A finding per kind of evidence with runs that are not ok."""
    for evidence in EVIDENCE:
        rows = [row for row in runs if row.evidence == evidence]
        failed = [row for row in rows if row.status != "ok"]
        if failed:
            statuses = [status for status in _WORDS if any(row.status == status for row in failed)]
            count = f"{len(failed)} of {plural(len(rows), 'row')} have no value."
            sentences = (count, *(_sentence(status, failed) for status in statuses))
            yield Finding("Failures", (evidence,), "", sentences, "")


def _sentence(status: str, failed: Sequence[Run]) -> str:
    """How many rows have a status; its causes, most frequent first. Reasons that differ in numbers are one cause."""
    reasons = [short_reason(row.reason, 120) for row in failed if row.status == status]
    causes: dict[str, Counter[str]] = {}
    for reason in reasons:
        causes.setdefault(re.sub(r"\d+(\.\d+)?", "#", reason), Counter())[reason] += 1
    ranked = sorted(causes.values(), key=lambda cause: -cause.total())
    parts = [_cause(cause) for cause in ranked[:_SHOWN]]
    more = f"; and {plural(len(ranked) - _SHOWN, 'other reason')}" if len(ranked) > _SHOWN else ""
    return f"{len(reasons)} {_WORDS[status]}: {'; '.join(parts)}{more}."


def _cause(reasons: Counter[str]) -> str:
    """A cause by its most frequent reason."""
    example = reasons.most_common(1)[0][0]
    return f"{reasons.total()} {TIMES} {'such as ' if len(reasons) > 1 else ''}{_QUOTES[0]}{example}{_QUOTES[1]}"
