"""Who takes part in the race. Imports no PyTorch.

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
from gpipe_bench.models.arguments import nearest


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run a model.

    Attributes:
        name: in rows and figures.
        kind: who builds it: engine, rival, distributed, pipelining, plain or loops.
        package: what has to be installed for it.
        version: the version of it that the race is made for; empty for one that is part of PyTorch or of this project.
        option: what tells contenders of one kind apart; of a pipeline its schedule.
        all_threads: whether operators may use every core; otherwise one thread each.
        one_call: whether the engine runs forward and backward pass in one call, ``step``.
        two_per_device: whether each device has two partitions.
        v_shaped: whether the second partitions lie on the devices in reversed order, so that the last device has two
            neighbours.
        one_thread: whether the engine runs all partitions in the calling thread.
        only: ``cells`` or ``networks`` where it takes part in no other workload.
    """

    name: str
    kind: str
    package: str
    version: str = ""
    option: str = ""
    all_threads: bool = False
    one_call: bool = False
    two_per_device: bool = False
    v_shaped: bool = False
    one_thread: bool = False
    only: str = ""

    @property
    def pipeline(self) -> bool:
        """Whether partitions run at the same time."""
        return self.kind not in {"plain", "loops"}

    @property
    def process_per_device(self) -> bool:
        """Whether each device of the pipeline has a process of its own."""
        return self.kind in {"distributed", "pipelining"}

    def runs(self, workload: str) -> bool:
        """Whether it takes part.

        Combinations of components concern the paper's executor, its baseline and the reference.
        """
        if workload == "combinations":
            return self.name in {"engine-autograd", BASELINES[0], REFERENCE}
        return not self.only or (self.only == "cells") == (workload == "cells")

    def missing(self) -> str:
        """How to install what it needs."""
        return f"{self.package} is not installed; make peers, or pip install --no-deps {self.package}=={self.version}"


CONTENDERS: Final = {
    contender.name: contender
    for contender in (
        Contender("engine-autograd", "engine", "gpipe_bench"),
        Contender("engine-scheduled", "engine", "gpipe_bench", option="gpipe"),
        Contender("engine-autograd-one-thread", "engine", "gpipe_bench", one_thread=True, only="cells"),
        Contender(
            "engine-scheduled-one-thread", "engine", "gpipe_bench", option="gpipe", one_thread=True, only="cells"
        ),
        Contender("engine-step-gpipe", "engine", "gpipe_bench", option="gpipe", one_call=True, only="networks"),
        Contender("engine-1f1b", "engine", "gpipe_bench", option="1f1b", one_call=True, only="networks"),
        Contender(
            *("engine-interleaved", "engine", "gpipe_bench"),
            option="interleaved",
            one_call=True,
            only="networks",
            two_per_device=True,
        ),
        Contender("engine-zb-h1", "engine", "gpipe_bench", option="zb_h1", one_call=True, only="networks"),
        Contender("torchgpipe", "rival", "torchgpipe", "0.0.7"),
        Contender("fairscale", "rival", "fairscale", "0.4.13"),
        Contender("distributed-gpipe", "distributed", "gpipe_bench", option="gpipe"),
        Contender("distributed-1f1b", "distributed", "gpipe_bench", option="1f1b"),
        Contender(
            *("distributed-interleaved", "distributed", "gpipe_bench"),
            option="interleaved",
            only="networks",
            two_per_device=True,
        ),
        Contender("distributed-zb-h1", "distributed", "gpipe_bench", option="zb_h1"),
        Contender(
            *("distributed-zb-v", "distributed", "gpipe_bench"),
            option="zb_v",
            only="networks",
            two_per_device=True,
            v_shaped=True,
        ),
        Contender("pipelining-gpipe", "pipelining", "torch", option="ScheduleGPipe"),
        Contender("pipelining-1f1b", "pipelining", "torch", option="Schedule1F1B"),
        Contender(
            *("pipelining-interleaved", "pipelining", "torch"),
            option="ScheduleInterleaved1F1B",
            only="networks",
            two_per_device=True,
        ),
        Contender(
            *("pipelining-zero-bubble", "pipelining", "torch"),
            option="ScheduleInterleavedZeroBubble",
            only="networks",
            two_per_device=True,
        ),
        Contender(
            *("pipelining-zb-v", "pipelining", "torch"),
            option="ScheduleZBVZeroBubble",
            only="networks",
            two_per_device=True,
            v_shaped=True,
        ),
        Contender("plain", "plain", "torch", option="whole"),
        Contender("plain-threads", "plain", "torch", option="whole", all_threads=True),
        Contender("loop", "plain", "torch", option="loop"),
        Contender("loop-threads", "plain", "torch", option="loop", all_threads=True),
        Contender("loop-processes", "loops", "torch", only="networks"),
    )
}
REFERENCE: Final = "plain"
"""Whose gradients the others' are compared with."""

BASELINES: Final = ("torchgpipe", "loop", "pipelining-gpipe")
"""What the table of ratios refers to."""


def contenders_of(names: Sequence[str]) -> list[Contender]:
    """The contenders of ``names``, in the order of the table; ``all`` stands for every one.

    Raises:
        ConfigError: names of none; all of them.
    """
    unknown = [name for name in names if name not in CONTENDERS and name != "all"]
    if unknown or not names:
        known = ["all", *CONTENDERS]
        got = [(repr(name), nearest(name, known)) for name in unknown] or [("none", "name one")]
        raise ConfigError([f"contender must be one of {', '.join(known)}, got {name}; {hint}" for name, hint in got])
    return [contender for name, contender in CONTENDERS.items() if name in names or "all" in names]
