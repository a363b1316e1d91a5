"""The emulator in one call: the engine trains a pipeline on virtual devices, and the steps take virtual time.

    run = emulate(Model("unet", {"C": 64}), balance=[60, 60, 60, 61], batch_size=128, chunks=32, profile="p40")
    print(run.status, run.step_time_ms, run.range_ms)

    engine: threads, autograd, streams, allocations ──> trace ──> replay on the profile ──> times of steps, memory

A process has virtual devices from the first call on. It must have run no backward pass before, none of the simulator's
traces either; call :func:`prepare` first where it is to do both.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch

from gpipe_bench.components import Components
from gpipe_bench.emulator.handovers import seen
from gpipe_bench.emulator.library import capacity
from gpipe_bench.emulator.library import devices as virtual_devices
from gpipe_bench.emulator.recording import IssuedTask, TaskRows, mark, name_tasks, recording
from gpipe_bench.emulator.shapes import load_shapes, updates_priced
from gpipe_bench.emulator.training import Training, Work, work_of
from gpipe_bench.errors import ConfigError, OutOfMemory
from gpipe_bench.machine.profile import HardwareMachine, Profile, load_profile
from gpipe_bench.machine.replay import DeviceMemory, Replay, Replayed, TaskTimes
from gpipe_bench.machine.trace import KINDS, Trace
from gpipe_bench.schedules import Schedule
from gpipe_bench.step.request import MOST_EMULATED_DEVICES, Model, Request, ScheduleLike, microbatch_sizes
from gpipe_bench.step.result import GIB, Step, busy_ns, device_uses, gib_texts, pipeline_facts
from gpipe_bench.step.timeline import Timeline
from gpipe_bench.util.garbage import no_collection

if TYPE_CHECKING:
    from torch import Tensor, nn


_MARK: Final = KINDS.index("mark")


def prepare(profile: str | Path | Profile) -> None:
    """Give this process virtual devices, if it has none; another profile changes what kernels cost from now on.

    Raises:
        ConfigError: there is no such profile, or it is wrong.
        CompilerError: the devices do not compile.
    """
    load_shapes(MOST_EMULATED_DEVICES, profile if isinstance(profile, Profile) else load_profile(profile))


def emulate(
    model: nn.Sequential | Model,
    *,
    balance: Sequence[int],
    batch_size: int,
    chunks: int = 1,
    checkpoint: str = "except_last",
    components: Components = Components(),  # noqa: B008 - frozen
    schedule: ScheduleLike | None = None,
    transfer: str = "direct",
    optimizer: str | None = "sgd",
    profile: str | Path | Profile = "p40",
    tf32: bool | None = None,
    launch_us: float | None = None,
    devices: Sequence[int] = (),
    sample: Tensor | None = None,
    loss: Callable[..., Tensor] | None = None,
    target: Tensor | None = None,
    steps: int = 2,
    steps_overlap: bool = True,
    host_time: bool = True,
    keep_trace: bool = False,
) -> Step:
    """Let the engine train a pipeline on virtual devices; if a device has too little memory, say how much it needs.

    Args:
        model: a model of the suite, or an ``nn.Sequential`` on any device, left as it is.
        balance: layers per partition.
        batch_size: samples of a mini-batch.
        chunks: how many micro-batches a mini-batch is split into; a small one may give fewer.
        checkpoint: which micro-batches are recomputed: ``always``, ``except_last`` or ``never``.
        components: which components of the engine are on; default: all.
        schedule: a name, a schedule, or a list of ``(kind, i, j)`` for each device; None: the paper's executor.
        transfer: how tensors go from device to device: ``direct``, or ``host`` through pinned host memory.
        optimizer: ``sgd``, ``momentum``, ``rmsprop``, ``adam`` or ``adamw``; None for no update.
        profile: name of a hardware profile, path of a YAML file, or a profile; one per process.
        tf32: whether float32 is rounded to TF32; None: in convolutions only, as PyTorch does it.
        launch_us: host time of an operation, microseconds; None: the profile's.
        devices: number of each device of the schedule, or of each partition's device; empty: 0, 1, and so on.
        sample: with an ``nn.Sequential``, a tensor of shape (samples, ...) as it takes them.
        loss: with an ``nn.Sequential``, a function (output, target) -> scalar tensor; None for the sum of the output.
        target: with a loss, the targets of a whole mini-batch.
        steps: training steps, at least 2; the first is a warm-up.
        steps_overlap: False: the host waits at the end of each step until all devices are idle.
        host_time: whether launches cost the host time, and launch queues are limited.
        keep_trace: whether the step keeps the trace that ran, in ``replay``, which takes memory.

    Raises:
        ConfigError: arguments are wrong, all of which it lists.
        BalanceError, ScheduleError: the balance does not fit the layers; the schedule does not exist for these numbers.
        CompilerError: the virtual devices do not compile.
    """
    return _emulated(Request(
        model=model, balance=balance, batch_size=batch_size, chunks=chunks, checkpoint=checkpoint,
        components=components, schedule=schedule, transfer=transfer, optimizer=optimizer, profile=profile, tf32=tf32,
        launch_us=launch_us, devices=devices, sample=sample, loss=loss, target=target, steps=steps,
        steps_overlap=steps_overlap, host_time=host_time, keep_trace=keep_trace,
    ))  # fmt: skip


def _emulated(request: Request) -> Step:
    request = request.checked_emulation()
    numbers = _numbers(request.devices, request.placement)
    hardware = request.hardware
    prepare(hardware)
    devices = [virtual_devices()[number] for number in numbers]
    work = work_of(request)
    trace, issued = _trained(work, request, devices)
    m = len(microbatch_sizes(request.batch_size, request.chunks))
    facts = _facts(work, request, hardware, devices)
    guess = request.guessed_launch_us
    base = Step(evidence="emulated", status="ok", microbatches=m, events=[], settings=facts, guessed_launch_us=guess)
    machine = HardwareMachine(hardware)
    run = Replay(trace, machine, host_time=request.host_time)
    run.run()
    replayed = run.rows()
    if replayed.shortage:
        return _out_of_memory(base, replayed.memory, replayed.shortage)
    launching = machine if request.host_time else None
    name_tasks(issued, replayed)
    device_of = tuple(numbers[rank] for rank in request.placement)
    each = tuple(_steps(base, replayed, run.tasks(), issued, device_of=device_of, host=launching))
    middle = median(step.step_time_ms or 0.0 for step in each)
    typical = min(each, key=lambda step: abs((step.step_time_ms or 0.0) - middle))
    return replace(typical, each=each, replay=run if request.keep_trace else None)


def _numbers(devices: Sequence[int], placement: Sequence[int]) -> list[int]:
    """The number of each device of the schedule; ``placement``: the rank of each partition."""
    count = max(placement) + 1
    numbers = list(devices) or list(range(count))
    if len(numbers) == len(placement) and len({*zip(placement, numbers, strict=True)}) == count:
        known = dict(zip(placement, numbers, strict=True))
        numbers = [known[rank] for rank in range(count)]
    if len(numbers) != count:
        got = ", ".join(map(str, numbers))
        rule = f"devices must have a number for each of the {count} devices of the schedule"
        raise ConfigError([f"{rule}, got {got}; change devices or balance"])
    if count > MOST_EMULATED_DEVICES:
        raise ConfigError([f"devices must be at most {MOST_EMULATED_DEVICES}, got {count}; use fewer partitions"])
    return numbers


def _trained(work: Work, request: Request, devices: Sequence[torch.device]) -> tuple[Trace, list[IssuedTask]]:
    """The trace and the tasks; if a device is full, those of devices without limit, which show what they need."""
    try:
        return _run(work, request, devices)
    except torch.OutOfMemoryError:
        pass
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(capacity(device, -1))
        return _run(work, request, devices)


# Storages then die by their reference counts alone, at the same rows in every run.
@no_collection()
def _run(work: Work, request: Request, devices: Sequence[torch.device]) -> tuple[Trace, list[IssuedTask]]:
    """Train some steps, each ended by a mark; returns the trace and the engine's tasks."""
    gc.collect()
    tasks = TaskRows()
    with recording() as trace, seen(), updates_priced():
        training = Training(work, request, devices)
        with training.pipe.observe(tasks):
            assert request.steps is not None  # noqa: S101 - as checked
            for _ in range(request.steps):
                _step(training)
                for device in () if request.steps_overlap else devices:
                    torch.accelerator.synchronize(device)
                mark()
    return trace, tasks.tasks


def _step(training: Training) -> None:
    try:
        training.step()
    except RuntimeError as error:
        # Autograd makes a thread for each device in its first backward pass, and none later.
        if "device_ready_queues_" not in str(error):
            raise
        rule = "emulate() must come before the first backward pass of the process, got one before"
        raise ConfigError([f"{rule}; call gpipe_bench.emulator.prepare first, or use another process"]) from error


def _facts(work: Work, request: Request, hardware: Profile, devices: Sequence[torch.device]) -> dict[str, Any]:
    """The columns of a row that describe model, pipeline and hardware."""
    own = pipeline_facts(
        request.components,
        request.balance,
        hardware,
        backward="scheduled" if request.schedule else "autograd",
        schedule="own" if isinstance(request.order, Schedule) else request.order or "gpipe",
        transfer=request.transfer,
        chunks=request.chunks,
        checkpoint=request.checkpoint,
        batch_size=request.batch_size,
        device_count=len({*devices}),
        steps_overlap=request.steps_overlap,
        precision="float32",
        optimizer=request.optimizer or "none",
    )
    return {**work.facts, **own}


def _steps(
    base: Step,
    replayed: Replayed,
    times: TaskTimes,
    issued: Sequence[IssuedTask],
    *,
    device_of: Sequence[int],
    host: HardwareMachine | None,
) -> list[Step]:
    """The steps after the first; ``host``: None where launches cost it nothing."""
    marks = [place for place, row in enumerate(replayed.trace.rows) if row.kind == _MARK]
    found = []
    for (before, after), (first, last) in zip(pairwise(replayed.marks), pairwise(marks), strict=True):
        own = [place for place, task in enumerate(issued) if first <= task.first < last]
        events, length_ns = Timeline(replayed.trace.tasks, times, own, before), after - before
        length_us = length_ns / 1e3
        launching_ns, kernels_ns = busy_ns(replayed.trace, host, first, last) if host else (0, 0)
        step = replace(
            base,
            throughput_samples_per_s=base.settings["batch_size"] / length_us * 1e6,
            step_time_ms=length_us / 1e3,
            devices=device_uses(replayed.memory, events, length_ns, device_of),
            memory=replayed.memory,
            events=events,
            host_fraction=launching_ns / length_ns if host else None,
            kernel_fraction=kernels_ns / length_ns if host else None,
            peak_allocated_gib=sum(device.peak_allocated for device in replayed.memory) / GIB,
            peak_reserved_gib=sum(device.peak_reserved for device in replayed.memory) / GIB,
        )
        found.append(replace(step, each=(step,)))
    return found


def _out_of_memory(base: Step, memory: Sequence[DeviceMemory], shortage: OutOfMemory) -> Step:
    """A result that says what the full device would need: for its tensors, or for its segments if those would fit."""
    peaks, what = memory[shortage.device], ""
    largest = peaks.peak_live
    if largest <= shortage.capacity:
        largest, what = peaks.peak_reserved, " of allocator segments"
    needed, held = gib_texts(largest / GIB, shortage.capacity / GIB)
    reason = f"device {shortage.device} needs {needed}{what} and has {held}"
    failed = replace(base, status="oom", reason=f"{reason}; use smaller micro-batches, more partitions or checkpoints")
    return replace(failed, each=(failed,))
