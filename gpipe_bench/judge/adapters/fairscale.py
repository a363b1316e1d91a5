"""fairscale's Pipe."""

from __future__ import annotations

from gpipe_bench.judge.adapters.torchgpipe import TorchGpipe


def adapter(schedule: str = "") -> TorchGpipe:  # noqa: ARG001 - the interface of adapters
    """The adapter."""
    return TorchGpipe("fairscale")
