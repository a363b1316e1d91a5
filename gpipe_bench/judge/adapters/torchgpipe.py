"""torchgpipe, and fairscale's Pipe, which was made from it: one process, skips of their own."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

from torch import nn

from gpipe_bench.judge.pipes import PlainPipe, options_of
from gpipe_bench.judge.protocol import Setup
from gpipe_bench.judge.skips import translated

PIPES = {"torchgpipe": ("torchgpipe", "GPipe"), "fairscale": ("fairscale.nn.pipe", "Pipe")}
"""Package -> module and name of its pipeline; the module ``skip`` of that has its skips."""


def pipe_of(package: str, model: nn.Sequential, balance: list[int], **options: Any) -> nn.Module:
    """A pipeline of the package, with its skips in the place of ours."""
    module, name = PIPES[package]
    made: nn.Module = getattr(import_module(module), name)(
        translated(model, import_module(f"{module}.skip")), balance, **options
    )
    return made


class TorchGpipe:
    """One of the two packages."""

    processes, per_device = False, 1

    def __init__(self, package: str) -> None:
        self.package, self.version = package, version(package)
        self.limits = {"none": "types of forward: tensors only", "replicas": "one process", "shards": "one process"}
        if package == "torchgpipe":
            self.limits["tied"] = "refused with an error: parameters of partitions must differ"

    def build(self, model: nn.Sequential, setup: Setup) -> PlainPipe:
        """The pipeline."""
        options = options_of(setup) | {"devices": setup.places, "chunks": setup.chunks}
        return PlainPipe(model, pipe_of(self.package, model, setup.balance(len(model)), **options))


def adapter(schedule: str = "") -> TorchGpipe:
    """The adapter of torchgpipe, or of fairscale: ``torchgpipe:fairscale``."""
    return TorchGpipe(schedule or "torchgpipe")
