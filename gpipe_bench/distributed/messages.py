"""A value between processes: a description, and the memory of its tensors.

    description   the box that the value is for, its structure, a form in the place of each tensor, and all else
    memory        a copy of each tensor, without gaps; strides stay, such as those of channels_last

The receiver makes the tensors from the description before their memory comes. The sender copies the tensors: a layer
may write to what it has handed on while that is in flight, as to a buffer or a preallocated output.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe_bench.autograd.microbatch import MicroBatch
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
        structure: of the flat value, pickled: a tree with the numbers of its leaves. Else a field of a class might
            change in place. None for that of a micro-batch of one value, and for a list of gradients.
        aliased: of a micro-batch; None for any other value.
        forms: for each leaf that of a tensor, or None.
        others: the other leaves, pickled: 1, 1.0 and True are equal, and yet different values.
        received: so many messages of this batch the sender has received from the receiver.
        asks: whether the sender asks for a receipt.
    """

    box: tuple[str, int, int, int]
    structure: bytes | None
    aliased: frozenset[int] | None
    forms: tuple[TensorForm | None, ...]
    others: bytes
    received: int = 0
    asks: bool = False


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A sparse tensor, or one of a class that adds nothing but methods: it travels in the description."""

    tensor: Tensor
    requires_grad: bool


def pack(box: tuple[str, int, int, int], value: Any) -> tuple[Description, list[Tensor]]:
    """The description of a value, and copies of its tensors, which the caller's stream makes.

    Raises:
        TypeError: the value holds something that cannot be pickled, or a tensor that is not plain, such as a DTensor.
    """
    tensors: list[Tensor] = []
    forms: list[TensorForm | None] = []
    others: list[Any] = []
    structure: TreeSpec | None
    if isinstance(value, MicroBatch):
        leaves, structure, aliased = [*value.values], value.structure, value.aliased
    elif type(value) is list and all(leaf is None or isinstance(leaf, Tensor) for leaf in value):
        leaves, structure, aliased = value, None, None
    else:
        (leaves, structure), aliased = tree_flatten(value), None
    for leaf in leaves:
        copy = _copied(leaf) if isinstance(leaf, Tensor) else None
        if copy is not None and type(copy) is Tensor and copy.layout == torch.strided:
            tensors.append(copy)
            forms.append(TensorForm(copy.shape, copy.stride(), copy.dtype, leaf.requires_grad))
        else:
            forms.append(None)
            others.append(leaf if copy is None else WholeTensor(copy, leaf.requires_grad))
    # A structure has the warnings of its class; a tree of that structure has not.
    tree = None if structure is None else _pickled(tree_unflatten(range(structure.num_leaves), structure))
    return Description(box, tree, aliased, tuple(forms), _pickled(others) if others else b""), tensors


def sizes(description: Description) -> list[int]:
    """The bytes of each tensor that has elements."""
    return [form.nbytes for form in description.forms if form is not None and form.nbytes]


def encoded(description: Description) -> bytes:
    """The bytes of a description."""
    return pickle.dumps(description)


def decoded(data: bytes) -> Description:
    """What :func:`encoded` has made in another process."""
    description: Description = _unpickled(data)
    return description


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
    # Else a sparse tensor would go where the user makes tensors.
    with torch.device("cpu"):
        return pickle.loads(data)  # noqa: S301 - see above


class Parcel:
    """A value on its arrival.

    Args:
        description: see :func:`pack`.
        empty: gives memory for a tensor of some shape, strides and type.
        larger: whether that for each tensor is larger than needed.

    Attributes:
        memory: of each tensor that has elements, to receive into; an element larger than needed if it is to be.
    """

    def __init__(self, description: Description, empty: Empty, *, larger: bool) -> None:
        self.description = description
        self.memory: list[Tensor] = []
        self._tensors: list[Tensor] = []
        for form in description.forms:
            if form is not None:
                # An element more, since others expect that a storage has whole ones.
                count = prod(form.shape)
                memory = empty((count + larger,), (1,), form.dtype)
                # No view in the eyes of autograd: layers may write to it.
                self._tensors.append(memory.as_strided(form.shape, form.strides).detach())
                if count:
                    self.memory.append(memory)

    def value(self, place: Callable[[Tensor], Tensor]) -> Any:
        """The value, once its tensors are filled; ``place`` puts each where it is used."""
        _, tree, aliased, forms, rest, *_ = self.description
        structure = None if tree is None else tree_flatten(_unpickled(tree))[1]
        received, others = iter(self._tensors), iter(_unpickled(rest) if rest else ())
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
        return leaves if structure is None else tree_unflatten(leaves, structure)


def memory(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, as a flat tensor that shares its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _copied(tensor: Tensor) -> Tensor:
    """A copy whose elements fill its memory; it keeps the strides if they do.

    A copy of a tensor that a collective has not filled yet comes after the collective, and is a plain tensor.
    """
    kind = "quantised tensor" if tensor.is_quantized else "nested tensor" if tensor.is_nested else None
    copy = tensor if kind else tensor.detach().clone()
    if kind is None and type(copy).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        # Its memory is not all: a DTensor belongs to the mesh of the sender, which the receiver is not in.
        kind = type(copy).__name__
    if kind is not None:
        raise TypeError(
            f"tensors between processes must be plain, dense or sparse, got a {kind}; hand on plain tensors, such as "
            "to_local() of a DTensor (use_local_output=True), or have the layers that hand it on in one partition"
        )
    return copy
