"""The ablation on a CPU: two loops, the paper's executor and the runtime's schedules on the same batch.

plain loop        one partition, one micro-batch: the nn.Sequential in the calling thread, nothing recomputed
micro-batch loop  one partition: the calling thread trains the micro-batches one after another
paper's executor  a worker thread per partition, and autograd runs the backward pass
schedules         the same workers carry out one schedule each; some have two partitions per worker

All of them take turns in one job, so that every ratio to the plain loop compares values of the same seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from gpipe_bench.bench.spec.cells import CellRun, MeasuredCell
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.bench.spec.names import model_word
from gpipe_bench.bench.spec.settings import (
    AUTO,
    AutoBalance,
    BatchSize,
    Checkpoint,
    Chunks,
    Model,
    ModelArgs,
    ModelSection,
    Problem,
    Seed,
    Steps,
    Threads,
    Warmup,
    cut_problems,
)
from gpipe_bench.bench.spec.variants import Variants, labels_of
from gpipe_bench.models.table import model_spec, parse_arguments
from gpipe_bench.schedules.table import SCHEDULES, ScheduleName, partition_count
from gpipe_bench.util.processes import usable_processes

_MOST: Final = 8
_VARIANT: Final = "dep-x-ptl"
"""Every component that does something on a CPU."""


def _partitions(value: Any) -> Any:
    if value == 0 and not isinstance(value, bool):
        raise ValueError("must be at least 1, got 0; raise it, or write auto")
    return 0 if value == AUTO else value


Partitions = Annotated[
    int,
    Field(strict=True, ge=0, le=4096, description=f"workers; auto: the cores that may be used, at most {_MOST}"),
    BeforeValidator(_partitions),
    PlainSerializer(lambda count: count or AUTO, return_type=int | str),
    WithJsonSchema({"anyOf": [{"const": AUTO}, {"type": "integer", "minimum": 1, "maximum": 4096}]}),
]
Schedules = Annotated[
    tuple[ScheduleName, ...],
    Field(max_length=len(SCHEDULES), description="of the runtime"),
]
Repeats = Annotated[int, Field(strict=True, ge=1, le=1000, description="runs of each, each in a fresh process")]


class CpuWorkload(ModelSection):
    """One model and batch, trained in all ways that a CPU can compare."""

    model: Model = "unet"
    model_args: ModelArgs = "depth=3;B=5;C=32;size=32;dropout=0"
    batch_size: BatchSize = 32
    chunks: Chunks = 8
    partitions: Partitions = 0
    balance: AutoBalance = ()
    checkpoint: Checkpoint = "never"
    schedules: Schedules = ("gpipe", "1f1b", "zb_h1", "interleaved", "zb_v", "v_half")
    variants: Annotated[Variants, Field(description="of the paper's executor")] = (_VARIANT,)
    threads: Threads = 1
    warmup: Warmup = 1
    steps: Steps = 5
    seed: Seed = 0
    repeats: Repeats = 3

    def problems(self) -> Iterator[Problem]:
        """The model can be cut so."""
        yield from cut_problems(self, self.partitions or len(self.balance) or 1, self.balance)

    def workers(self) -> int:
        """Worker threads: as asked for, else as the balance says, else a core for each."""
        asked = self.partitions or len(self.balance)
        return asked or min(usable_processes(1), self._layers(), _MOST)

    def cells(self) -> Iterator[MeasuredCell]:
        """The paper's executor, the loops, then the schedules that the layers permit."""
        n = self.workers()
        pipeline: dict[str, Any] = {"partitions": n, "balance": self.balance}
        whole: dict[str, Any] = {"partitions": 1, "balance": (self._layers(),)}
        place: dict[str, Any]
        for label in labels_of(self.variants) if n > 1 else ():
            yield self._cell(variant=label, **pipeline)
        yield self._cell(**whole, chunks=1, checkpoint="never")
        if self.chunks > 1:
            yield self._cell(**whole)
        for name in self.schedules:
            count = partition_count(name, n)
            place = pipeline if count == n else {"partitions": count, "balance": ()}
            if place["partitions"] <= self._layers():
                yield self._cell(schedule=name, **place)

    def runs(self, machine: Machine) -> list[CellRun]:  # noqa: ARG002 - a CPU is the same wherever it is asked for
        """The runs of those cells, in turns; a variant that a CPU cannot run is one row that says so."""
        cells = list(self.cells())
        digest = hashlib.sha256(",".join(cell.id for cell in cells).encode()).hexdigest()[:8]
        turns = f"turns-{model_word(self.model)}-cpu-{digest}"
        return [
            CellRun(cell, repeat, turns)
            for cell in cells
            for repeat in range(1 if cell.unsupported() else self.repeats)
        ]

    def _cell(self, **changes: Any) -> MeasuredCell:
        return MeasuredCell.model_validate({**self.shared(MeasuredCell), "variant": _VARIANT, **changes})

    def _layers(self) -> int:
        return model_spec(self.model).layers(parse_arguments(self.model, self.model_args))
