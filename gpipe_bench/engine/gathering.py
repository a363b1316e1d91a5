"""What to say where the results of micro-batches cannot be put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def check_shapes(tensors: Sequence[Tensor]) -> None:
    """Check tensors of all micro-batches that ``torch.cat`` has refused.

    Raises:
        ValueError: their shapes are the reason.
    """
    got = ", ".join(dict.fromkeys(str(list(tensor.shape)) for tensor in tensors))
    if any(tensor.is_nested for tensor in tensors):
        rule, got = "be tensors that torch.cat takes", f"nested ones of shapes {got}"
    elif len({tensor.shape[1:] for tensor in tensors}) > 1:
        rule = "agree in all dimensions but the first"
    else:
        return
    raise ValueError(
        f"results of all micro-batches must {rule}, got {got}; pad them in the last layer, or call pipe.step with a "
        "schedule, which computes the loss of each micro-batch by itself"
    )


def other_forms(forms: Sequence[Any]) -> TypeError:
    """The error of micro-batches that gave different tuples, lists or dicts; None is a tensor."""
    names = list(dict.fromkeys("a tensor" if form is None else " ".join(str(form).split()) for form in forms))
    return TypeError(
        f"results of all micro-batches must have one form, got {names}; return the same tuple from every one"
    )
