"""Faults of public reports, each planted in the reference by a few lines.

A fault names the report in which somebody met its kind, how much of that report was read, and where what is planted
differs from it: :data:`NEAR`. Behaviours of ``must`` catch the fault, those of ``must_not`` do not see it: a fault that
every behaviour catches may be planted wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from gpipe_bench.judge.reference import Pipeline


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted fault.

    Attributes:
        report: ``owner/repository#number``.
        read: ``opening`` if its first post was read to its end, ``excerpt`` if a part of it.
        says: what the fault does.
        kind: the reference with the fault.
        must: behaviours that catch it.
        must_not: behaviours that do not.
        schedule: under which it is planted.
        near: how the report differs from what is planted; empty if it describes the same.
    """

    report: str
    read: Literal["opening", "excerpt"]
    says: str
    kind: type[Pipeline]
    must: tuple[str, ...]
    must_not: tuple[str, ...]
    schedule: str
    near: str


NEAR: Final = {
    "pytorch/pytorch#180952": "both uses of the weight are in one stage, one behind the other",
    "pytorch/pytorch#175705": "the outputs are those of a node within a stage, where W begins",
    "axolotl-ai-cloud/axolotl#3892": "a review of a kernel warns of a second backward pass; nobody ran one",
    "deepspeedai/DeepSpeed#2800": "what is overwritten is a gradient that was not sent yet",
    "deepspeedai/DeepSpeed#8347": "the last sample of a data set is left out, not that of a batch",
    "pytorch/pytorch#165539": "the messages are those that set up connections",
    "pytorch/pytorch#172668": "the two sends are of one pair of ranks, whose receives stand behind them",
    "NVIDIA/DALI#2380": "the pipeline loads data",
    "epfLLM/Megatron-LLM#33": "NaN reached the loss, and the counter of such steps stayed at 0",
    "NVIDIA/Megatron-LM#7186": "the gradients are cleared in a buffer that several replicas share",
    "NVIDIA/TransformerEngine#787": "autocast of one type is lost within that of another",
    "alpa-projects/alpa#268": "asks for the sums that the engine lacks",
}
"""What a report describes, where a fault is near to it but not the same. Of the other reports, the part that was read
describes what is planted."""

FAULTS: dict[str, Fault] = {}
"""The faults, by the names of their classes."""


def fault(  # noqa: PLR0917 - reads as a row of a table
    report: str, read: Literal["opening", "excerpt"], says: str, must: str, must_not: str, schedule: str = "1f1b"
) -> Callable[[type[Pipeline]], type[Pipeline]]:
    """Keep a class as a fault; names of behaviours are separated by commas."""

    def keep(kind: type[Pipeline]) -> type[Pipeline]:
        FAULTS[kind.__name__] = Fault(
            report, read, says, kind, _names(must), _names(must_not), schedule, NEAR.get(report, "")
        )
        return kind

    return keep


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))
