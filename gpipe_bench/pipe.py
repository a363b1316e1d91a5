"""What ``torch.distributed.pipeline.sync`` offered, under the same names; ``docs/migration.md`` says what differs."""

from gpipe_bench.engine.context import is_checkpointing, is_recomputing
from gpipe_bench.engine.old_state import renamed_state_dict
from gpipe_bench.engine.pipe import LocalValue, NoChunk, Pipe
from gpipe_bench.engine.placed import WithDevice, partition_model
from gpipe_bench.engine.sequential import PipeSequential

__all__ = [
    "LocalValue",
    "NoChunk",
    "Pipe",
    "PipeSequential",
    "WithDevice",
    "is_checkpointing",
    "is_recomputing",
    "partition_model",
    "renamed_state_dict",
]
