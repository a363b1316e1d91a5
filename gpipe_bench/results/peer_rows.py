"""Rows of the race of peers: one per contender and workload, with companions per timed step and per pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpipe_bench.results.rows import Record, column, like

TINY: Final = ("cells", "combinations")
"""Workloads of tiny layers: host time counts, throughput means nothing."""

KEYS: Final = ("evidence", "workload", "partitions", "chunks", "checkpoint", "variant", "contender")
STEP_COLUMNS: Final = ("evidence", "case", "contender", "round", "position", "step", "step_time_ms", "cpu_time_ms")
"""A record per timed step: its round, the place of its contender in the order of that round, and its number there."""

RATIO_COLUMNS: Final = (*KEYS, "baseline", "rounds", "time_ratio", "low", "high", "case")
"""A record per contender and baseline: its step time over the baseline's, paired by round, 95 % bootstrap interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow(Record):
    """One contender on one workload; ``None`` means that the value was not taken or does not apply."""

    NAMED_BY = "case"

    experiment: str = like("experiment", text="experiment that asked for the run", default="peers")
    evidence: str = like("evidence", text="always measured")
    workload: str = column(
        "",
        "cells (tiny layers), combinations (the same in every combination of components), convnet, unet or decoder",
        "",
    )
    model: str = like("model", text="name in the table of models, or one of the race's own")
    model_args: str = like("model_args")
    contender: str = column("", "what runs the model", "")
    package: str = column("", "package that the contender comes from", "")
    package_version: str = column("", "its version", "")
    threads: int | None = column("", "CPU threads inside one operator")
    processes: int | None = column("", "processes of the contender")
    partitions: int | None = like("partitions")
    chunks: int | None = like("chunks")
    microbatches: int | None = like("microbatches")
    checkpoint: str = like("checkpoint")
    variant: str = like("variant", text="the engine: label of its components")
    batch_size: int | None = like("batch_size")
    balance: str = like("balance")
    rounds: int | None = column("", "rounds of the race; in each, every contender runs once")
    steps: int | None = column("", "timed steps of the contender in all rounds")
    seed: int | None = like("seed", text="seed of weights, data and the order in each round")
    status: str = like("status", text="ok, oom, unsupported, skipped or error")
    reason: str = like("reason")
    step_time_ms: float | None = column("ms", "median over rounds of the median of a round's steps")
    cpu_time_ms: float | None = column("ms", "the same of the CPU time of all threads and processes")
    host_time_per_cell_us: float | None = column("us", "tiny layers: step time over (micro-batches times partitions)")
    throughput_samples_per_s: float | None = like("throughput_samples_per_s", text="batch size over step time")
    baseline: str = column("", "contender that the ratio refers to", "")
    ratio: float | None = column(
        "1", "tiny layers: host time over the baseline's; others: throughput over the baseline's"
    )
    ratio_low: float | None = column("1", "lower bound of its 95 % interval, paired by round")
    ratio_high: float | None = column("1", "upper bound")
    peak_live_mib: float | None = column(
        "MiB", "peak of live tensor bytes of all threads; processes and devices summed"
    )
    gradients: str = column("", "equal or differ: in float64, against the plain module on the whole batch", "")
    gradient_difference: float | None = column("1", "largest absolute difference over largest absolute value")
    gradient_tolerance: float | None = column("1", "the most that counts as equal")
    limit_ms: float | None = column("ms", "step time at the limit: plain loop, perfect balance and the bubble")
    limit_samples_per_s: float | None = column("samples/s", "throughput at that limit")
    gap_ms: float | None = column("ms", "step time less the limit; the columns gap_ split it")
    gap_imbalance_ms: float | None = column("ms", "partitions that take unequal time")
    gap_host_ms: float | None = column("ms", "host work of the contender beside that of the plain loop")
    gap_contention_ms: float | None = column("ms", "cores that run slower while others work, of the limit")
    gap_copies_ms: float | None = column("ms", "tensors that move between processes or devices")
    gap_other_ms: float | None = column("ms", "what cannot be told apart; negative where parts overlap")
    device: str = like("device")
    device_count: int | None = like("device_count")
    cores: int | None = column("", "CPU cores that the race may use")
    profile: str = like("profile", text="machine")
    torch: str = like("torch")
    cuda: str = like("cuda")
    driver: str = like("driver")
    python: str = like("python")
    commit: str = like("commit")
    dirty: bool | None = like("dirty")
    config_sha256: str = like("config_sha256", text="digest of the settings of the race")
    started_utc: str = like("started_utc")
    schema_version: int = like("schema_version")
    case: str = column("", "name of the setting that was raced; with contender the key of its steps and ratios", "")
    forward_passes: float | None = column("1", "forward passes per sample in a step, recomputation included")
