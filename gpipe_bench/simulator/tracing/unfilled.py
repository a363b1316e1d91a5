"""Layers are made without values: on the meta device there are none, and to draw them takes most of the making."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor
from torch.nn import init
from torch.utils._device import DeviceContext

__all__ = ["Unfilled"]

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
