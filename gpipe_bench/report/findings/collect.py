"""All findings of a report, the most asked for first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpipe_bench.report.contents import Contents
from gpipe_bench.report.findings.ablation import ablation_findings
from gpipe_bench.report.findings.failures import Run, failure_findings
from gpipe_bench.report.findings.finding import Finding
from gpipe_bench.report.findings.predictions import prediction_findings
from gpipe_bench.report.findings.races import race_findings
from gpipe_bench.report.findings.sweeps import advice_findings, sweep_findings
from gpipe_bench.report.findings.training import training_findings
from gpipe_bench.results.peer_rows import PeerRow
from gpipe_bench.results.rows import Row


def findings_of(contents: Contents) -> list[Finding]:
    """What the tables say, in sentences; what they do not have is left out."""
    return list(_findings(contents))


def _findings(contents: Contents) -> Iterator[Finding]:
    tables = contents.rows
    for name in (name for name in tables if name.startswith("ablation")):
        yield from ablation_findings(tables[name], name)
    for path, text in contents.texts.items():
        yield from prediction_findings(text, path.stem)
    for name in (name for name in tables if name.startswith("sweep")):
        yield from sweep_findings(tables[name], name)
    for name in (name for name in tables if name.startswith("advice")):
        yield from advice_findings(tables[name], name)
    for path, text in contents.texts.items():
        yield from training_findings(text, path.stem)
    for name, rows in contents.races.items():
        yield from race_findings(rows, name)
    yield from failure_findings(list(runs_of(contents)))


def runs_of(contents: Contents) -> Iterator[Run]:
    """Every row of every table whose rows are runs."""
    tables: list[Sequence[Row | PeerRow]] = [*contents.rows.values(), *contents.races.values()]
    yield from (Run(row.evidence, row.status, row.reason) for rows in tables for row in rows)
    for text in contents.texts.values():
        if set(Run._fields) <= set(text.columns):
            yield from map(Run, *(text[name] for name in Run._fields))
