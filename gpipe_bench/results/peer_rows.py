"""Rows of the race of peers: one per contender and workload, with companions per timed step and per pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpipe_bench.results.rows import Record
from gpipe_bench.results.schema import TABLES

TINY: Final = ("cells", "combinations")
"""Workloads of tiny layers: host time counts, throughput means nothing."""

STEP_COLUMNS: Final = TABLES["peers-steps"].columns
"""A record per timed step: its round, the place of its contender in the order of that round, and its number there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow(Record):
    """One contender on one workload; ``None`` means that the value was not taken or does not apply."""

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
