"""What goes into a run and what comes of it, as short digests: a field for each thing that may differ by itself."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.simulator.clock.run import Run, Settings
from gpipe_bench.simulator.workloads.workload import HOST, Kernels, Machine, MemoryOp, TaskWork, Workload

__all__ = ["FIELDS", "INPUT", "input_of", "outcome_of", "short"]

INPUT: Final = "input"
"""The field of workload, machine and settings: where it differs, all others may."""

FIELDS: Final = ("order", "issue", "times", "live", "allocated", "reserved", "full")
"""Fields of an outcome.

order      kind, micro-batch, partition, device, stream and bytes of every task, in the order of issue
issue      when each task was issued
times      when each task starts and ends; ends of steps, makespan
live       peak of the bytes of tensors, per device; ``allocated`` and ``reserved`` likewise
full       how often each device gave segments back, if any did; of a run that ends because a device is full, which one
           it is and what it needs, has reserved, and may hold, in bytes: then all other fields are empty
"""

_DIGITS: Final = 5
_SETTINGS: Final = (
    *("checkpoint", "flavour", "transfer", "devices", "streams", "workers", "nesting_ns", "seed", "memory", "tally"),
    "steps",
)
_PASSES: Final = ("forward", "recompute", "backward")
_REQUESTS: Final = ("forward_memory", "graph_memory", "backward_memory")
_PLAIN: Final = ("output_bytes", "input_bytes", "leaving", "returning", "nodes", "learns", "returns")
_SIZES: Final = (0, 1, 4096, 10**6, 10**9)
_MOST: Final = 2000


def short(values: Iterable[object]) -> str:
    """A digest of some values, by what they look like."""
    return blake2b("\n".join(map(str, values)).encode(), digest_size=8).hexdigest()[:_DIGITS]


def outcome_of(outcome: Run | OutOfMemory) -> dict[str, str]:
    """The fields of a run, or of one that ended because memory ran out."""
    if isinstance(outcome, OutOfMemory):
        full = (outcome.device, outcome.needed, outcome.reserved, outcome.capacity)
        return {**dict.fromkeys(FIELDS, ""), "full": "device {} needs {} has {} of {}".format(*full)}
    tasks = [(task.kind, task.i, task.j, task.device, task.stream, task.nbytes) for task in outcome.issued]
    # Tasks that are alike, as those of several steps, are told apart by their times.
    spans = [(task.start_ns, task.end_ns) for task in outcome.issued]
    issues = [task.issue_ns for task in outcome.issued]
    rows = sorted(zip(tasks, spans, issues, strict=True))
    ends = (outcome.makespan_ns, *outcome.step_ends_ns)
    return {
        "order": short(f"{kind} {i} {j} {device} {stream} {size}" for kind, i, j, device, stream, size in tasks),
        "issue": short(issue for _, _, issue in rows),
        "times": short([*(f"{start} {end}" for _, (start, end), _ in rows), *ends]),
        "live": short(outcome.peak_live_bytes),
        "allocated": short(outcome.peak_allocated_bytes),
        "reserved": short(outcome.peak_reserved_bytes),
        "full": "-".join(map(str, outcome.flushes)) if any(outcome.flushes) else "",
    }


def input_of(workload: Workload, machine: Machine, settings: Settings) -> str:
    """A digest of all that decides a run; requests for memory do not where memory is not followed."""
    asked = [*_settings(settings), *_machine(workload, machine, settings)]
    return short([*asked, *_workload(workload, memory=settings.memory)])


def _settings(settings: Settings) -> Iterator[object]:
    yield settings.components.label
    yield []
    # Only cases have a tally.
    yield from (getattr(settings, name, False) for name in _SETTINGS)
    yield settings.schedule or "autograd"


def _machine(workload: Workload, machine: Machine, settings: Settings) -> Iterator[object]:
    """The machine, by what it says of the links that the workload uses."""
    devices = settings.devices or tuple(range(workload.n))
    ways = {(devices[j - 1], devices[j]) for j in range(1, workload.n)}
    ways |= {(devices[skip.source], devices[skip.target]) for skip in workload.skips}
    yield from (machine.launch_ns, machine.queue_depth, machine.capacity_bytes)
    for one, other in sorted(ways):
        for source, target in ((one, other), (other, one)):
            yield next(iter(machine.buses(source, target)), None)
            ends = ((source, target), (source, HOST), (HOST, target))
            yield [machine.copy_ns(*way, nbytes) for way in ends for nbytes in _SIZES]


def _workload(workload: Workload, *, memory: bool) -> Iterator[object]:
    yield workload.microbatch_sizes
    # Which kinds are the same decides a run, and not what they are called: that changes from process to process.
    scratch: dict[int, int] = {}
    for works in workload.partitions:
        for size, work in sorted(works.items()):
            digest, kinds = _task(work, memory=memory)
            yield size, digest, [scratch.setdefault(kind, len(scratch)) for kind in kinds]
    for skip in workload.skips:
        yield (skip.key, skip.source, skip.target, sorted(skip.bytes.items()), skip.returns)
    yield [_kernels(kernels) for kernels in (workload.loss, *workload.optimizer)]
    yield workload.static_bytes
    yield [(part.resident, part.gradients, part.state, part.temporary) for part in workload.static]


def _kernels(kernels: Kernels) -> tuple[int, int]:
    return kernels.duration_ns, kernels.launches


# Workloads share tasks, and lists of requests are long. A task is kept beside its digest, or its id would be another's.
_known: dict[tuple[int, bool], tuple[TaskWork, str, tuple[int, ...]]] = {}


def _task(work: TaskWork, *, memory: bool) -> tuple[str, tuple[int, ...]]:
    """A digest of a task, in which kinds of scratch memory are numbered, and the names of these kinds."""
    key = id(work), memory
    if key not in _known:
        if len(_known) > _MOST:
            _known.clear()
        rows = [getattr(work, name) for name in _REQUESTS if memory]
        kinds = {op.block: None for ops in rows for op in ops if op.kind == "scratch"}
        numbers = {name: number for number, name in enumerate(kinds)}
        values: list[Any] = [_kernels(getattr(work, name)) for name in _PASSES]
        values += [getattr(work, name) for name in _PLAIN]
        values += [_requests(ops, numbers) for ops in rows]
        if work.checkpointed is not None:
            digest, more = _task(work.checkpointed, memory=memory)
            values += [digest, [[*kinds].index(name) if name in kinds else "new" for name in more]]
            kinds |= dict.fromkeys(more)
        _known[key] = work, short(values), tuple(kinds)
    return _known[key][1:]


def _requests(ops: tuple[MemoryOp, ...], scratch: Mapping[int, int]) -> str:
    """A digest of some requests; ``scratch``: a number for each kind of scratch memory."""
    if not ops:
        return ""
    kinds, blocks, sizes = zip(*ops, strict=True)
    names = (scratch[block] if kind == "scratch" else block for kind, block in zip(kinds, blocks, strict=True))
    numbers = array("q", (*names, *sizes))
    return blake2b(" ".join(kinds).encode() + numbers.tobytes(), digest_size=8).hexdigest()
