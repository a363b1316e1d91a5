"""What a step is to minimise: the target and the loss of a batch become those of its micro-batches.

A mean over samples is the mean of the micro-batches, weighted by their sizes. ``cross_entropy`` with class indices is
no such mean: it divides by the sum of the weights of all labels that it does not ignore. So each micro-batch divides by
the sum over the batch, which is known from the targets before the step.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_bench.engine.microbatches import MicroBatches, agreed_count, count_of
from gpipe_bench.errors import ReductionWarning
from gpipe_bench.skip.trees import tree_flatten, tree_leaves, tree_unflatten

Loss = Callable[[Any, Any], Tensor]
"""(output, target) -> one number."""
Reduction = str | Callable[[Any], Any] | None
"""``mean``, ``sum``, a function from a micro-batch's target to its weight, or None: known from the loss."""

REDUCTIONS: Final = ("mean", "sum")

_OVER_LABELS: Final[dict[Any, type[nn.Module]]] = {
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.nll_loss: nn.NLLLoss,
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # since PyTorch 2.13
    _OVER_LABELS[functional.linear_cross_entropy] = nn.LinearCrossEntropyLoss
_OVER_SAMPLES: Final[dict[Any, type[nn.Module]]] = {
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.gaussian_nll_loss: nn.GaussianNLLLoss,
    functional.hinge_embedding_loss: nn.HingeEmbeddingLoss,
    functional.huber_loss: nn.HuberLoss,
    functional.kl_div: nn.KLDivLoss,
    functional.l1_loss: nn.L1Loss,
    functional.mse_loss: nn.MSELoss,
    functional.multi_margin_loss: nn.MultiMarginLoss,
    functional.multilabel_margin_loss: nn.MultiLabelMarginLoss,
    functional.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
    functional.poisson_nll_loss: nn.PoissonNLLLoss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
    functional.soft_margin_loss: nn.SoftMarginLoss,
}
_KNOWN: Final = {**_OVER_LABELS, **_OVER_SAMPLES}


class Goal(NamedTuple):
    """What a step is to minimise; see :meth:`gpipe_bench.GPipe.step`."""

    target: Any
    loss: Any
    return_output: bool = False
    reduction: Reduction = None

    def split(self, chunks: int | None, sizes: Sequence[int]) -> list[Any]:
        """The target of each micro-batch; ``chunks`` is None if they are ready-made."""
        if not callable(self.loss):
            raise TypeError(
                f"loss must be a function of (output, target), got {self.loss!r:.60}; pass one, such as mse_loss"
            )
        if chunks is None and self.target is None:
            return [None] * len(sizes)
        agreed_count({"the input": len(sizes) if chunks is None else None, "the target": count_of(self.target)})
        return self.target.values if chunks is None else split_targets(self.target, chunks, sizes)

    def shared(
        self, chunks: int | None, sizes: Sequence[int], *, learning: bool
    ) -> tuple[Any, list[Any], Sequence[float]]:
        """The loss to compute for each micro-batch, the targets of these, and by what each result is multiplied."""
        targets = self.split(chunks, sizes)
        if learning:
            check_target(targets if chunks is None else self.target)
        loss, shares = reduced(self.loss, self.reduction, self.target, targets, sizes)
        return loss, targets, shares


def check_loss(loss: Any) -> Tensor:
    """A loss of one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:60]
        raise TypeError(f"loss must give one number in a tensor, got {got}; take its mean")
    return loss.reshape(())


def check_target(target: Any) -> None:
    """Check that the losses of micro-batches, which run backward one by one, share no graph."""
    if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in tree_leaves(target)):
        raise ValueError(
            "target must have no graph where a schedule runs backward once per micro-batch, got a tensor computed from "
            "tensors that require gradients; pass target.detach(), or leave out the schedule"
        )


def split_targets(target: Any, chunks: int, sizes: Sequence[int]) -> list[Any]:
    """The target of each micro-batch.

    Tensors are split as the batch was. A list has an item per sample; a tuple or a dict has several targets. None goes
    to all micro-batches.

    Raises:
        ValueError: a tensor or a list has another batch size.
        TypeError: something else may have an item per sample, or not.
    """
    rows, ends = sum(sizes), list(accumulate(sizes))

    def is_leaf(value: Any) -> bool:
        """Also a collection that has an item per sample, or looks so."""
        if isinstance(value, tuple):
            return len(value) == rows and all(isinstance(each, tuple | dict) for each in value)
        return isinstance(value, list | deque)

    leaves, structure = tree_flatten(target, is_leaf=is_leaf)
    columns: list[Sequence[Any]] = []
    for leaf in leaves:
        is_tensor = isinstance(leaf, Tensor) and leaf.dim() > 0
        if (is_tensor or isinstance(leaf, list)) and len(leaf) != rows:
            got = f"a {'tensor' if is_tensor else 'list'} of {len(leaf)}"
            raise ValueError(f"target must have the input's batch size {rows}, got {got}; pass one batch, and several "
                             "targets in a tuple or a dict")  # fmt: skip
        if is_tensor:
            columns.append(leaf.chunk(chunks))
        elif isinstance(leaf, list):
            columns.append([leaf[end - size : end] for size, end in zip(sizes, ends, strict=True)])
        elif leaf is None:
            columns.append((None,) * len(sizes))
        else:
            raise _not_split(leaf)
    return [tree_unflatten([column[i] for column in columns], structure) for i in range(len(sizes))]


def _not_split(value: Any) -> TypeError:
    """Refuses a part of a target that is neither a tensor with a row per sample nor a list."""
    got = type(value).__name__
    if isinstance(value, tuple):
        got = f"a tuple of {len(value)} tuples or dicts for as many samples"
    elif isinstance(value, Tensor):
        got = "a tensor without rows"
    return TypeError(
        f"target must hold tensors with a row per sample, and lists with an item per sample, got {got}; pass one of "
        "these, several targets in a dict, and constants to the loss by functools.partial"
    )


def reduced(
    loss: Loss, reduction: Reduction, target: Any, targets: Sequence[Any], sizes: Sequence[int]
) -> tuple[Loss, Sequence[float]]:
    """The loss to compute for each micro-batch, and by what its result is multiplied: the products add up.

    Args:
        loss: the user's.
        reduction: how it reduces a batch; None to find out.
        target: of the batch.
        targets: of the micro-batches.
        sizes: of the micro-batches.

    Raises:
        TypeError: the loss is one of PyTorch's, and reduces nothing.
        ValueError: ``reduction`` does not exist, is not that of one of PyTorch's losses, or gives no weights; or the
            loss has ``size_average`` or ``reduce``, which PyTorch has deprecated.
    """
    if reduction is not None and not callable(reduction) and reduction not in REDUCTIONS:
        rule = "reduction must be 'mean', 'sum' or a function of a micro-batch's target that gives its weight"
        raise ValueError(f"{rule}, got {reduction!r}; use one of them")
    whole, count = sum(sizes), len(sizes)
    settings = _settings(loss)
    if settings is not None:
        _check_known(settings, reduction)
        reduction = settings["reduction"]
    # Class indices, not the probability of each class.
    are_labels = all(isinstance(each, Tensor) and not each.is_floating_point() for each in targets)
    call, shares = loss, [1.0] * count
    if count > 1 and callable(reduction):
        shares = _weighted(reduction, targets)
    elif count > 1 and settings and settings["over_labels"] and reduction == "mean" and are_labels:
        labels = torch.cat([each.flatten() for each in targets]) if isinstance(target, MicroBatches) else target
        call = _over_labels(loss, settings, labels)
    elif count > 1 and reduction != "sum":
        if reduction is None:
            _warn(loss)
        shares = [size / whole if whole else 1 / count for size in sizes]
    return call, shares


def _check_known(settings: Mapping[str, Any], reduction: Reduction) -> None:
    """Check what is given for one of PyTorch's losses against what is known of it."""
    known = settings["reduction"]
    if known == "none":
        raise TypeError("loss must give one number in a tensor, got one with reduction='none'; take its mean")
    if reduction not in (None, "mean" if known == "batchmean" else known):
        raise ValueError(f"reduction must be that of the loss, {known!r}, got {reduction!r:.60}; leave it out")


def _weighted(weight: Callable[[Any], Any], targets: Sequence[Any]) -> list[float]:
    with torch.no_grad():
        found = [weight(target) for target in targets]
    try:
        weights = [float(each) for each in found]
    except (TypeError, ValueError, RuntimeError):
        weights = []
    if not weights or not all(0 <= each < math.inf for each in weights) or sum(weights) == 0:
        raise ValueError(
            f"weights of micro-batches must be numbers of at least 0, and one of them more, got {found} from "
            f"reduction={weight!r:.60}; leave out a batch without any weight, or change the function"
        )
    return [each / sum(weights) for each in weights]


def _settings(loss: Any) -> dict[str, Any] | None:
    """How one of PyTorch's losses, or a ``partial`` of one, reduces; None for any other loss."""
    given: dict[str, Any] = {}
    while isinstance(loss, partial) and not loss.args and not isinstance(loss.func, nn.Module):
        given, loss = {**loss.keywords, **given}, loss.func
    for function, kind in _KNOWN.items():
        if isinstance(loss, nn.Module) and type(loss).forward is kind.forward:
            given = {name: getattr(loss, name, None) for name in ("reduction", "weight", "ignore_index")}
        elif loss is not function:
            continue
        for name in ("size_average", "reduce"):
            if given.get(name) is not None:
                rule = "loss must say by reduction how it reduces"
                raise ValueError(f"{rule}, got {name}={given[name]!r}; pass reduction='mean' or 'sum' to it instead")
        defaults = {"reduction": "mean", "weight": None}
        return {**defaults, **given, "over_labels": function in _OVER_LABELS}
    return None


def _over_labels(loss: Any, settings: Mapping[str, Any], labels: Tensor) -> Loss:
    """A loss whose results for the micro-batches of ``labels`` add up to the mean over all labels."""
    with torch.no_grad():
        ignored = settings.get("ignore_index")
        labels = labels.long()
        counted = labels != (-100 if ignored is None else ignored)
        weight = settings["weight"]
        total = counted.sum() if weight is None else (weight[labels.where(counted, 0)] * counted).sum()
    per_label: Any
    if isinstance(loss, nn.Module):
        per_label = copy.copy(loss)
        per_label.reduction = "none"
    else:
        per_label = partial(loss, reduction="none")

    def share(output: Any, target: Any) -> Tensor:
        found: Tensor = (per_label(output, target) / total).sum()
        return found

    return share


def _warn(loss: Any) -> None:
    inner = loss.func if isinstance(loss, partial) else loss
    name = getattr(inner, "__name__", type(inner).__name__)
    name = f"a partial of {name}" if isinstance(loss, partial) else name
    warnings.warn(
        f"{name} is none of PyTorch's losses and counts as a mean over samples: micro-batches are weighted by their "
        "sizes. Pass reduction='mean' if it is one, else 'sum' or a function of a micro-batch's target",
        ReductionWarning,
        stacklevel=7,
    )
