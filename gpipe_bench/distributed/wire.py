"""A value between processes: a description, and the memory of its tensors.

    description   the box that the value is for, its structure, a form in the place of each tensor, and all else
    memory        of each tensor, without gaps; strides stay, such as those of channels_last

The receiver makes the tensors from the description before their memory comes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe_bench.engine.microbatch import MicroBatch
from gpipe_bench.skip.trees import TreeSpec, tree_flatten, tree_unflatten


class TensorForm(NamedTuple):
    """What has to be known of a tensor to receive it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return prod(self.shape) * self.dtype.itemsize


Empty = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]


class Description(NamedTuple):
    """All of a value but the memory of its tensors. Two that are equal describe equal values.

    Attributes:
        box: which the value is for.
        structure: of the flat value.
        aliased: of a micro-batch; None for any other value.
        forms: for each leaf that of a tensor, or None.
        others: the other leaves, pickled: 1, 1.0 and True are equal, and yet different values.
    """

    box: tuple[str, int, int, int]
    structure: TreeSpec | None
    aliased: frozenset[int] | None
    forms: tuple[TensorForm | None, ...]
    others: bytes


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor that is no plain memory with strides, as a sparse one: it travels in the description."""

    tensor: Tensor
    requires_grad: bool


def pack(box: tuple[str, int, int, int], value: Any) -> tuple[Description, list[Tensor]]:
    """The description of a value, and its tensors without gaps.

    Raises:
        TypeError: the value holds something that cannot be pickled, or a quantised or nested tensor.
    """
    tensors: list[Tensor] = []
    forms: list[TensorForm | None] = []
    others: list[Any] = []
    structure: TreeSpec | None
    if isinstance(value, MicroBatch):
        leaves, structure, aliased = [*value.values], value.structure, value.aliased
    else:
        (leaves, structure), aliased = tree_flatten(value), None
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.is_quantized or leaf.is_nested):
            kind = "quantised" if leaf.is_quantized else "nested"
            raise TypeError(
                f"tensors between processes must be dense or sparse, got a {kind} one; convert it, or have the layers "
                "that hand it on in one partition"
            )
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and type(leaf) is Tensor:
            tensors.append(_without_gaps(leaf.detach()))
            forms.append(TensorForm(leaf.shape, tensors[-1].stride(), leaf.dtype, leaf.requires_grad))
        else:
            forms.append(None)
            others.append(WholeTensor(leaf.detach(), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf)
    return Description(box, structure, aliased, tuple(forms), _pickled(others)), tensors


def sizes(description: Description) -> list[int]:
    """The bytes of each tensor that has elements."""
    return [form.nbytes for form in description.forms if form is not None and form.nbytes]


def encoded(description: Description) -> bytes:
    """The bytes of a description.

    Raises:
        TypeError: the structure has classes that cannot be pickled.
    """
    # A structure has the warnings of its class; a tree of that structure has not.
    structure = description.structure
    tree = None if structure is None else tree_unflatten(range(structure.num_leaves), structure)
    return _pickled(description._replace(structure=tree))


def decoded(data: bytes) -> Description:
    """What :func:`encoded` has made in another process."""
    description: Description = _unpickled(data)
    tree = description.structure
    return description if tree is None else description._replace(structure=tree_flatten(tree)[1])


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        kinds = sorted({type(leaf).__name__ for leaf in tree_flatten(value)[0]})
        raise TypeError(
            f"values between processes must be tensors, or what pickle takes, got {', '.join(kinds)} and '{error}'; "
            "hand on tensors, or classes that other processes can import"
        ) from error


def _unpickled(data: bytes) -> Any:
    """From another process of the same program, as the objects of torch.distributed's collectives."""
    return pickle.loads(data)  # noqa: S301 - see above


class Parcel:
    """A value on its arrival.

    Args:
        description: see :func:`pack`.
        empty: gives memory for a tensor of some shape, strides and type.
        larger: whether that for each tensor is larger than needed.

    Attributes:
        memory: of each tensor that has elements, to receive into; a byte larger than needed if it is to be.
    """

    def __init__(self, description: Description, empty: Empty, *, larger: bool) -> None:
        self.description = description
        self.memory: list[Tensor] = []
        self._tensors: list[Tensor] = []
        for form in description.forms:
            if form is not None:
                # An element more, since others expect that a storage has whole ones.
                memory = empty((prod(form.shape) + larger,), (1,), form.dtype)
                place = memory.untyped_storage(), 0, form.shape, form.strides
                self._tensors.append(torch.empty(0, dtype=form.dtype, device=memory.device).set_(*place))
                if form.nbytes:
                    self.memory.append(memory.view(torch.uint8)[: form.nbytes + larger])

    def value(self, place: Callable[[Tensor], Tensor]) -> Any:
        """The value, once its tensors are filled; ``place`` puts each where it is used."""
        _, structure, aliased, forms, rest = self.description
        received, others = iter(self._tensors), iter(_unpickled(rest))
        leaves = []
        for form in forms:
            leaf = next(others) if form is None else next(received)
            if form is not None:
                leaf = place(leaf).requires_grad_(form.requires_grad)
            elif isinstance(leaf, WholeTensor):
                leaf = place(leaf.tensor).requires_grad_(leaf.requires_grad)
            leaves.append(leaf)
        if aliased is not None:
            return MicroBatch(tuple(leaves), structure, aliased)
        assert structure is not None  # noqa: S101 - of all but micro-batches
        return tree_unflatten(leaves, structure)


def memory(tensor: Tensor) -> Tensor:
    """The bytes of a tensor without gaps, as a flat tensor that shares its memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _without_gaps(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy, whose elements fill its memory; it keeps its strides if they do."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return tensor
    return tensor.contiguous()
