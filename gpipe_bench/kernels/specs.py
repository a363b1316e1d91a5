"""Tensors without their values, structures of them, and layers on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.skip.trees import tree_leaves, tree_map_only


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its values.

    Attributes:
        shape: its lengths.
        stride: distances of elements.
        dtype: their type.
        requires_grad: whether it needs a gradient.
        view: whether it is a view of a tensor that autograd knows: to write to it costs the backward pass two copies
            (``CopySlices``). Known for outputs of a layer only.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    view: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """That of a tensor by itself."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    @classmethod
    def leaving(cls, tensor: Tensor) -> TensorSpec:
        """That of a tensor that a layer gives out."""
        return replace(cls.of(tensor), view=tensor.requires_grad and tensor._is_view())  # noqa: SLF001 - its only word

    def empty(self) -> Tensor:
        """A tensor like this on the meta device, which does not require grad yet."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def fits(self, gradient: Tensor) -> bool:
        """Whether a leaf like this takes a gradient in its layout, and does not copy it (``obeys_layout_contract``)."""
        if not self.is_dense():
            return gradient.is_contiguous()
        # Strides of one element say nothing, but that it was expanded.
        sides = zip(gradient.shape, gradient.stride(), self.stride, strict=True)
        return all(stride == own if length != 1 else stride > 0 for length, stride, own in sides)

    def is_dense(self) -> bool:
        """Whether it fills its part of memory, each element once, in whatever order of its dimensions."""
        filled = 1
        for stride, length in sorted(zip(self.stride, self.shape, strict=True)):
            if length != 1 and stride != filled:
                return False
            filled *= length
        return True


def map_specs(function: Callable[[Any], Any], value: Any) -> Any:
    """A structure with every tensor or spec replaced; anything else stays as it is."""
    return tree_map_only((Tensor, TensorSpec), function, value)


def specs_in(value: object) -> list[TensorSpec]:
    """The specs in a structure."""
    return [item for item in tree_leaves(value) if isinstance(item, TensorSpec)]


def meta_twin(layer: nn.Module, known: dict[int, Any] | None = None) -> nn.Module:
    """A copy on the meta device; no values are copied on the way, whatever the layer holds its tensors in.

    ``known`` has what layers that were copied before share with others, and its copies; this layer's are added.
    """
    held = [
        tensor
        for module in layer.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values())
        if isinstance(tensor, Tensor)
    ]
    copies = {} if known is None else known
    copies.update({id(tensor): _on_meta(tensor) for tensor in held if id(tensor) not in copies})
    return copy.deepcopy(layer, copies).to("meta")


def _on_meta(tensor: Tensor) -> Tensor:
    empty = TensorSpec.of(tensor).empty()
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
