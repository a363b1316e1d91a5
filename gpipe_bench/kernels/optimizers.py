"""The optimizers that simulator and emulator count."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

_MAKERS: Final[dict[str, Any]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def make_optimizer(name: str, parameters: Iterable[Tensor], *, foreach: bool = True) -> torch.optim.Optimizer:
    """The optimizer of one of :data:`gpipe_bench.settings.OPTIMIZERS`, by default as it is on an accelerator."""
    made: torch.optim.Optimizer = _MAKERS[name](list(parameters), foreach=foreach)
    return made
