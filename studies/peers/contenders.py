"""Who takes part in the race, by name; the adapters of ``gpipe-bench judge`` build them. Imports no PyTorch.

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
        engine: of the judge, ``NAME:SCHEDULE``; or ``loop``, or ``loops`` in processes, which the race has itself.
        package: what has to be installed for it.
        version: the version of it that the race is made for; empty for one that is part of PyTorch or of this project.
        only: ``cells`` or ``networks`` where it takes part in no other workload.
        called: whether a step is ``pipe(x)`` and ``loss.backward()`` though the engine has one call for both.
        two_per_device: whether each device has two partitions.
        all_threads: whether operators may use every core; otherwise one thread each.
    """

    name: str
    engine: str
    package: str = "gpipe_bench"
    version: str = ""
    only: str = ""
    called: bool = False
    two_per_device: bool = False
    all_threads: bool = False

    @property
    def kind(self) -> str:
        """The engine without its schedule."""
        return self.engine.partition(":")[0]

    @property
    def pipeline(self) -> bool:
        """Whether partitions run at the same time."""
        return self.kind not in {"plain", "loop", "loops"}

    @property
    def process_per_device(self) -> bool:
        """Whether each device of the pipeline has a process of its own."""
        return self.kind in {"gpipe_bench_processes", "pipelining"}

    def runs(self, workload: str) -> bool:
        """Whether it takes part."""
        return not self.only or (self.only == "cells") == (workload == "cells")


def _networks(name: str, engine: str, package: str = "gpipe_bench", *, two: bool = False) -> Contender:
    return Contender(name, engine, package, only="networks", two_per_device=two)


_ALL: Final = (
    Contender("engine-autograd", "gpipe_bench", called=True),
    Contender("engine-scheduled", "gpipe_bench:gpipe", called=True),
    Contender("engine-autograd-one-thread", "gpipe_bench:,never", only="cells", called=True),
    Contender("engine-scheduled-one-thread", "gpipe_bench:gpipe,never", only="cells", called=True),
    _networks("engine-step-gpipe", "gpipe_bench:gpipe"),
    _networks("engine-1f1b", "gpipe_bench:1f1b"),
    _networks("engine-interleaved", "gpipe_bench:interleaved", two=True),
    _networks("engine-zb-h1", "gpipe_bench:zb_h1"),
    Contender("torchgpipe", "torchgpipe", "torchgpipe", version="0.0.7"),
    Contender("fairscale", "fairscale", "fairscale", version="0.4.13"),
    Contender("distributed-gpipe", "gpipe_bench_processes:gpipe"),
    Contender("distributed-1f1b", "gpipe_bench_processes:1f1b"),
    _networks("distributed-interleaved", "gpipe_bench_processes:interleaved", two=True),
    Contender("distributed-zb-h1", "gpipe_bench_processes:zb_h1"),
    _networks("distributed-zb-v", "gpipe_bench_processes:zb_v", two=True),
    Contender("pipelining-gpipe", "pipelining:gpipe", "torch"),
    Contender("pipelining-1f1b", "pipelining:1f1b", "torch"),
    _networks("pipelining-interleaved", "pipelining:interleaved", "torch", two=True),
    _networks("pipelining-zero-bubble", "pipelining:interleaved_zb", "torch", two=True),
    _networks("pipelining-zb-v", "pipelining:zb_v", "torch", two=True),
    Contender("plain", "plain", "torch"),
    Contender("plain-threads", "plain", "torch", all_threads=True),
    Contender("loop", "loop", "torch"),
    Contender("loop-threads", "loop", "torch", all_threads=True),
    _networks("loop-processes", "loops", "torch"),
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
