"""Rows of the transparency experiment: one per training run, with companions per step and per normalisation layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpipe_bench.results.rows import Record
from gpipe_bench.results.schema import TABLES

KEYS: Final = ("evidence", "model", "seed", "precision", "normalisation", "arm", "checkpoint", "deferred_batch_norm")
STEP_COLUMNS: Final = TABLES["transparency-steps"].columns
"""A record per training step; differences are largest absolute difference over largest absolute reference value."""

LAYER_COLUMNS: Final = TABLES["transparency-layers"].columns
"""A record per batch normalisation after the first and the last step: ||running - plain|| / ||plain||."""

GROUP: Final = tuple(name for name in KEYS if name != "seed")
"""What the runs of one claim have in common."""

CLAIM_COLUMNS: Final = (*GROUP, "quantity", "reference", "n", "estimate", "low", "high", "margin", "verdict")
"""A claim over seeds. Accuracies, last losses: mean paired difference, 95 % t interval; others: bootstrapped median."""

VERDICT_COLUMNS: Final = TABLES["transparency-verdict"].columns
"""A claim, how many layers there are whose statistics could be deferred, and the provenance of the runs behind it: each
value that occurs, and the start of the first. The configuration of a claim is its margins and those of its runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransparencyRow(Record):
    """One training run; ``None`` means that the value does not apply."""

    TABLE = "transparency"
    NAMED_BY = "arm"

    experiment: str = "transparency"
    data: str = ""
    precision: str = "float32"
    normalisation: str = "batch"
    arm: str = ""
    deferred_batch_norm: bool | None = None
    steps: int | None = None
    learning_rate: float | None = None
    held_out: int | None = None
    batch_norms: int | None = None
    loss_last: float | None = None
    accuracy_fraction: float | None = None
    accuracy_batch_fraction: float | None = None
    iou_fraction: float | None = None
    gradient_difference_plain_first: float | None = None
    gradient_difference_plain_largest: float | None = None
    gradient_difference_accumulated_largest: float | None = None
    loss_difference_accumulated_largest: float | None = None
    statistics_difference_entry: float | None = None
    statistics_difference_first: float | None = None
    statistics_difference_last: float | None = None
    updates_per_step: float | None = None


def arm_label(arm: str, checkpoint: str, deferred: object) -> str:
    """How figures and tables name an arm: ``plain``, ``always``, ``always, deferred``."""
    on = str(deferred) == "True"
    return f"{checkpoint}{', deferred' if on else ''}" if arm == "pipeline" else arm
