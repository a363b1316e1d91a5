"""Attention as accelerators run it: one kernel that never keeps the matrix of scores.

    q (B, H, L, E), k (B, H, S, E), v (B, H, S, F)  ──>  softmax(q k^T) v (B, H, L, F), and log-sum-exp (B, H, L)

On the meta device PyTorch would write that out with a score for each pair, in float32.

The kernel skips what a causal mask hides if it is told of the mask by ``is_causal``, or by a causal bias of PyTorch; no
memory holds such a mask. A mask that is a tensor is read and added, whatever its values are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from gpipe_bench.simulator.tracing.fused_kernels import dropout, has_no_values

__all__ = ["attention", "fused_inside", "seen_pairs"]

_AXES: Final = 4
_WRITTEN_OUT: Final = functional.scaled_dot_product_attention


def attention(  # noqa: PLR0917 - the signature of PyTorch's function
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """``scaled_dot_product_attention`` by the memory-efficient kernel, which all devices since sm50 have.

    Returns:
        None where PyTorch writes it out on accelerators too: without an axis of heads, with a mask that is trained, and
        where axes are broadcast.
    """
    if _is_causal_bias(attn_mask):
        attn_mask, is_causal = None, True
    if enable_gqa and query.dim() == key.dim() == value.dim() == _AXES:
        shared = [query.shape[1] // max(1, tensor.shape[1]) for tensor in (key, value)]
        key, value = (tensor.repeat_interleave(times, 1) for tensor, times in zip((key, value), shared, strict=True))
    plain = query.dim() == key.dim() == value.dim() == _AXES and query.shape[:2] == key.shape[:2] == value.shape[:2]
    if not plain or (attn_mask is not None and attn_mask.requires_grad) or query.is_nested:
        return None
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    mask = None if attn_mask is None else _added(attn_mask, query, key)
    result: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(  # noqa: SLF001 - it has no public name
        query, key, value, mask, trained, dropout_p, is_causal, scale=scale
    )[0]
    return result


def seen_pairs(queries: int, keys: int) -> int:
    """Pairs of a query and a key that a causal mask leaves: query i sees the keys up to i, as ``is_causal`` has it."""
    square = min(queries, keys)
    return square * (square + 1) // 2 + (queries - square) * keys


@contextmanager
def fused_inside() -> Iterator[None]:
    """For functions of PyTorch that call attention and dropout by name, where no mode sees it: each is one kernel."""

    def called(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = attention(query, *args, **kwargs) if has_no_values(query) else None
        return _WRITTEN_OUT(query, *args, **kwargs) if found is None else found

    own: Any = functional
    plain = functional.dropout
    own.scaled_dot_product_attention, own.dropout = called, dropout
    try:
        yield
    finally:
        own.scaled_dot_product_attention, own.dropout = _WRITTEN_OUT, plain


def _added(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as what is added to the scores of each sample and head."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:3], key.shape[2])


def _is_causal_bias(mask: Tensor | None) -> bool:
    """Whether a mask is PyTorch's causal bias, for which the kernel runs as for ``is_causal``."""
    # A mask of that class shows that its module is loaded; to load it takes a second.
    bias = sys.modules.get("torch.nn.attention.bias")
    if bias is None or not isinstance(mask, bias.CausalBias):
        return False
    return bool(mask.seq_len_q == mask.seq_len_kv or mask.variant is bias.CausalVariant.UPPER_LEFT)
