"""The successor of ``torch.distributed.pipeline.sync``: ``from gpipe_bench.pipe import Pipe, NoChunk, WithDevice``."""

from gpipe_bench.engine.inputs import NoChunk
from gpipe_bench.engine.pipe import LocalValue, Pipe
from gpipe_bench.engine.placed import WithDevice
from gpipe_bench.engine.sequential import PipeSequential

__all__ = ["LocalValue", "NoChunk", "Pipe", "PipeSequential", "WithDevice"]
