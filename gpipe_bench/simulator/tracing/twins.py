"""Copies of layers on the meta device."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from gpipe_bench.simulator.tracing.specs import TensorSpec

__all__ = ["meta_twin"]


def meta_twin(layer: nn.Module, known: dict[int, Any] | None = None) -> nn.Module:
    """A copy on the meta device; no values are copied on the way, whatever the layer holds its tensors in.

    Args:
        layer: on any device.
        known: what layers that were copied before share with others, and its copies; this layer's are added.
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
