"""The module itself, on the whole batch: what every engine is compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gpipe_bench.judge.pipes import PlainPipe
from gpipe_bench.judge.protocol import Setup


class Plain:
    """No pipeline."""

    version: str = torch.__version__
    processes, per_device = False, 1
    limits: Mapping[str, str] = {
        "passes": "not a pipeline",
        "replicas": "not a pipeline",
        "shards": "one process",
        "error in forward": "one call, so no third",
    }

    def build(self, model: nn.Sequential, setup: Setup) -> PlainPipe:  # noqa: ARG002 - the interface of adapters
        """The module."""
        return PlainPipe(model, model)


def adapter(schedule: str = "") -> Plain:  # noqa: ARG001 - the interface of adapters
    """The adapter."""
    return Plain()
