"""Faults of losses, gradients and norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.judge.planted import fault
from gpipe_bench.judge.reference import Cell, Pipeline, flat
from gpipe_bench.schedules import Action


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


@fault("areal-project/AReaL#1273", "excerpt", "a loss that is divided already is divided by m once more",
       "chain, labels", "norm to the bit, own masks, passes")  # fmt: skip
class DividedTwice(Pipeline):
    """Divides where its user has done so."""

    def shares_of(self, *given: Any) -> list[float]:
        """Too small by m."""
        return [share / self.m for share in super().shares_of(*given)]


@fault("huggingface/transformers#24725", "opening", "a mean over labels becomes a mean of the means of micro-batches",
       "labels, no labels", "chain, sum, uneven")  # fmt: skip
class MeanOfMeans(Pipeline):
    """Takes all micro-batches for equal."""

    def shares_of(self, parts: Sequence[list[Any]], reduction: Any) -> list[float]:
        """1 / m for each."""
        return [1 / self.m] * self.m if callable(reduction) else super().shares_of(parts, reduction)


@fault("karpathy/nanochat#623", "opening", "a micro-batch without labels has the loss 0 / 0",
       "labels, no labels", "chain, sum, uneven")  # fmt: skip
class NothingByNothing(Pipeline):
    """NaN for nothing."""

    def shares_of(self, *given: Any) -> list[float]:
        """NaN for 0."""
        return [share or float("nan") for share in super().shares_of(*given)]


@fault(
    "alpa-projects/alpa#268",
    "opening",
    "the loss is taken for a mean where it is a sum",
    "sum",
    "chain, labels, uneven",
)
class SumsDivided(Pipeline):
    """Always takes the mean."""

    def shares_of(self, parts: Sequence[list[Any]], reduction: Any) -> list[float]:
        """1 / m for sums."""
        return [1 / self.m] * self.m if reduction == "sum" else super().shares_of(parts, reduction)


@fault("karpathy/autoresearch#357", "opening", "the loss that is reported is that of the last micro-batch",
       "chain, uneven", "norm to the bit, passes, batch norm")  # fmt: skip
class LossOfLast(Pipeline):
    """Overwrites the loss."""

    def step(self, *given: Any) -> Tensor:
        """The last loss for all."""
        super().step(*given)
        return self.losses[-1] * self.m


@fault("deepspeedai/DeepSpeed#3900", "opening", "micro-batches share one place for the loss, filled m times",
       "chain, accumulate", "norm to the bit, passes, generator", "gpipe")  # fmt: skip
class OnePlace(Pipeline):
    """The backward pass of each micro-batch begins at the loss of the last one."""

    def end(self, i: int, outputs: list[Any]) -> None:
        """Overwrite what waits."""
        super().end(i, outputs)
        waiting = [name for name in self.sent if name[0] == "gradients" and name[2] == self.n - 1]
        for name in waiting:
            self.sent[name] = self.sent["gradients", i, self.n - 1]


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
        self.weights += [pair for pair in self.weights if id(pair[0]) in self.stage.shared]  # type: ignore[operator]
        super().backward_weights()


@fault("pytorch/pytorch#180952", "excerpt", "W adds the gradient of a weight with two uses twice",
       "tied", "chain, optimizer, skips", "zb_h1")  # fmt: skip
class CountedTwice(Pipeline):
    """Adds gradients of tied weights twice. The report has both uses in one stage; here they may be in two."""

    cell_type = _CountedTwice

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        uses = [id(weight) for stage in self.stages for weight in stage.parameters()]
        for stage in self.stages:
            stage.shared = {use for use in uses if uses.count(use) > 1}  # type: ignore[assignment]


class _LastAlone(Cell):
    def backward_weights(self) -> None:
        for weight, _ in self.weights:
            weight.grad = None
        super().backward_weights()


@fault("NVIDIA/Megatron-LM#7186", "excerpt", "each backward pass clears gradients: the last micro-batch alone trains",
       "chain, accumulate", "norm to the bit, generator, own masks")  # fmt: skip
class LastAlone(Pipeline):
    """Clears too often."""

    cell_type = _LastAlone


@fault("pytorch/pytorch#28294", "opening", "weights without use get zeros, so the optimizer's decay moves them",
       "unused", "chain, optimizer, tied")  # fmt: skip
class Zeros(Pipeline):
    """Leaves no gradient None."""

    def step(self, *given: Any) -> Tensor:
        """The loss of a step that fills in gradients."""
        loss = super().step(*given)
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        return loss


@fault("pytorch/pytorch#164777", "opening", "gradients of weights from W have another scale than those from B",
       "chain, norm", "norm to the bit, passes", "zb_h1")  # fmt: skip
class WeightsScaled(Pipeline):
    """Divides by m in W."""

    def do(self, action: Action) -> None:
        """Divide first."""
        if action.kind == "W":
            cell = self.cells[action.i, action.j]
            cell.weights = [(weight, grad / self.m) for weight, grad in cell.weights]
        super().do(action)


class _SumOfOutputs(Cell):
    def backward_inputs(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        found = [grad for grad in grads if grad is not None]
        if len(found) > 1:
            grads = [torch.stack(found).sum(0), *(torch.zeros_like(grad) for grad in found[1:])]
        return super().backward_inputs(grads)


@fault("pytorch/pytorch#175705", "excerpt", "gradients of all outputs are added up and given to the first",
       "skips", "chain, tied, skip and next")  # fmt: skip
class SumOfOutputs(Pipeline):
    """Loses which output a gradient belongs to."""

    cell_type = _SumOfOutputs


class _NoHooks(Cell):
    def backward_weights(self) -> None:
        for weight, grad in self.weights:
            if weight.grad is None:
                weight.grad = grad.clone()
            else:
                weight.grad += grad


@fault("pytorch/pytorch#144530", "opening", "I and W call no hooks of parameters", "hooks",
       "chain, accumulate, flat gradients", "zb_h1")  # fmt: skip
class NoHooks(Pipeline):
    """Adds gradients by hand."""

    cell_type = _NoHooks


class _Replaced(Cell):
    def backward_weights(self) -> None:
        for weight, grad in self.weights:
            weight.grad = grad if weight.grad is None else weight.grad + grad


@fault("facebookresearch/fairscale#354", "opening", "gradients are no longer views of the buffers that they were in",
       "flat gradients", "chain, accumulate, optimizer")  # fmt: skip
class Replaced(Pipeline):
    """Makes new gradients instead of adding in place."""

    cell_type = _Replaced


class _BackwardTwice(Cell):
    def backward_inputs(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        if self.checkpoint:
            self.recompute()
            self.checkpoint = False
        pairs = [(end, grad) for end, grad in zip(self.outputs, grads, strict=True) if grad is not None]
        pairs = [(end, grad) for end, grad in pairs if end.requires_grad]
        starts = [weight for weight in self.stage.parameters() if weight.requires_grad]
        if pairs and starts:
            ends, given = zip(*pairs, strict=True)
            torch.autograd.grad(ends, starts, given, retain_graph=True, allow_unused=True)
        return super().backward_inputs(grads)


@fault("axolotl-ai-cloud/axolotl#3892", "excerpt", "a graph runs twice, whose functions write to what they get",
       "writes gradient, main_grad, backward order", "chain, frozen, skips")  # fmt: skip
class BackwardTwice(Pipeline):
    """Runs backward once more than needed."""

    cell_type = _BackwardTwice


class _NanHidden(Cell):
    def backward_weights(self) -> None:
        self.weights = [(weight, grad.nan_to_num()) for weight, grad in self.weights]
        super().backward_weights()


@fault(
    "epfLLM/Megatron-LLM#33",
    "excerpt",
    "NaN is not noticed, and training goes on",
    "nan",
    "chain, sum, norm to the bit",
)
class NanHidden(Pipeline):
    """Takes NaN for 0."""

    cell_type = _NanHidden


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
