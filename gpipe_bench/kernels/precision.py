"""The precision of a training step: the type of weights, activations and gradients.

``float32`` leaves every tensor in the type that the model gives it. A half casts all real numbers, as ``module.half()``
and ``module.bfloat16()`` do, and the optimizer keeps weights in float32 (Micikevicius et al., arXiv 1710.03740).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_bench.settings import HALVES

if TYPE_CHECKING:
    from torch import Tensor


def in_precision(tensor: Tensor, precision: str) -> Tensor:
    """The tensor itself in ``float32``; in a half one without values, cast if it holds real numbers."""
    if precision not in HALVES or not tensor.is_floating_point():
        return tensor
    import torch

    return torch.empty_like(tensor, dtype=getattr(torch, precision), device="meta")
