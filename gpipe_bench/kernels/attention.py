"""Attention as accelerators run it: one kernel that never keeps the matrix of scores.

    q (B, H, L, E), k (B, H, S, E), v (B, H, S, F)  ──>  softmax(q k^T) v (B, H, L, F), and log-sum-exp (B, H, L)

The kernel skips what ``is_causal`` hides. A mask that is a tensor is read and added, whatever its values are. Dropout
makes it slower, and short sequences do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_AXES: Final = 4


class AttentionCall(NamedTuple):
    """What decides how long a kernel of attention takes, beside its FLOPs.

    Attributes:
        queries: tokens that attend; 0 if its arguments do not say.
        keys: tokens that they attend to; likewise.
        is_causal: whether query i sees the keys up to i alone.
        drops: whether weights of the attention are dropped.
    """

    queries: int
    keys: int
    is_causal: bool
    drops: bool

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AttentionCall:
        """A call of an overload, forward or backward, of PyTorch or of the user's own with a formula of its FLOPs."""
        # No public property says the names: pytorch#67254.
        names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        queries, keys = (int(given[name].shape[-2]) if name in given else 0 for name in ("query", "key"))
        return cls(queries, keys, bool(given.get("is_causal")), given.get("dropout_p", 0) > 0)

    def unmasked(self, flop: int) -> int:
        """Of the FLOPs of all pairs, which PyTorch's formula counts, those that a causal mask leaves."""
        pairs = self.queries * self.keys
        return flop * seen_pairs(self.queries, self.keys) // pairs if self.is_causal and pairs else flop


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


def _added(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as what is added to the scores of each sample and head."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:3], key.shape[2])
