"""What all processes of a pipeline must agree on: what they are made of, and what they do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe_bench.engine.tied import Tie
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
    chunks: int | None = None
    """How many micro-batches there are at most; None if they are ready-made."""

    def agree(self, settings: Mapping[str, Any], ranks: tuple[int, int]) -> None:
        """Check settings against those of another process.

        Args:
            settings: of this process.
            ranks: of the process that has told, and of this one.

        Raises:
            ValueError: one of them differs.
        """
        told = {name: self.settings.get(name) for name in settings}
        compare([told, settings], ranks, "make the same calls everywhere")


def fingerprint(value: object) -> str:
    """A short text, equal for values whose ``repr`` is equal."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def description(
    module: nn.Module,
    balance: Sequence[int],
    schedule: Any,
    layout: SkipLayout,
    ties: Sequence[Tie],
    *,
    deferred: bool,
) -> dict[str, Any]:
    """What a process has made its pipeline of."""
    return {
        "parameters": parameters_of([module]),
        "buffers": {name: _form(each) for name, each in module.named_buffers()},
        "balance": list(balance),
        "skips": [*layout.routes.values()],
        "partitions of tied weights": [[*tie.slots] for tie in ties],
        "schedule": schedule if isinstance(schedule, str) else "one of your own",
        "deferred_batch_norm": deferred,
        "layers": {name or "the module": type(each).__qualname__ for name, each in module.named_modules()},
    }


def parameters_of(modules: Iterable[nn.Module]) -> dict[str, str]:
    """The type and shape of each parameter, and whether it is frozen."""
    named = chain.from_iterable(module.named_parameters(remove_duplicate=False) for module in modules)
    return {name: _form(each) + ("" if each.requires_grad else ", frozen") for name, each in named}


def compare(
    descriptions: Sequence[Mapping[str, Any]], ranks: Sequence[int], advice: str = "make the same pipeline everywhere"
) -> None:
    """Check that all processes have the same settings; each of them raises the same error.

    Args:
        descriptions: of the processes: a value, or a dict of texts, for each name.
        ranks: that they have in the whole job.
        advice: what to do about it.

    Raises:
        ValueError: one of them differs.
    """
    first = descriptions[0]
    for rank, other in zip(ranks, descriptions, strict=True):
        for name, value in first.items():
            if other[name] != value:
                here, there = _difference(value, other[name])
                raise ValueError(
                    f"{name} must be the same in all processes, got {here} on rank {ranks[0]} and {there} on rank "
                    f"{rank}; {advice}"
                )


def _form(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "of a shape that the first batch tells"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _difference(one: Any, other: Any) -> tuple[Any, Any]:
    """Two values, or the first items of two dicts that differ."""
    if not isinstance(one, dict):
        return one, other
    for name in {**one, **other}:
        here, there = (f"'{name}' ({each[name]})" if name in each else f"no '{name}'" for each in (one, other))
        if here != there:
            return here, there
    return [*one], [*other]
