"""Phonies: empty tensors that carry an edge of the autograd graph and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["get_phony", "new_leaf"]

_phonies: dict[torch.device, Tensor] = {}


def get_phony(device: torch.device) -> Tensor:
    """The phony of a device, shape (0,), made once; it requires no gradient.

    It lives on the device whose order it serves: autograd queues a node on the device of its outputs
    (pytorch#135633), so a lane on a CPU phony would be run by another thread than the tasks it orders.
    """
    if device not in _phonies:
        # An inference tensor could never take part in autograd again.
        with torch.inference_mode(mode=False):
            _phonies[device] = torch.empty(0, device=device)
    return _phonies[device]


def new_leaf(device: torch.device) -> Tensor:
    """A phony that requires a gradient, and so keeps a node in the graph when none of its inputs does.

    Each is a leaf of its own, made while the stream of its task is current. When a backward pass ends, autograd makes
    the caller wait for the streams of the leaves it met. A leaf shared by several pipelines would belong to the stream
    that used it first, and gradients of the others could be read before they are written.
    """
    return torch.empty(0, device=device, requires_grad=True)
