"""Faults of public reports, each planted in the reference by a few lines.

A fault names the report in which somebody met its kind, and how much of that report was read. Behaviours of ``must``
catch it, those of ``must_not`` do not see it: a fault that every behaviour catches may be planted wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpipe_bench.judge.reference import Cell, Message, Pipeline, flat, packed
from gpipe_bench.schedules import Action


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
    """

    report: str
    read: Literal["opening", "excerpt"]
    says: str
    kind: type[Pipeline]
    must: tuple[str, ...]
    must_not: tuple[str, ...]
    schedule: str


FAULTS: dict[str, Fault] = {}
"""The faults, by the names of their classes."""


def fault(  # noqa: PLR0917 - reads as a row of a table
    report: str, read: Literal["opening", "excerpt"], says: str, must: str, must_not: str, schedule: str = "1f1b"
) -> Callable[[type[Pipeline]], type[Pipeline]]:
    """Keep a class as a fault; names of behaviours are separated by commas."""

    def keep(kind: type[Pipeline]) -> type[Pipeline]:
        FAULTS[kind.__name__] = Fault(report, read, says, kind, _names(must), _names(must_not), schedule)
        return kind

    return keep


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


# --- losses ----------------------------------------------------------------------------------------------------------
@fault("pytorch/torchtitan#2972", "excerpt", "the loss is divided after the backward pass only", "chain, labels", "sum")
class NeverDivided(Pipeline):
    """Only the loss that is reported is a mean."""

    def shares_of(self, parts: Sequence[list[Any]], reduction: Any) -> list[float]:
        """1 for each."""
        self.whole = 1 if reduction == "sum" else self.m
        shares = super().shares_of(parts, reduction)
        return shares if reduction == "sum" else [1.0 if share else 0.0 for share in shares]

    def step(self, *given: Any) -> Tensor:
        """The loss, divided too late."""
        return super().step(*given) / self.whole


@fault("pytorch/torchtitan#1733", "excerpt", "each step divides all gradients, those of earlier steps, too",
       "accumulate", "chain, sum, optimizer")  # fmt: skip
class DividesSums(Pipeline):
    """Divides ``.grad`` by m at the end of each step."""

    def step(self, *given: Any) -> Tensor:
        """The loss of a step that ends in a division."""
        loss = super().step(*given)
        for weight in self.model.parameters():
            if weight.grad is not None:
                weight.grad /= self.m
        return loss / self.m

    def shares_of(self, parts: Sequence[list[Any]], reduction: Any) -> list[float]:
        """Without the division by m."""
        return [share * self.m for share in super().shares_of(parts, reduction)]


# --- gradients -------------------------------------------------------------------------------------------------------
@fault("NVIDIA-NeMo/Automodel#3530", "excerpt", "a change of shape clears the gradients of earlier steps",
       "shapes", "chain, accumulate, optimizer")  # fmt: skip
class ClearedByShape(Pipeline):
    """Starts anew for each shape."""

    shape: Any = None

    def start(self, x: Any, *given: Any) -> None:
        """Clear gradients if the shape is another one."""
        if self.shape not in (None, flat(x)[0].shape):
            self.model.zero_grad()
        self.shape = flat(x)[0].shape
        super().start(x, *given)


@fault("uw-syfi/piper#13", "excerpt", "each stage has a copy of a tied weight, and nobody adds their gradients",
       "tied", "chain, skips, optimizer")  # fmt: skip
class TiedApart(Pipeline):
    """Gives later stages weights of their own."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        first: dict[int, int] = {}
        for j, stage in enumerate(self.stages):
            for module in stage.modules():
                for name, weight in list(module.named_parameters(recurse=False)):
                    if first.setdefault(id(weight), j) != j:
                        setattr(module, name, nn.Parameter(weight.detach().clone()))


class _MustSend(Cell):
    def backward_inputs(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        found = super().backward_inputs(grads)
        if any(
            isinstance(x, Tensor) and x.requires_grad and g is None for x, g in zip(self.inputs, found, strict=True)
        ):
            raise RuntimeError("expecting to send gradients, got None")
        return found


@fault("pytorch/pytorch#152827", "excerpt", "an input without a gradient is an error", "beside", "chain, skips, frozen")
class MustSend(Pipeline):
    """Refuses a gradient that is None."""

    cell_type = _MustSend


class _CountedTwice(Cell):
    def backward_weights(self) -> None:
        self.weights *= 2
        super().backward_weights()


@fault("pytorch/pytorch#180952", "excerpt", "W adds the gradient of a weight twice",
       "chain, optimizer", "generator, passes", "zb_h1")  # fmt: skip
class CountedTwice(Pipeline):
    """Adds each gradient twice."""

    cell_type = _CountedTwice


# --- norms -----------------------------------------------------------------------------------------------------------
@fault("pytorch/torchtitan#596", "opening", "each stage clips by its own norm", "norm", "chain, optimizer")
class NormOfStage(Pipeline):
    """Clips stage by stage."""

    def clip(self, max_norm: float) -> Tensor:
        """The norm of the last stage."""
        return [nn.utils.clip_grad_norm_(stage.parameters(), max_norm) for stage in self.stages][-1]


@fault("pytorch/torchtitan#4312", "excerpt", "the norm is that of the norms of the stages: other last bits",
       "norm to the bit", "chain, norm")  # fmt: skip
class NormOfNorms(Pipeline):
    """Adds the squares of the norms of the stages."""

    def clip(self, max_norm: float) -> Tensor:
        """The root of their sum."""
        grads = [[weight.grad for weight in stage.parameters() if weight.grad is not None] for stage in self.stages]
        total = torch.stack([nn.utils.get_total_norm(each) ** 2 for each in grads]).sum().sqrt()
        nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, total)
        return total


# --- checkpoints -----------------------------------------------------------------------------------------------------
class _OtherMasks(Cell):
    def recompute(self) -> None:
        self.found = torch.get_rng_state(), self.found[1]
        super().recompute()


@fault("openai/guided-diffusion#167", "opening", "the recomputation draws other dropout masks",
       "masks again, late masks", "chain, own masks, batch norm")  # fmt: skip
class OtherMasks(Pipeline):
    """Does not bring back the generator."""

    cell_type = _OtherMasks


class _StatisticsTwice(Cell):
    def recompute(self) -> None:
        generator = torch.get_rng_state()
        torch.set_rng_state(self.found[0])
        self.run()
        torch.set_rng_state(generator)


@fault("gpleiss/efficient_densenet_pytorch#73", "opening", "the recomputation updates running statistics once more",
       "batch norm", "chain, masks again")  # fmt: skip
class StatisticsTwice(Pipeline):
    """Does not bring back buffers."""

    cell_type = _StatisticsTwice


class _NothingFromNothing(Cell):
    def recompute(self) -> None:
        super().recompute()
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in self.leaves):
            self.outputs = [out.detach() if isinstance(out, Tensor) else out for out in self.outputs]


@fault("bitsandbytes-foundation/bitsandbytes#182", "opening", "a checkpoint whose inputs need no gradient gives none",
       "chain, skips, masks again", "norm to the bit, own masks")  # fmt: skip
class NothingFromNothing(Pipeline):
    """A checkpoint has a gradient only if its inputs have one."""

    cell_type = _NothingFromNothing


# --- messages --------------------------------------------------------------------------------------------------------
class _FreedEarly(dict[Message, Any]):
    def __setitem__(self, name: Message, value: Any) -> None:
        for tensor in self.get((name[0], name[1] - 1, *name[2:])) or ():
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.data = torch.full_like(tensor, float("nan"))
        super().__setitem__(name, value)


@fault("NVIDIA/Megatron-LM#4047", "opening", "memory of an output is given away before it was sent",
       "evaluation, tuples", "norm to the bit", "gpipe")  # fmt: skip
class Freed(Pipeline):
    """Gives away the memory of a message when the next one is sent."""

    sent_type = _FreedEarly


@fault("pytorch/pytorch#152938", "opening", "of the messages that leave together, the last alone arrives",
       "skips, skip and next", "chain, tuples, evaluation")  # fmt: skip
class OneOfMany(Pipeline):
    """Waits for a message that was dropped."""

    def forward(self, i: int, j: int, inputs: list[Any]) -> None:
        """Drop the skips."""
        super().forward(i, j, inputs)
        for key, reader in self.stages[j].gives:
            del self.sent["skip", i, reader, key, reader]


# --- batches ---------------------------------------------------------------------------------------------------------
@fault("pytorch/pytorch#162822", "opening", "an evaluation before training leaves stages without backward",
       "evaluation", "chain, optimizer")  # fmt: skip
class EvaluationStays(Pipeline):
    """The first batch decides whether stages can run backward."""

    learns: bool | None = None

    def start(self, *given: Any) -> None:
        """Decide once."""
        super().start(*given)
        self.learns = self.loss is not None if self.learns is None else self.learns

    def do(self, action: Action) -> None:
        """Refuse what was not prepared."""
        if action.kind != "F" and not self.learns:
            raise RuntimeError("the backward pass was not initialised")
        super().do(action)


@fault("deepspeedai/DeepSpeed#8347", "excerpt", "the last sample is never in a micro-batch",
       "uneven", "few, norm to the bit")  # fmt: skip
class RowsLost(Pipeline):
    """Leaves out rows that do not fill a micro-batch."""

    def start(self, x: Any, target: Any, *given: Any) -> None:
        """Cut off the rest of the batch."""
        rows = len(flat(x)[0])
        rows = rows // self.chunks * self.chunks or rows
        whole = packed([value[:rows] for value in flat(x)])
        super().start(whole, None if target is None else target[:rows], *given)
