"""The row: one value of one cell, published, simulated, emulated or measured, with everything needed to read it.

One schema serves all four kinds of evidence. A failed cell is a row too: its ``status`` says what happened and
``reason`` why, and its results are empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from gpipe_bench.results.schema import TABLES
from gpipe_bench.schedules.cycles import ideal_bubble

__all__ = ["EVIDENCE", "SCHEMA_VERSION", "STATUSES", "PeerRow", "Record", "Row"]

SCHEMA_VERSION: Final = 2
_FIELDS: Final = TABLES["rows"].fields
EVIDENCE: Final = tuple(_FIELDS["evidence"]["constraints"]["enum"])
STATUSES: Final = tuple(_FIELDS["status"]["constraints"]["enum"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A row of any kind, with the columns that all kinds have; ``schema.json`` says what columns mean.

    ``None`` means that the value was not taken or does not apply.

    Attributes:
        TABLE: name of the table that they are lines of.
        NAMED_BY: column that names the run of a row. Rows with a name are never the same in all columns.
    """

    TABLE: ClassVar[str] = ""
    NAMED_BY: ClassVar[str] = ""

    experiment: str = ""
    evidence: str = "measured"
    model: str = ""
    model_args: str = ""
    partitions: int | None = None
    chunks: int | None = None
    microbatches: int | None = None
    checkpoint: str = ""
    batch_size: int | None = None
    balance: str = ""
    seed: int | None = None
    status: str = "ok"
    reason: str = ""
    device: str = ""
    device_count: int | None = None
    profile: str = ""
    torch: str = ""
    cuda: str = ""
    driver: str = ""
    python: str = ""
    commit: str = ""
    dirty: bool | None = None
    config_sha256: str = ""
    started_utc: str = ""
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return TABLES[cls.TABLE].columns

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        return {name: getattr(self, name) for name in self.columns()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Record):
    """One row of a result table."""

    TABLE = "rows"
    NAMED_BY = "cell"

    variant: str = ""
    clock_cycle: bool | None = None
    fork_join: bool | None = None
    copy_streams: bool | None = None
    portals: bool | None = None
    early_recompute: bool | None = None
    backward: str = "autograd"
    transfer: str = "direct"
    flavour: str = ""
    repeat: int | None = None
    throughput_samples_per_s: float | None = None
    step_time_ms: float | None = None
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    utilization_fraction: float | None = None
    bubble_fraction: float | None = None
    copy_fraction: float | None = None
    recompute_fraction: float | None = None
    imbalance_fraction: float | None = None
    source: str = ""
    cell: str = ""
    schedule: str = "gpipe"
    processes: int | None = 1
    hosts: int | None = 1
    clock_error_us: float | None = None
    run_as: str = ""
    autograd: str = ""
    sweep_kind: str = ""
    steps_overlap: bool | None = None
    precision: str = ""
    optimizer: str = ""

    def __post_init__(self) -> None:
        if self.evidence not in EVIDENCE:
            raise ValueError(f"evidence must be one of {', '.join(EVIDENCE)}, got {self.evidence!r}; label the row")
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}; use one of them")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"reason must be given when status is {self.status!r}, got none; say what happened")

    @property
    def ideal_bubble(self) -> float | None:
        """The bubble of a balanced pipeline with free copies, (n - 1) / (m + n - 1).

        None without m or n, and for schedules other than gpipe and 1f1b, whose bubble is another.
        """
        m, n = self.microbatches or self.chunks, self.partitions
        return ideal_bubble(m, n) if m and n and self.schedule in ("gpipe", "1f1b") else None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        """The row that :meth:`to_dict` wrote.

        Raises:
            ValueError: an unknown column, or one of the rules of a row is broken.
        """
        unknown = sorted(set(data) - set(cls.columns()))
        if unknown:
            raise ValueError(f"columns must be those of schema {SCHEMA_VERSION}, got {unknown}; remove or rename them")
        return cls(**data)


TINY: Final = ("cells", "combinations")
"""Workloads of the race of peers that have tiny layers: host time counts, throughput means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow(Record):
    """One contender of the race of peers on one workload."""

    TABLE = "peers"
    NAMED_BY = "case"

    experiment: str = "peers"
    workload: str = ""
    contender: str = ""
    package: str = ""
    package_version: str = ""
    threads: int | None = None
    processes: int | None = None
    variant: str = ""
    rounds: int | None = None
    steps: int | None = None
    step_time_ms: float | None = None
    cpu_time_ms: float | None = None
    host_time_per_cell_us: float | None = None
    throughput_samples_per_s: float | None = None
    baseline: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    peak_live_mib: float | None = None
    gradients: str = ""
    gradient_difference: float | None = None
    gradient_tolerance: float | None = None
    limit_ms: float | None = None
    limit_samples_per_s: float | None = None
    gap_ms: float | None = None
    gap_imbalance_ms: float | None = None
    gap_host_ms: float | None = None
    gap_contention_ms: float | None = None
    gap_copies_ms: float | None = None
    gap_other_ms: float | None = None
    cores: int | None = None
    case: str = ""
    forward_passes: float | None = None
