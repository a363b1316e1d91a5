"""What figures say of rows: their setting, and what failed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from gpipe_bench.components import PUBLISHED
from gpipe_bench.figures.text import TIMES, listing
from gpipe_bench.results.labels import training_words
from gpipe_bench.results.outcomes import FAILURES, Group, Outcome, group_rows
from gpipe_bench.results.rows import EVIDENCE, Row

_NAMED_AT_MOST: Final = 2
SYMBOLS: Final = {"unsupported": "\u00d7", "oom": "\u25bc", "error": "\u2716", "skipped": "\u2013"}
"""What stands in the place of a run that gave no value."""

_NBSP: Final = "\u00a0"


def ordered_groups(rows: Iterable[Row]) -> list[Group]:
    """The groups of rows in the order published, simulated, emulated, measured, then as they come in the table."""
    return sorted(group_rows(rows), key=lambda group: EVIDENCE.index(group.head.evidence))


def setting_words(row: Row) -> str:
    """The setting of a row in words: arguments of the model, machine, pipeline."""
    machine = row.device or row.profile
    if machine and row.device_count and row.device_count > 1:
        machine = f"{row.device_count}{_NBSP}{TIMES}{_NBSP}{machine}"
    pipeline = [
        f"{row.partitions}{_NBSP}partitions{_shared(row)}" if row.partitions else "",
        f"{row.chunks}{_NBSP}chunks" if row.chunks else "",
        f"batch{_NBSP}{row.batch_size}" if row.batch_size else "",
        f"checkpoint{_NBSP}{row.checkpoint}" if row.checkpoint else "",
        "" if row.backward in ("", "autograd") else f"schedule{_NBSP}{row.schedule}",
        "" if row.transfer in ("", "direct") else f"transfer{_NBSP}{row.transfer}",
        training_words(row).replace(" ", _NBSP),
        f"autograd of PyTorch{_NBSP}1.3" if row.flavour == "published" else "",
    ]
    parts = [row.model_args.replace(";", ", "), machine, ", ".join(filter(None, pipeline))]
    return "; ".join(filter(None, parts))


def _shared(row: Row) -> str:
    """That all partitions of a row are on one GPU, where they are."""
    one = row.device_count == 1 and (row.partitions or 1) > 1 and row.device.startswith("cuda")
    return " on one GPU".replace(" ", _NBSP) if one else ""


def short_reason(reason: str, limit: int = 90) -> str:
    """The first clause of a reason, the part that variants have in common."""
    clause = re.split(r"[;\n]", reason.strip(), maxsplit=1)[0].strip()
    return clause if len(clause) <= limit else clause[: limit - 1].rstrip() + "…"


def failure_notes(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for each kind of failure and reason among the outcomes."""
    causes: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for outcome in sorted(outcomes, key=_variant_order):
        total = len(outcome.ok) + len(outcome.failed)
        for cause, count in Counter(_cause(row) for row in outcome.failed).items():
            part = f" ({count} of {total} repeats)" if count < total else ""
            first = next(row for row in outcome.failed if _cause(row) == cause)
            causes.setdefault(cause, (short_reason(first.reason), []))[1].append(outcome.variant + part)
    ordered = sorted(causes.items(), key=lambda item: (FAILURES.index(item[0][0]), item[0][1]))
    return [f"{SYMBOLS[status]} {status}, {_named(names)}: {reason}" for (status, _), (reason, names) in ordered]


def _cause(row: Row) -> tuple[str, str]:
    """What failed runs have in common: reasons that differ in their numbers alone are one cause."""
    return row.status, re.sub(r"[\d.]+", "#", short_reason(row.reason))


def _named(names: Sequence[str]) -> str:
    return listing(names) if len(names) <= _NAMED_AT_MOST else f"{len(names)} variants"


def _variant_order(outcome: Outcome) -> tuple[int, str]:
    published = PUBLISHED.index(outcome.variant) if outcome.variant in PUBLISHED else len(PUBLISHED)
    return published, outcome.variant
