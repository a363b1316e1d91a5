"""Frees the tensors that a node has saved for its backward pass, while the node itself stays.

PyTorch's notes on autograd show how ("Hooks for saved tensors"). A node has a ``SavedTensor`` for each of them, in an
attribute that begins with ``_raw_saved_``, and it takes a pair of hooks. The node then holds the result of ``pack``,
here a :class:`Packed`, and asks ``unpack`` for the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from torch import Tensor, strided
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from gpipe_bench.autograd.microbatch import versions


class Packed:
    """Holds a saved tensor until :meth:`free`."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        (self._version,) = versions((tensor,))

    def unpack(self) -> Tensor:
        """The tensor. Autograd does not check whether it was written to, since a hook may give any other one."""
        if self._tensor is None:
            raise RuntimeError(
                "with a schedule gradients must come from the pipeline's outputs, got some from a tensor that a layer "
                "keeps aside, whose graph is freed; return it as an output, or use a schedule without I and W"
            )
        (now,) = versions((self._tensor,))
        if now != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation, got "
                f"version {now} instead of {self._version}"
            )
        return self._tensor

    def free(self) -> None:
        """Let go of the tensor; the node must not run again."""
        self._tensor = None


def pack_saved(nodes: Iterable[Node]) -> list[Packed]:
    """Pack the tensors that these nodes have saved.

    Tensors that have hooks already stay as they are, as those of an inner checkpoint. So do tensors that a custom
    function keeps without ``save_for_backward``, and those of nodes that show none, as of ``torch._foreach_mul``.
    A hook gives another tensor than was saved. So tensors that are more than their numbers stay, too: parameters, which
    live on anyway, other classes, and tensors to which a user has given attributes, as ``main_grad``.

    Raises:
        RuntimeError: a tensor was written to since it was saved, or is freed already; the errors are autograd's own.
    """
    packed: list[Packed] = []

    def pack(tensor: Tensor) -> Packed:
        packed.append(Packed(tensor))
        return packed[-1]

    for node in nodes:
        for raw, checked in _names(type(node)):
            saved = _tuple(getattr(node, raw))
            if all(each.unpack_hook is None for each in saved):
                # Autograd checks whether they were written to when it is asked for their values.
                for each, value in zip(saved, _tuple(getattr(node, checked)), strict=True):
                    if type(value) is Tensor and not vars(value) and not _is_number(value):
                        each.register_hooks(pack, Packed.unpack)
    return packed


def has_hooks(node: Node) -> bool:
    """Whether what a node has saved is unpacked by a user's code, as by ``saved_tensors_hooks`` or a checkpoint."""
    return any(each.unpack_hook is not None for raw, _ in _names(type(node)) for each in _tuple(getattr(node, raw)))


def _is_number(value: Tensor) -> bool:
    """Whether it may be a number that PyTorch has wrapped: that cannot be packed within a dispatch mode."""
    return not value.dim() and value.layout == strided and value.untyped_storage().nbytes() <= value.element_size()


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@lru_cache(maxsize=256)
def _names(kind: type[Node]) -> list[tuple[str, str]]:
    """The attributes with saved tensors: for each its name, and the name of the one with the values."""
    if issubclass(kind, BackwardCFunction):
        return [("_raw_saved_tensors", "saved_tensors")]
    return [(name, name.removeprefix("_raw")) for name in dir(kind) if name.startswith("_raw_saved_")]
