"""What an exception during a measurement means for its row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from gpipe_bench.errors import BalanceError, ConfigError, UnsupportedError

BAD_ARGUMENTS: Final = (ConfigError, BalanceError)
"""Exceptions that blame the arguments: nothing was measured and no row is written."""

# PyTorch raises a RuntimeError of its own where the CPU's allocator or a CUDA library finds no memory.
_OUT_OF_MEMORY: Final = re.compile(
    r"can't allocate memory|not enough memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_LONGEST: Final = 300


def status_of(error: Exception) -> tuple[str, str]:
    """Status and reason of the row of a run that ended with ``error``; the reason is one line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, UnsupportedError):
        return "unsupported", text or reason
    if any(_is_out_of_memory(cause) for cause in _chain(error)):
        return "oom", reason
    return "error", reason


def _is_out_of_memory(error: BaseException) -> bool:
    # By name, since PyTorch need not be loaded to judge an exception: torch.OutOfMemoryError, torch.cuda's alias.
    by_type = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return by_type or (isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error))))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__
