"""Who takes part in the race, by name; a file of this folder builds each. Imports no PyTorch.

- ``engine-autograd``: this project with the paper's executor.
- ``engine-scheduled``: this project's runtime with the schedule GPipe, driven by ``pipe(x)`` and ``loss.backward()``.
- ``engine-*-one-thread``: the same two without workers (``workers='never'``), so what a cell costs without the
  hand-over between threads; tiny layers only.
- other ``engine-*``: the runtime with one schedule each, driven by ``pipe.step``.
- ``torchgpipe``: torchgpipe 0.0.7 (Kim et al., arXiv 2004.09910).
- ``fairscale``: fairscale's Pipe, made from torchgpipe.
- ``distributed-*``: this project's ``gpipe_bench.distributed.Pipe``, a process per device.
- ``pipelining-*``: torch.distributed.pipelining, a process per device.
- ``plain*``, ``loop*``: the module without a pipeline, the whole batch at once or micro-batch after micro-batch.
- ``loop-processes``: as many loops at once as partitions can compute at once, each over its share of the micro-batches,
  which wait for nothing: what the cores do together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.util.nearest import nearest


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run a model.

    Attributes:
        name: in rows and figures.
        kind: the file that builds it.
        option: what tells contenders of one kind apart; of a pipeline its schedule.
        package: what has to be installed for it.
        version: the version of it that the race is made for; empty for one that is part of PyTorch or of this project.
        only: ``cells`` or ``networks`` where it takes part in no other workload.
        two_per_device: whether each device has two partitions.
        all_threads: whether operators may use every core; otherwise one thread each.
    """

    name: str
    kind: str
    option: str = ""
    package: str = "gpipe_bench"
    version: str = ""
    only: str = ""
    two_per_device: bool = False
    all_threads: bool = False

    @property
    def pipeline(self) -> bool:
        """Whether partitions run at the same time."""
        return self.kind != "plain"

    @property
    def process_per_device(self) -> bool:
        """Whether each device of the pipeline has a process of its own."""
        return self.kind in {"distributed", "pipelining"}

    @property
    def v_shaped(self) -> bool:
        """Whether the second partitions lie on the devices in reversed order, so the last device has two neighbours."""
        return self.option in {"zb_v", "ScheduleZBVZeroBubble"}

    def runs(self, workload: str) -> bool:
        """Whether it takes part."""
        return not self.only or (self.only == "cells") == (workload == "cells")


def _networks(name: str, kind: str, option: str, package: str = "gpipe_bench", *, two: bool = False) -> Contender:
    return Contender(name, kind, option, package, only="networks", two_per_device=two)


_ALL: Final = (
    Contender("engine-autograd", "engine"),
    Contender("engine-scheduled", "engine", "gpipe"),
    Contender("engine-autograd-one-thread", "engine", only="cells"),
    Contender("engine-scheduled-one-thread", "engine", "gpipe", only="cells"),
    _networks("engine-step-gpipe", "engine", "gpipe"),
    _networks("engine-1f1b", "engine", "1f1b"),
    _networks("engine-interleaved", "engine", "interleaved", two=True),
    _networks("engine-zb-h1", "engine", "zb_h1"),
    Contender("torchgpipe", "torchgpipe", package="torchgpipe", version="0.0.7"),
    Contender("fairscale", "torchgpipe", package="fairscale", version="0.4.13"),
    Contender("distributed-gpipe", "distributed", "gpipe"),
    Contender("distributed-1f1b", "distributed", "1f1b"),
    _networks("distributed-interleaved", "distributed", "interleaved", two=True),
    Contender("distributed-zb-h1", "distributed", "zb_h1"),
    _networks("distributed-zb-v", "distributed", "zb_v", two=True),
    Contender("pipelining-gpipe", "pipelining", "ScheduleGPipe", "torch"),
    Contender("pipelining-1f1b", "pipelining", "Schedule1F1B", "torch"),
    _networks("pipelining-interleaved", "pipelining", "ScheduleInterleaved1F1B", "torch", two=True),
    _networks("pipelining-zero-bubble", "pipelining", "ScheduleInterleavedZeroBubble", "torch", two=True),
    _networks("pipelining-zb-v", "pipelining", "ScheduleZBVZeroBubble", "torch", two=True),
    Contender("plain", "plain", "whole", "torch"),
    Contender("plain-threads", "plain", "whole", "torch", all_threads=True),
    Contender("loop", "plain", "loop", "torch"),
    Contender("loop-threads", "plain", "loop", "torch", all_threads=True),
    _networks("loop-processes", "plain", "loops", "torch"),
)
CONTENDERS: Final = {contender.name: contender for contender in _ALL}
REFERENCE: Final = "plain"
"""Whose gradients the others' are compared with."""


def contenders_of(names: Sequence[str]) -> list[Contender]:
    """The contenders of ``names``, in the order of the table; ``all`` stands for every one.

    Raises:
        ConfigError: names of none; all of them.
    """
    known = ["all", *CONTENDERS]
    unknown = [name for name in names if name not in known]
    if unknown:
        rule = f"contender must be one of {', '.join(known)}"
        raise ConfigError([f"{rule}, got {name!r}; {nearest(name, known)}" for name in unknown])
    return [contender for name, contender in CONTENDERS.items() if name in names or "all" in names]
