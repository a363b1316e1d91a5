"""How the losses of micro-batches add up to the loss of the batch.

A mean over samples is the mean of the micro-batches, weighted by their sizes. ``cross_entropy`` with class indices is
no such mean: it divides by the sum of the weights of all labels that it does not ignore. So each micro-batch divides by
the sum over the batch, which is known from the targets before the step.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_bench.errors import ReductionWarning

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
    call, shares = loss, [1.0] * count
    if count > 1 and callable(reduction):
        shares = _weighted(reduction, targets)
    elif count > 1 and settings and settings["over_labels"] and reduction == "mean" and _are_labels(target):
        call = _over_labels(loss, settings, target)
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


def _are_labels(target: Any) -> bool:
    """Whether a target has class indices, not the probability of each class."""
    return isinstance(target, Tensor) and not target.is_floating_point()


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
