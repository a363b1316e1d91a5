"""A reproducible benchmark suite for pipeline-parallel training, with an engine in PyTorch and a simulator.

::

    from torch import nn

    from gpipe_bench import GPipe
    from gpipe_bench.balance import balance_by_time

    module = nn.Sequential(...)
    pipe = GPipe(module, balance_by_time(2, module, x), devices=["cuda:0", "cuda:1"], chunks=8)
    criterion(pipe(x), y).backward()

GPipe                      a pipeline over an ``nn.Sequential``: you give the layers per partition and the devices
Pipe                       a pipeline over layers that you have put on their devices, with several inputs
Components                 which components of the engine are on
MicroBatches               ready-made micro-batches, in the place of a batch that the pipeline would cut
NoChunk, WithDevice, PipeSequential, LocalValue, partition_model, renamed_state_dict
                           what else ``torch.distributed.pipeline.sync`` offered, see ``docs/migration.md``
is_checkpointing()         whether this thread runs a layer that will be recomputed
is_recomputing()           whether this thread recomputes a layer
GpipeBenchError            base class of the errors of this package; some also are a ValueError or a TypeError

gpipe_bench.balance        how many layers each partition takes
gpipe_bench.skip           skip connections between layers of different partitions
gpipe_bench.models         the models of the suite
gpipe_bench.simulator      training steps on hardware that you do not have

``import gpipe_bench`` does not load PyTorch; the first use of a name that needs PyTorch loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_bench.components import Components
from gpipe_bench.errors import GpipeBenchError
from gpipe_bench.util.lazy import lazy

if TYPE_CHECKING:
    from gpipe_bench.autograd.sequential import PipeSequential
    from gpipe_bench.engine.context import is_checkpointing, is_recomputing
    from gpipe_bench.engine.gpipe import GPipe
    from gpipe_bench.engine.microbatches import MicroBatches
    from gpipe_bench.engine.old_state import renamed_state_dict
    from gpipe_bench.engine.pipe import LocalValue, NoChunk, Pipe
    from gpipe_bench.engine.placed import WithDevice, partition_model

__all__ = [
    "Components",
    "GPipe",
    "GpipeBenchError",
    "LocalValue",
    "MicroBatches",
    "NoChunk",
    "Pipe",
    "PipeSequential",
    "WithDevice",
    "__version__",
    "is_checkpointing",
    "is_recomputing",
    "partition_model",
    "renamed_state_dict",
]

__version__ = "0.4.0"

_LAZY = {
    "GPipe": "gpipe_bench.engine.gpipe",
    "LocalValue": "gpipe_bench.engine.pipe",
    "MicroBatches": "gpipe_bench.engine.microbatches",
    "NoChunk": "gpipe_bench.engine.pipe",
    "Pipe": "gpipe_bench.engine.pipe",
    "PipeSequential": "gpipe_bench.autograd.sequential",
    "WithDevice": "gpipe_bench.engine.placed",
    "is_checkpointing": "gpipe_bench.engine.context",
    "is_recomputing": "gpipe_bench.engine.context",
    "partition_model": "gpipe_bench.engine.placed",
    "renamed_state_dict": "gpipe_bench.engine.old_state",
}

__getattr__, __dir__ = lazy(__name__, _LAZY, __all__)
