"""Phonies: empty tensors that carry an edge of the autograd graph and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["get_phony"]

_phonies: dict[tuple[torch.device, bool], Tensor] = {}


def get_phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """The phony of a device, shape (0,), made once.

    It lives on the device whose order it serves: autograd queues a node on the device of its outputs
    (pytorch#135633), so a lane on a CPU phony would be run by another thread than the tasks it orders.
    """
    key = (device, requires_grad)
    if key not in _phonies:
        # An inference tensor could never take part in autograd again.
        with torch.inference_mode(mode=False):
            _phonies[key] = torch.empty(0, device=device, requires_grad=requires_grad)
    return _phonies[key]
