"""Functions in processes of their own, which have imported PyTorch when they begin: one interpreter starts for all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

CONTEXT = get_context("forkserver")
# The last but one is what a first backward pass imports, the last what a process of pytest begins with.
CONTEXT.set_forkserver_preload(["gpipe_bench.engine.gpipe", "torch.fx.experimental.symbolic_shapes", "pytest"])


def apart(function: Callable[..., Any], *arguments: object) -> Any:
    """What a function returns, or raises, in a process that has run nothing else."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        return pool.submit(function, *arguments).result()
