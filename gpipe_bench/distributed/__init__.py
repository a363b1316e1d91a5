"""Pipelines across processes and hosts: one process per device, started by ``torchrun``."""

from gpipe_bench.distributed.pipe import Pipe
from gpipe_bench.distributed.recorder import recorded
from gpipe_bench.errors import PeerError

__all__ = ["PeerError", "Pipe", "recorded"]
