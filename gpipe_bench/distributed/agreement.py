"""What all processes of a pipeline must agree on: what they are made of, and what they do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpipe_bench.skip.layout import SkipLayout


class Begin(NamedTuple):
    """What the process with the first partition tells the others before they do something together."""

    settings: dict[str, Any]
    """What must be the same in all processes."""
    kind: str
    """Two batches of one kind send messages of the same sizes, most often."""
    sizes: Sequence[int] = ()
    """Of the micro-batches."""
    seed: bytes = b""
    """Of the random numbers of all tasks."""

    def agree(self, settings: Mapping[str, Any], ranks: tuple[int, int]) -> None:
        """Check settings against those of another process.

        Args:
            settings: of this process.
            ranks: of the process that has told, and of this one.

        Raises:
            ValueError: one of them differs.
        """
        for name, value in settings.items():
            if self.settings[name] != value:
                raise ValueError(
                    f"{name} must be the same in all processes, got {self.settings[name]} on rank {ranks[0]} and "
                    f"{value} on rank {ranks[1]}; make the same calls everywhere"
                )


def fingerprint(value: object) -> str:
    """A short text, equal for values whose ``repr`` is equal."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def description(
    module: nn.Module, balance: Sequence[int], schedule: Any, layout: SkipLayout, *, deferred_batch_norm: bool
) -> dict[str, Any]:
    """What a process has made its pipeline of."""

    def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> str:
        return fingerprint([(name, tuple(each.shape), str(each.dtype)) for name, each in tensors])

    return {
        "parameters": fingerprints(module.named_parameters()),
        "balance": list(balance),
        "skips": [*layout.routes.values()],
        "schedule": schedule if isinstance(schedule, str) else "one of your own",
        "deferred_batch_norm": deferred_batch_norm,
        "frozen parameters": fingerprint([each.requires_grad for each in module.parameters()]),
        "buffers": fingerprints(module.named_buffers()),
        "layers": fingerprint([(name, type(each).__qualname__) for name, each in module.named_modules()]),
    }


def compare(descriptions: Sequence[dict[str, Any]], ranks: Sequence[int]) -> None:
    """Check that all processes have made the same pipeline; each of them raises the same error.

    Args:
        descriptions: of the processes.
        ranks: that they have in the whole job.

    Raises:
        ValueError: they have not.
    """
    first = descriptions[0]
    for rank, other in zip(ranks, descriptions, strict=True):
        for name, value in first.items():
            if other[name] != value:
                raise ValueError(
                    f"{name} must be the same in all processes, got {value} on rank {ranks[0]} and {other[name]} on "
                    f"rank {rank}; make the same pipeline everywhere"
                )
