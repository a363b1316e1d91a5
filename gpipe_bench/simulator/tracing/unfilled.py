"""Layers are made without values: on the meta device there are none, and to draw them takes most of the making."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

__all__ = ["Unfilled"]

_FILLING: Final = frozenset(
    {
        *(Tensor.fill_, Tensor.zero_, Tensor.uniform_, Tensor.normal_),
        *(init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_, init.kaiming_normal_),
    }
)
"""They overwrite their first argument and give it back."""


class Unfilled(TorchFunctionMode):
    """What fills a tensor of the meta device with values is passed over; everything else is done."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what ``func`` does, unless it fills a tensor that has no values."""
        kwargs = kwargs or {}
        if func in _FILLING:
            # Functions of torch.nn.init name it.
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)
