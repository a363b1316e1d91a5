"""The row: one value of one cell, published, simulated, emulated or measured, with everything needed to read it.

One schema serves all four kinds of evidence. A failed cell is a row too: its ``status`` says what happened and
``reason`` why, and its results are empty.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Final

from gpipe_bench.schedules.cycles import ideal_bubble

__all__ = ["EVIDENCE", "SCHEMA_VERSION", "STATUSES", "Record", "Row", "column", "like"]

SCHEMA_VERSION: Final = 2
EVIDENCE: Final = ("published", "simulated", "emulated", "measured")
STATUSES: Final = ("ok", "oom", "unsupported", "skipped", "error")


def column(unit: str, text: str, default: Any = None) -> Any:
    """A column of a table: its unit, its meaning, and what it holds where nothing is said."""
    return field(default=default, metadata={"unit": unit, "text": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What rows of every kind can do; their columns are fields made by :func:`column`.

    Attributes:
        NAMED_BY: column that names the run of a row. Rows with a name are never the same in all columns.
    """

    NAMED_BY: ClassVar[str] = ""

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(c.name for c in fields(cls))

    @classmethod
    def describe(cls) -> list[tuple[str, str, str, str]]:
        """Name, type, unit and meaning of each column."""
        return [(c.name, str(c.type), c.metadata["unit"], c.metadata["text"]) for c in fields(cls)]

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Record):
    """One row of a result table; ``None`` means that the value was not taken or does not apply."""

    NAMED_BY = "cell"

    experiment: str = column("", "experiment that asked for the cell", "")
    evidence: str = column("", "published, simulated, emulated or measured", "measured")
    model: str = column("", "name in the table of models", "")
    model_args: str = column("", "arguments of the model, 'key=value' joined by ';'", "")
    variant: str = column("", "label of the components", "")
    clock_cycle: bool | None = column("", "component: deterministic clock-cycle")
    fork_join: bool | None = column("", "component: backward order by Fork and Join")
    copy_streams: bool | None = column("", "component: copies on streams of their own")
    portals: bool | None = column("", "component: skips hop from source to destination device")
    early_recompute: bool | None = column("", "component: recomputation ahead of the gradient")
    backward: str = column("", "what drives the backward pass: autograd or scheduled", "autograd")
    transfer: str = column("", "how tensors cross partitions: direct or host", "direct")
    flavour: str = column("", "autograd engine of a simulated row: current, or published for that of PyTorch 1.3", "")
    partitions: int | None = column("", "n, contiguous groups of layers")
    chunks: int | None = column("", "micro-batches asked for")
    microbatches: int | None = column("", "m, micro-batches that the batch gave")
    checkpoint: str = column("", "always, except_last or never", "")
    batch_size: int | None = column("samples", "samples per step")
    balance: str = column("", "layers per partition, joined by '-'", "")
    repeat: int | None = column("", "0-based repeat of the cell, each in a fresh process; of an emulated cell its step")
    seed: int | None = column("", "seed of weights, data and dropout")
    status: str = column("", "ok, oom, unsupported, skipped or error", "ok")
    reason: str = column("", "why the status is not ok", "")
    throughput_samples_per_s: float | None = column("samples/s", "batch size over the median step time")
    step_time_ms: float | None = column("ms", "median over the timed steps")
    peak_allocated_gib: float | None = column("GiB", "sum over devices of the peak of live tensor bytes")
    peak_reserved_gib: float | None = column("GiB", "sum over devices of the peak that the allocator held")
    utilization_fraction: float | None = column(
        "1",
        "mean over devices of the busy share: published, and measured on GPUs, samples of the driver that found a "
        "kernel running; simulated and emulated, share of the step with a task or a copy that the device sends; "
        "measured on CPUs, share in which a task computed, copies left out",
    )
    bubble_fraction: float | None = column("1", "mean share idle in fill, drain and waiting")
    copy_fraction: float | None = column("1", "mean share in which only a copy ran")
    recompute_fraction: float | None = column("1", "mean share of recomputation")
    imbalance_fraction: float | None = column("1", "mean share idle for having less work than the busiest partition")
    device: str = column("", "device type and name", "")
    device_count: int | None = column("", "distinct devices used")
    profile: str = column("", "hardware profile of a simulated or emulated row, machine of a measured one", "")
    source: str = column(
        "", "where a published value is printed; of the run of another package its name and version", ""
    )
    torch: str = column("", "version of PyTorch", "")
    cuda: str = column("", "version of CUDA", "")
    driver: str = column("", "version of the GPU driver", "")
    python: str = column("", "version of Python", "")
    commit: str = column("", "commit of gpipe_bench", "")
    dirty: bool | None = column("", "whether the checkout had uncommitted changes")
    config_sha256: str = column("", "digest of the cell's configuration, which the table _configurations has", "")
    started_utc: str = column("", "start of the run, ISO 8601", "")
    schema_version: int = column("", "version of this schema", SCHEMA_VERSION)
    cell: str = column("", "name of the cell; with repeat the key of its devices, steps and events", "")
    schedule: str = column("", "what orders forward and backward passes, by name", "gpipe")
    processes: int | None = column("", "processes that ran the pipeline, each with its partitions", 1)
    hosts: int | None = column("", "hosts that the devices are on", 1)
    clock_error_us: float | None = column(
        "us", "how far the clock of a process may be off that of the first one in the timeline, at most"
    )

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


def like(name: str, **changes: Any) -> Any:
    """The column ``name`` of :class:`Row` in another kind of row; ``changes`` are arguments of :func:`column`."""
    (same,) = (c for c in fields(Row) if c.name == name)
    return column(**{**same.metadata, "default": same.default, **changes})
