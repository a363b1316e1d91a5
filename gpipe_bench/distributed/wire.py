"""A message between processes: a description, and the memory of its tensors.

    header        six numbers: which box the message is for, and the length of the description, or 0
    description   the value, with shape, strides, type and need of a gradient in the place of each tensor
    memory        of each tensor, without gaps; strides stay, such as those of channels_last

A description is sent when it differs from the last one for the same box of another micro-batch. So shapes may change
from batch to batch, and a step of equal ones sends headers and memory alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from gpipe_bench.engine.microbatch import MicroBatch, flatten
from gpipe_bench.skip.trees import tree_flatten, tree_unflatten

_MICROBATCH: Final = "gpipe_bench.MicroBatch"


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What has to be known of a tensor to receive it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor that is no plain memory with strides, as a sparse one: it travels in the description."""

    tensor: Tensor
    requires_grad: bool


def pack(value: Any) -> tuple[bytes, list[Tensor]]:
    """The description of a value, and its tensors without gaps.

    Raises:
        TypeError: the value holds something that cannot be pickled.
    """
    if isinstance(value, MicroBatch):
        value = _MICROBATCH, value.unwrap(), value.aliased
    leaves, structure = tree_flatten(value)
    tensors: list[Tensor] = []
    forms: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            forms.append(leaf)
        elif leaf.layout != torch.strided or type(leaf) is not Tensor:
            forms.append(WholeTensor(leaf.detach(), leaf.requires_grad))
        else:
            tensors.append(_without_gaps(leaf.detach()))
            forms.append(TensorForm(tuple(leaf.shape), tensors[-1].stride(), leaf.dtype, leaf.requires_grad))
    try:
        return pickle.dumps(tree_unflatten(forms, structure)), tensors
    except Exception as error:
        kinds = sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)})
        raise TypeError(
            f"values between processes must be tensors, or what pickle takes, got {', '.join(kinds)} and '{error}'; "
            "hand on tensors, or classes that other processes can import"
        ) from error


class Parcel:
    """A value on its arrival.

    Args:
        description: see :func:`pack`.
        empty: gives memory for a tensor of some shape, strides and type.

    Attributes:
        tensors: memory to receive into.
    """

    def __init__(
        self, description: bytes, empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
    ) -> None:
        # From another process of the same program, as the objects of torch.distributed's collectives.
        self._forms, self._structure = tree_flatten(pickle.loads(description))  # noqa: S301 - see above
        self.tensors = [
            empty(form.shape, form.strides, form.dtype) for form in self._forms if isinstance(form, TensorForm)
        ]

    def value(self, place: Callable[[Tensor], Tensor]) -> Any:
        """The value, once its tensors are filled; ``place`` puts each where it is used."""
        received = iter(self.tensors)
        leaves = []
        for form in self._forms:
            if isinstance(form, TensorForm | WholeTensor):
                tensor = next(received) if isinstance(form, TensorForm) else form.tensor
                leaves.append(place(tensor).requires_grad_(form.requires_grad))
            else:
                leaves.append(form)
        value = tree_unflatten(leaves, self._structure)
        if isinstance(value, tuple) and len(value) == 3 and value[0] == _MICROBATCH:
            return MicroBatch(*flatten(value[1]), value[2])
        return value


def memory(tensor: Tensor) -> Tensor:
    """The bytes of a tensor without gaps, as a flat tensor that shares its memory."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def _without_gaps(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy, whose elements fill its memory; it keeps its strides if they do."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return tensor
    return tensor.contiguous()
