"""Which recorded run a timeline figure shows: the asked one, or none with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_bench.components import Components
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.groups import short_reason
from gpipe_bench.figures.tables import RecordedEvent
from gpipe_bench.results.outcomes import typical
from gpipe_bench.results.rows import EVIDENCE, Row
from gpipe_bench.results.timeline import TimelineEvent
from gpipe_bench.util.nearest import nearest_few


@dataclass(frozen=True, slots=True)
class Run:
    """One run to draw: its row, its events, and a remark where it has none."""

    row: Row
    events: list[TimelineEvent]
    remark: str = ""


def choose_run(events: Sequence[RecordedEvent], rows: Sequence[Row], variant: str, evidence: str = "measured") -> Run:
    """The run of ``variant`` to draw.

    Of several repeats the one whose step time is nearest to their median. Where the variant has no timeline, a run
    without events.

    Args:
        events: of one table, perhaps of several kinds of evidence.
        rows: of the same runs.
        variant: label of the components.
        evidence: ``measured``, ``emulated`` or ``simulated``; nothing of another kind is shown.

    Raises:
        ConfigError: ``variant`` is no label, or the tables hold nothing of it.
    """
    _check_label(variant)
    _check_evidence(evidence, rows)
    events = [record for record in events if record.evidence == evidence]
    rows = [row for row in rows if row.evidence == evidence]
    own = _typical(events, rows, variant)
    if own:
        return own
    failed = [row for row in rows if row.variant == variant and row.status != "ok"]
    if not failed:
        present = dict.fromkeys([*(record.variant for record in events), *(row.variant for row in rows)])
        hint = f"{nearest_few(variant, present)}; the column variant lists all {len(present)}"
        what = f"{evidence} rows or events"
        raise ConfigError([f"variant must be one that was recorded, got {variant!r} without {what}; {hint}"])
    return Run(failed[0], [], f"no timeline, {failed[0].status}: {short_reason(failed[0].reason)}")


def _check_evidence(evidence: str, rows: Sequence[Row]) -> None:
    known = [name for name in EVIDENCE if any(row.evidence == name for row in rows)]
    if evidence not in known:
        found = f"evidence must be of a kind that the rows have, got {evidence!r}"
        raise ConfigError([f"{found}; use one of {', '.join(known)}"])


def _check_label(variant: str) -> None:
    try:
        Components.from_label(variant)
    except ValueError as error:
        raise ConfigError([str(error)]) from None


def _typical(events: Sequence[RecordedEvent], rows: Sequence[Row], variant: str) -> Run | None:
    """The run nearest to the median step time in the first cell of ``variant`` that was recorded."""
    recorded = [record for record in events if record.variant == variant]
    if not recorded:
        return None
    cell, evidence = recorded[0].cell, recorded[0].evidence
    repeats = {record.repeat for record in recorded if record.cell == cell}
    candidates = [
        row
        for row in rows
        if (row.variant, row.evidence, row.status) == (variant, evidence, "ok") and (row.repeat or 0) in repeats
    ]
    exact = [row for row in candidates if row.cell == cell]
    if not candidates:
        run = f"cell {cell!r} ({evidence}, {variant})"
        raise ConfigError([f"rows must hold the run of {run}, got none; pass the rows collected with the events"])
    row = typical(exact or candidates)
    chosen = [record.event for record in recorded if (record.cell, record.repeat) == (cell, row.repeat or 0)]
    return Run(row, chosen)
