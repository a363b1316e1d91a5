"""Layers without values: copies on the meta device, and layers made there.

To draw values takes most of the time of making a layer, and on the meta device there are none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import init
from torch.utils._device import DeviceContext

from gpipe_bench.simulator.tracing.specs import TensorSpec

__all__ = ["Unfilled", "meta_twin"]

_FILLING: Final = frozenset(
    {
        *(Tensor.fill_, Tensor.zero_, Tensor.uniform_, Tensor.normal_),
        *(init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_, init.kaiming_normal_),
    }
)
"""They overwrite their first argument and give it back."""


class Unfilled(DeviceContext):
    """Tensors are made on the meta device, and what fills one with values is passed over; everything else is done.

    One mode for both, since each is asked about every function.
    """

    def __init__(self) -> None:
        super().__init__("meta")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what ``func`` does, unless it fills a tensor that has no values."""
        if func in _FILLING:
            # Functions of torch.nn.init name it.
            tensor = args[0] if args else (kwargs or {})["tensor"]
            if tensor.is_meta:
                return tensor
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped


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
