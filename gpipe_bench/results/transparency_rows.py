"""Rows of the transparency experiment: one per training run, with companions per step and per normalisation layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpipe_bench.results.rows import Record, column, like

KEYS: Final = ("evidence", "model", "seed", "precision", "normalisation", "arm", "checkpoint", "deferred_batch_norm")
STEP_COLUMNS: Final = (*KEYS, "step", "loss", "gradient_difference_plain", "gradient_difference_accumulated")
"""A record per training step; differences are largest absolute difference over largest absolute reference value."""

LAYER_COLUMNS: Final = (*KEYS, "step", "layer", "name", "mean_difference", "variance_difference")
"""A record per batch normalisation after the first and the last step: ||running - plain|| / ||plain||."""

GROUP: Final = tuple(name for name in KEYS if name != "seed")
"""What the runs of one claim have in common."""

CLAIM_COLUMNS: Final = (*GROUP, "quantity", "reference", "n", "estimate", "low", "high", "margin", "verdict")
"""A claim over seeds. Accuracies, last losses: mean paired difference, 95 % t interval; others: bootstrapped median."""

VERDICT_COLUMNS: Final = (
    *(*CLAIM_COLUMNS, "batch_norms"),
    *("device", "profile", "torch", "python", "commit", "dirty", "config_sha256", "started_utc", "schema_version"),
)
"""A claim, how many layers there are whose statistics could be deferred, and the provenance of the runs behind it: each
value that occurs, and the start of the first. The configuration of a claim is its margins and those of its runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransparencyRow(Record):
    """One training run; ``None`` means that the value does not apply."""

    NAMED_BY = "arm"

    experiment: str = like("experiment", text="experiment that asked for the run", default="transparency")
    evidence: str = like("evidence", text="always measured")
    model: str = like("model")
    model_args: str = like("model_args")
    data: str = column("", "images trained on", "")
    precision: str = column("", "float32 or float64", "float32")
    normalisation: str = column("", "batch: by statistics of the batch; frozen: by running statistics", "batch")
    arm: str = column("", "plain, accumulated (micro-batches without pipeline) or pipeline", "")
    checkpoint: str = like("checkpoint", text="always, except_last or never; empty without pipeline")
    deferred_batch_norm: bool | None = column("", "running statistics updated once per batch, if there are any")
    partitions: int | None = like("partitions")
    chunks: int | None = like("chunks")
    microbatches: int | None = like("microbatches")
    batch_size: int | None = like("batch_size")
    balance: str = like("balance")
    steps: int | None = column("", "training steps")
    learning_rate: float | None = column("", "peak learning rate of SGD")
    held_out: int | None = column("samples", "held-out images")
    seed: int | None = like("seed", text="seed of split, order, weights and noise")
    batch_norms: int | None = column(
        "", "batch normalisations with running statistics in the model; with 0 there is nothing to defer"
    )
    status: str = like("status", text="ok or error")
    reason: str = like("reason")
    loss_last: float | None = column("1", "training loss of the last step")
    accuracy_fraction: float | None = column("1", "held out, evaluation: classes or pixels that are right")
    accuracy_batch_fraction: float | None = column("1", "the same weights, normalised by the held-out batch itself")
    iou_fraction: float | None = column("1", "held out, evaluation: intersection over union of the mask")
    gradient_difference_plain_first: float | None = column("1", "first step, to the plain model on the whole batch")
    gradient_difference_plain_largest: float | None = column("1", "largest over the steps, each from its own weights")
    gradient_difference_accumulated_largest: float | None = column("1", "the same, to accumulated micro-batches")
    loss_difference_accumulated_largest: float | None = column("1", "largest absolute difference of the losses")
    statistics_difference_entry: float | None = column("1", "of the layer that the images meet first, step 1")
    statistics_difference_first: float | None = column("1", "median over layers of the variance difference, step 1")
    statistics_difference_last: float | None = column("1", "the same after the last step")
    updates_per_step: float | None = column("1", "updates of the running statistics per training step")
    device: str = like("device")
    device_count: int | None = like("device_count")
    profile: str = like("profile", text="machine")
    torch: str = like("torch")
    cuda: str = like("cuda")
    driver: str = like("driver")
    python: str = like("python")
    commit: str = like("commit")
    dirty: bool | None = like("dirty")
    config_sha256: str = like("config_sha256")
    started_utc: str = like("started_utc")
    schema_version: int = like("schema_version")


def arm_label(arm: str, checkpoint: str, deferred: object) -> str:
    """How figures and tables name an arm: ``plain``, ``always``, ``always, deferred``."""
    on = str(deferred) == "True"
    return f"{checkpoint}{', deferred' if on else ''}" if arm == "pipeline" else arm
