"""Workloads on disk: putting traces together takes longer than many simulations, and gives the same again.

Requests for memory are most of a workload, and not needed where only times are asked for, so they have a file of their
own. A list of them is stored as three columns: kinds, one letter each, blocks and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from gpipe_bench.simulator.tracing.trace_cache import TRACING, read, write
from gpipe_bench.simulator.workloads.workload import Kernels, MemoryOp, SkipWork, StaticMemory, TaskWork, Workload

__all__ = ["kept_workload"]

# The files that decide what a workload holds and how it is stored.
_COMPOSING: Final = (*TRACING, "hardware/*.py", "workloads/*.py")
_LETTERS: Final = {"alloc": "a", "free": "f", "scratch": "s", "gradient": "g", "view": "v"}
_KINDS: Final = {letter: kind for kind, letter in _LETTERS.items()}
_MEMORIES: Final = ("forward_memory", "graph_memory", "backward_memory")
_PASSES: Final = ("forward", "recompute", "backward")
_TUPLES: Final = ("output_bytes", "input_bytes", "leaving", "returning", "returns")
_PLAIN: Final = ("nodes", "learns")


def kept_workload(
    folder: Path, key: Mapping[str, Any], make: Callable[[], Workload], *, memory: bool = True
) -> Workload:
    """The workload under ``key``, made and stored where there is none yet.

    Args:
        folder: where it is kept.
        key: all that it depends on, code aside.
        make: makes it.
        memory: whether its requests for memory are needed; without, they may be left out.
    """
    own, requests = {"workload": key}, {"requests of workload": key}
    found = read(folder, own, _decode, _COMPOSING)
    if found is not None and memory:
        found = read(folder, requests, partial(_with_memory, found), _COMPOSING)
    if found is None:
        found = make()
        write(folder, own, _encode(found), _COMPOSING)
        write(folder, requests, _encode_requests(found), _COMPOSING)
    return found


def _encode(work: Workload) -> dict[str, Any]:
    return {
        "partitions": [[[size, _encode_task(task)] for size, task in sizes.items()] for sizes in work.partitions],
        "microbatch_sizes": work.microbatch_sizes,
        "skips": [[skip.key, skip.source, skip.target, [*skip.bytes.items()], skip.returns] for skip in work.skips],
        "loss": _encode_kernels(work.loss),
        "optimizer": [_encode_kernels(kernels) for kernels in work.optimizer],
        "static_bytes": work.static_bytes,
        "static": [[part.resident, part.gradients, part.state, part.temporary] for part in work.static],
    }


def _decode(data: Mapping[str, Any]) -> Workload:
    return Workload(
        partitions=tuple({size: _decode_task(task) for size, task in sizes} for sizes in data["partitions"]),
        microbatch_sizes=tuple(data["microbatch_sizes"]),
        skips=tuple(
            SkipWork(key, source, target, dict(nbytes), returns)
            for key, source, target, nbytes, returns in data["skips"]
        ),
        loss=Kernels(*data["loss"]),
        optimizer=tuple(Kernels(*kernels) for kernels in data["optimizer"]),
        static_bytes=tuple(data["static_bytes"]),
        static=tuple(
            StaticMemory(tuple(resident), gradients, tuple(state), temporary)
            for resident, gradients, state, temporary in data["static"]
        ),
    )


def _encode_task(task: TaskWork) -> dict[str, Any]:
    encoded: dict[str, Any] = {name: getattr(task, name) for name in (*_TUPLES, *_PLAIN)}
    encoded |= {name: _encode_kernels(getattr(task, name)) for name in _PASSES}
    return encoded | {"checkpointed": task.checkpointed and _encode_task(task.checkpointed)}


def _decode_task(encoded: Mapping[str, Any]) -> TaskWork:
    values: dict[str, Any] = {name: tuple(encoded[name]) for name in _TUPLES}
    values |= {name: Kernels(*encoded[name]) for name in _PASSES}
    values |= {name: encoded[name] for name in _PLAIN}
    again = encoded["checkpointed"]
    return TaskWork(**values, checkpointed=again and _decode_task(again))


def _encode_requests(work: Workload) -> list[Any]:
    return [
        [[_encode_requests_of(task), _encode_requests_of(task.checkpointed, task)] for task in sizes.values()]
        for sizes in work.partitions
    ]


def _encode_requests_of(task: TaskWork | None, other: TaskWork | None = None) -> list[Any] | None:
    """Lists of requests; None for those that are the same as those of ``other``."""
    if task is None:
        return None
    lists = [(getattr(task, name), other and getattr(other, name)) for name in _MEMORIES]
    return [None if ops == same else _encode_memory(ops) for ops, same in lists]


def _with_memory(work: Workload, encoded: Sequence[Any]) -> Workload:
    """A workload with its requests for memory."""
    return replace(
        work,
        partitions=tuple(
            {size: _with_requests(task, *lists) for (size, task), lists in zip(sizes.items(), rows, strict=True)}
            for sizes, rows in zip(work.partitions, encoded, strict=True)
        ),
    )


def _with_requests(task: TaskWork, own: Sequence[Any], again: Sequence[Any] | None) -> TaskWork:
    values: dict[str, Any] = {name: _decode_memory(*row) for name, row in zip(_MEMORIES, own, strict=True)}
    if task.checkpointed is not None and again is not None:
        rows = [(name, row) for name, row in zip(_MEMORIES, again, strict=True) if row is not None]
        other = values | {name: _decode_memory(*row) for name, row in rows}
        values["checkpointed"] = replace(task.checkpointed, **other)
    return replace(task, **values)


def _encode_kernels(kernels: Kernels) -> list[int]:
    return [kernels.duration_ns, kernels.launches]


def _encode_memory(ops: Sequence[MemoryOp]) -> list[Any]:
    letters = "".join(_LETTERS[op.kind] for op in ops)
    return [letters, [op.block for op in ops], [op.bytes for op in ops]]


def _decode_memory(letters: str, blocks: Sequence[int], nbytes: Sequence[int]) -> tuple[MemoryOp, ...]:
    # What MemoryOp's own constructor does, a third of the time.
    make = partial(tuple.__new__, MemoryOp)
    return tuple(map(make, zip(map(_KINDS.__getitem__, letters), blocks, nbytes, strict=True)))
