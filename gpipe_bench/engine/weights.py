"""Parametrized weights, of which PyTorch keeps one cache for all threads.

Within ``torch.nn.utils.parametrize.cached()`` a weight is computed once, and the next layer that asks gets it. Among
tasks that run at the same time, in graphs of their own, that is the weight of another task: without a graph, of a graph
that was run backward already, or, since copies of a layer share their entry, of another layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.utils import parametrize

__all__ = ["uncached_weights"]


@contextmanager
def uncached_weights(*, shared: bool, anew: bool) -> Iterator[None]:
    """Refuse the cache in a block where it could give a wrong weight.

    Args:
        shared: whether tasks run at the same time, so that no layer may open the cache.
        anew: whether each task has a graph of its own, so that the cache may not be open around the block.

    Raises:
        RuntimeError: the cache is, or was, open.
    """
    before = parametrize._cache  # noqa: SLF001 - there is no public way to ask; a new one when the last block ends
    if anew and parametrize._cache_enabled:  # noqa: SLF001 - as above; the number of blocks
        raise RuntimeError(
            "parametrized weights must be computed in each task, got parametrize.cached() around a batch with "
            "checkpoints or a schedule; leave it out, or use checkpoint='never' without schedule and backward"
        )
    yield
    if shared and parametrize._cache is not before:  # noqa: SLF001 - as above
        raise RuntimeError(
            "parametrized weights must be computed in each task, got parametrize.cached() within a layer, whose cache "
            "is that of all partitions; take the weight once instead, as in weight = self.linear.weight"
        )
