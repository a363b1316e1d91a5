"""Faults of checkpoints, messages, memory and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.judge.planted import fault
from gpipe_bench.judge.reference import Cell, Message, Pipeline, detached, flat, packed
from gpipe_bench.schedules import Action


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
       "batch norm, spectral norm", "chain, masks again")  # fmt: skip
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


class _OutsideAutocast(Cell):
    def recompute(self) -> None:
        with torch.autocast("cpu", enabled=False):
            super().recompute()


@fault("NVIDIA/TransformerEngine#787", "excerpt", "the recomputation runs outside of autocast",
       "autocast", "chain, masks again, passes")  # fmt: skip
class OutsideAutocast(Pipeline):
    """Forgets autocast for the backward pass."""

    cell_type = _OutsideAutocast


class _NoAutocast(Cell):
    def run(self) -> list[Any]:
        with torch.autocast("cpu", enabled=False):
            return super().run()


@fault("pytorch/pytorch#116183", "excerpt", "autocast does not reach the layers", "autocast", "chain, tuples, float16")
class NoAutocast(Pipeline):
    """Runs layers as a thread does that knows nothing of autocast."""

    cell_type = _NoAutocast


@fault("deepspeedai/Megatron-DeepSpeed#243", "opening", "recomputation is asked for and does not happen",
       "passes, memory", "chain, masks again, batch norm")  # fmt: skip
class NoCheckpoint(Pipeline):
    """Ignores its argument."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.checkpoint = "never"


class _Reentrant(Cell):
    def recompute(self) -> None:
        if any(isinstance(value, Tensor) and value.requires_grad for value in map(detached, self.inputs)):
            raise RuntimeError("this checkpoint is incompatible with .grad()")
        super().recompute()


@fault("NVIDIA-NeMo/Automodel#3257", "excerpt", "checkpoints refuse a backward pass that asks for gradients of inputs",
       "chain, masks again", "norm to the bit")  # fmt: skip
class Reentrant(Pipeline):
    """Has checkpoints for whole backward passes only."""

    cell_type = _Reentrant


class _KeepsFirst(Cell):
    def run(self) -> list[Any]:
        outputs = super().run()
        self.kept: list[Any] = [*getattr(self, "kept", []), list(outputs)]
        return outputs


@fault("pytorch/pytorch#136766", "opening", "the graph of a checkpoint's first pass lives on until W",
       "memory", "chain, passes, masks again", "zb_h1")  # fmt: skip
class KeepsGraphs(Pipeline):
    """Keeps two graphs of each cell."""

    cell_type = _KeepsFirst


@fault("pytorch/pytorch#128910", "opening", "activations of all micro-batches are kept until the step ends",
       "memory", "chain, passes, masks again")  # fmt: skip
class KeepsAll(Pipeline):
    """Keeps cells after their backward pass."""

    cell_type = _KeepsFirst

    def start(self, *given: Any) -> None:
        """Forget the cells of the step before."""
        self.done: list[Cell] = []
        super().start(*given)

    def do(self, action: Action) -> None:
        """Keep the cell."""
        if action.kind == "B":
            self.done.append(self.cells[action.i, action.j])
        super().do(action)


class _SameSeed(Cell):
    def run(self) -> list[Any]:
        torch.manual_seed(0)
        return super().run()


@fault("PaddlePaddle/Paddle#7796", "opening", "dropout has the same seed each time",
       "own masks, seeds", "chain, masks again, batch norm")  # fmt: skip
class SameSeed(Pipeline):
    """Draws the same masks for all micro-batches."""

    cell_type = _SameSeed


class _OnlyFloats(Cell):
    def run(self) -> list[Any]:
        for value in self.inputs:
            if isinstance(value, Tensor):
                value.detach().requires_grad_()
        return super().run()


@fault("pytorch/PiPPy#257", "excerpt", "integers are asked for a gradient", "tuples", "chain, beside, none")
class OnlyFloats(Pipeline):
    """Takes all values for floats."""

    cell_type = _OnlyFloats


class _FrozenOutputs(Cell):
    def backward_inputs(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        found = super().backward_inputs(grads)
        if not all(out.requires_grad for out in self.outputs if isinstance(out, Tensor)):
            raise RuntimeError("element 1 of tensors does not require grad and does not have a grad_fn")
        return found


@fault("tdrussell/qlora-pipe#56", "opening", "backward runs from outputs that need no gradient, too",
       "tuples, frozen", "chain, skips, tied")  # fmt: skip
class FrozenOutputs(Pipeline):
    """Takes all outputs for functions of weights."""

    cell_type = _FrozenOutputs


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


@fault("pytorch/pytorch#172668", "excerpt", "a device that has sent waits for the receiver, and so do others",
       "chain, accumulate", "norm to the bit")  # fmt: skip
class Rendezvous(Pipeline):
    """Sends block."""

    def ready(self, action: Action) -> bool:
        """Whether all that the device has sent was received, too."""
        sender = {"values": -1, "gradients": 1}
        sent = [name for name in self.sent if name[0] in sender and name[2] + sender[name[0]] == action.j]
        return super().ready(action) and not sent


@fault("pytorch/PiPPy#1064", "opening", "one micro-batch hangs", "few, norm to the bit", "chain, uneven", "gpipe")
class OneHangs(Pipeline):
    """Waits for a second micro-batch before backward."""

    def ready(self, action: Action) -> bool:
        """Never, for one micro-batch."""
        return super().ready(action) and (self.m > 1 or action.kind == "F")


@fault("pytorch/torchtitan#775", "opening", "fewer micro-batches than devices hang in the warm-up",
       "few", "chain, uneven, sum")  # fmt: skip
class WarmUp(Pipeline):
    """Warms up by as many micro-batches as there are devices."""

    def start(self, *given: Any) -> None:
        """The first device expects more micro-batches."""
        super().start(*given)
        if self.m < self.n:
            row, *others = self.lists
            self.lists = ((*row[: self.m], Action("F", self.m, 0), *row[self.m :]), *others)


@fault("pytorch/pytorch#127964", "opening", "a stage receives from its neighbours only",
       "skip and next", "chain, skips, tuples")  # fmt: skip
class Neighbours(Pipeline):
    """Sends skips to the next stage, wherever they are read."""

    def forward(self, i: int, j: int, inputs: list[Any]) -> None:
        """Send them there."""
        super().forward(i, j, inputs)
        for key, reader in self.stages[j].gives:
            self.sent["skip", i, j + 1, key, j + 1] = self.sent.pop(("skip", i, reader, key, reader))


@fault("pytorch/pytorch#53437", "opening", "values between stages must be tensors", "none", "chain, tuples, skips")
class OnlyTensors(Pipeline):
    """Refuses None."""

    def forward(self, i: int, j: int, inputs: list[Any]) -> None:
        """Refuse."""
        if not all(isinstance(value, Tensor) for value in inputs):
            raise TypeError("expected tensors between stages")
        super().forward(i, j, inputs)


@fault("pytorch/pytorch#165539", "opening", "values arrive in another type than they were sent in",
       "float16", "chain, tuples, skips")  # fmt: skip
class OtherType(Pipeline):
    """Receives float32."""

    def forward(self, i: int, j: int, inputs: list[Any]) -> None:
        """Half precision becomes single."""
        half = torch.float16
        received = [v.float() if j and isinstance(v, Tensor) and v.dtype is half else v for v in inputs]
        super().forward(i, j, received)


@fault("deepspeedai/DeepSpeed#2800", "excerpt", "what arrives overwrites what the backward pass before needs still",
       "chain, accumulate", "norm to the bit, passes, own masks", "gpipe")  # fmt: skip
class Overwritten(Pipeline):
    """Has one receive buffer per stage."""

    def forward(self, i: int, j: int, inputs: list[Any]) -> None:
        """Write over the inputs before."""
        before = self.cells.get((i - 1, j))
        for old, new in zip(before.inputs, inputs, strict=True) if j and before else ():
            if isinstance(old, Tensor) and old.shape == new.shape:
                old.data.copy_(new)
        super().forward(i, j, inputs)


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


@fault("pytorch/torchtitan#1723", "opening", "all micro-batches get the mask of the first rows",
       "tuples", "chain, uneven, sum")  # fmt: skip
class FirstMask(Pipeline):
    """Cuts the first value of a batch only."""

    others: Sequence[Any] = ()

    def forward(self, i: int, j: int, inputs: list[Any]) -> None:
        """Put in the values of the first micro-batch."""
        if j == 0:
            self.others = inputs[1:] if i == 0 else self.others
            inputs = [inputs[0], *self.others]
        super().forward(i, j, inputs)


@fault("ml-explore/mlx-lm#1688", "opening", "layers are lost where stages have unequal numbers of them",
       "skips", "chain, tied, skip and next")  # fmt: skip
class LayersLost(Pipeline):
    """Cuts the model with gaps."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        for stage in self.stages:
            if len(stage) > 1:
                del stage[1]


@fault(
    "NVIDIA/DALI#2380",
    "excerpt",
    "a pipeline that has failed once fails for ever",
    "after an error",
    "chain, optimizer",
)
class FailsForEver(Pipeline):
    """Keeps its error."""

    failure: Exception | None = None

    def start(self, *given: Any) -> None:
        """Raise it again."""
        if self.failure:
            raise self.failure
        super().start(*given)

    def carry_out(self, lists: Sequence[Sequence[Action]]) -> None:
        """Note it."""
        try:
            super().carry_out(lists)
        except ArithmeticError as error:
            self.failure = error
            raise


@fault("huggingface/autotrain-advanced#877", "opening", "an error is printed, and the job goes on",
       "error in forward, error in backward", "chain, optimizer")  # fmt: skip
class GoesOn(Pipeline):
    """Swallows errors of layers."""

    def carry_out(self, lists: Sequence[Sequence[Action]]) -> None:
        """End the step early."""
        try:
            super().carry_out(lists)
        except ArithmeticError:
            self.losses.append(torch.zeros(()))
