"""Modules that stay on their devices."""

from __future__ import annotations

from typing import Any, NoReturn, Self

import torch
from torch import nn

from gpipe_bench.errors import PlacementError

__all__ = ["Device", "Unmovable"]

Device = torch.device | str | int


class Unmovable(nn.Module):
    """A pipeline, whose layers are on devices of their own: what would move them is refused."""

    def cuda(self, device: Device | None = None) -> NoReturn:
        """Refused: see :meth:`to`."""
        raise PlacementError(_refusal(f"cuda({'' if device is None else device})"))

    def cpu(self) -> NoReturn:
        """Refused: see :meth:`to`."""
        raise PlacementError(_refusal("cpu()"))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the dtype, as ``nn.Module.to``; a change of device is refused.

        Raises:
            TypeError: a device was given.
        """
        for value in (*args, kwargs.get("device"), kwargs.get("tensor")):
            if isinstance(value, (str, int, torch.device, torch.Tensor)) and not isinstance(value, bool):
                raise PlacementError(_refusal(f"to({value if not isinstance(value, torch.Tensor) else value.device})"))
        super().to(*args, **kwargs)
        return self


def _refusal(call: str) -> str:
    return f"a pipeline must stay on the devices it was made for, got {call}; make a new one on other devices"
