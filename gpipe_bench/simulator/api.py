"""The simulator in one call: from a model, a pipeline and a machine to the times and the memory of a training step.

    step = simulate(Model("unet", {"C": 64}), balance=[60, 60, 60, 61], batch_size=128, chunks=32, profile="p40")
    print(step.status, step.throughput_samples_per_s, step.peak_reserved_gib)

    model, balance, batch ──> workload ──┐
                                         ├──> events ──> times, shares of the step, memory
    profile ──> machine ─────────────────┘

Results are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_bench.components import Components
from gpipe_bench.errors import ConfigError, OutOfMemory, ScheduleError
from gpipe_bench.machine.networks import NETWORK, machine_of
from gpipe_bench.machine.profile import HardwareMachine, Link, Profile, load_profile
from gpipe_bench.models.measured import assumptions, have_memory
from gpipe_bench.schedules import Schedule, check, derived, stuck
from gpipe_bench.schedules.table import is_schedule_file
from gpipe_bench.simulator.steps.run import Settings, Steps, step_events, step_uses
from gpipe_bench.simulator.steps.settings import check_devices, chosen_schedule, enough_steps
from gpipe_bench.simulator.workloads.build import build_workload, layers_of
from gpipe_bench.simulator.workloads.workload import Workload
from gpipe_bench.step.request import AnyModel, Model, Request, ScheduleLike, microbatch_sizes
from gpipe_bench.step.result import GIB, DeviceUse, Shortage, Step, busy_ns, pipeline_facts, summed_gib
from gpipe_bench.util.garbage import no_collection

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["DeviceUse", "Model", "Shortage", "Step", "simulate"]


def simulate(
    model: AnyModel,
    *,
    balance: Sequence[int],
    batch_size: int,
    chunks: int = 1,
    checkpoint: str = "except_last",
    components: Components = Components(),  # noqa: B008 - frozen
    schedule: ScheduleLike | None = None,
    transfer: str = "direct",
    optimizer: str | None = "sgd",
    masters: bool = True,
    profile: str | Path | Profile = "p40",
    devices: Sequence[int] = (),
    hosts: int = 1,
    network: str | Link = NETWORK,
    sample: Tensor | tuple[Tensor, ...] | None = None,
    loss: Callable[..., Tensor] | None = None,
    target: Tensor | None = None,
    precision: str = "float32",
    tf32: bool | None = None,
    launch_us: float | None = None,
    flavour: str = "current",
    steps: int | None = None,
    steps_overlap: bool = True,
    memory: bool = True,
    cache: str | Path | None = None,
    keep_trace: bool = False,
) -> Step:
    """Simulate the training of a pipeline; if a device has too little memory, say how much it needs.

    Args:
        model: a model of the suite, or an ``nn.Sequential`` on any device (``meta`` takes no memory), left as it is; or
            measured layers, such as those of :func:`read_layers`. Passes of these take their measured times. The
            profile gives the times of transfers and of the optimizer.
        balance: layers per partition.
        batch_size: samples of a mini-batch. Measured layers: ``chunks`` times those of the micro-batch measured.
        chunks: micro-batches of a mini-batch; a small one may give fewer.
        checkpoint: which micro-batches are recomputed: ``always``, ``except_last`` or ``never``.
        components: which components of the engine are on; default: all.
        schedule: a name, a schedule, or a list of ``(kind, i, j)`` for each device. None: autograd's backward pass.
        transfer: how tensors go from device to device: ``direct``, or ``host`` through pinned host memory.
        optimizer: ``sgd``, ``momentum``, ``rmsprop``, ``adam`` or ``adamw``; None for no update.
        masters: whether the optimizer keeps weights that are halves in float32, too.
        profile: name of a hardware profile, path of a YAML file, or a profile.
        devices: number of each partition's device; empty: as the schedule has them, one device per partition, or per
            two with ``interleaved``, ``looped_bfs``, ``zb_v``, ``v_half``, ``v_min`` and ``dualpipe_v``.
        hosts: that have the devices, as many each, host after host.
        network: between hosts: a link, or a name of one in ``machine/networks.yaml`` or the profile.
        sample: with an ``nn.Sequential``, tensors of shape (samples, ...) as it takes them.
        loss: with an ``nn.Sequential``, a function (output, target) -> scalar tensor; None for no loss.
        target: with a loss, the targets of a whole mini-batch.
        precision: ``float32`` leaves the model's types; ``float16``, ``bfloat16``: halves. Of measured layers it is the
            type of the parameters.
        tf32: whether float32 is rounded to TF32; None: in convolutions only, as PyTorch does it.
        launch_us: host time of an operation, microseconds; None: the profile's.
        flavour: autograd engine: ``current``, or ``published``, that of the published runs.
        steps: training steps; all but the first count. None: 2, more if threads race.
        steps_overlap: whether a step starts on a device while others still run the step before. False: a step ends on
            all devices, as in loops that clip gradients or read the loss; so does a single step.
        memory: whether to simulate the allocators. Measured layers without any size of theirs have no memory.
        cache: folder of stored traces; default: the user's cache folder.
        keep_trace: whether the step keeps the trace that ran, in ``replay``, which takes memory.

    Raises:
        ConfigError, BalanceError, ScheduleError, SkipLayoutError, TraceError: arguments are wrong, or cannot run.
    """
    return _answer(Request(
        model=model, balance=balance, batch_size=batch_size, chunks=chunks, checkpoint=checkpoint,
        components=components, schedule=schedule, transfer=transfer, optimizer=optimizer, masters=masters,
        profile=profile, devices=devices, hosts=hosts, network=network, sample=sample, loss=loss, target=target,
        precision=precision, tf32=tf32, launch_us=launch_us, flavour=flavour, steps=steps,
        steps_overlap=steps_overlap, memory=memory, cache=cache, keep_trace=keep_trace,
    ))  # fmt: skip


def _answer(request: Request) -> Step:
    request = request.checked()
    model, balance, schedule, hardware = request.model, request.balance, request.order, request.hardware
    layers = layers_of(model)
    _check_module(model)
    settings = Settings(
        components=request.components, checkpoint=request.checkpoint, flavour=request.flavour,
        transfer=request.transfer, memory=request.memory and (not layers or have_memory(layers)),
        devices=tuple(request.devices),
    )  # fmt: skip
    split = False
    if schedule is not None:
        m = len(microbatch_sizes(request.batch_size, request.chunks))
        settings, split = _scheduled(settings, schedule, m, len(balance))
    machine = machine_of(
        hardware, devices=max(settings.devices or range(len(balance))) + 1, hosts=request.hosts,
        network=request.network, transfer=request.transfer,
    )  # fmt: skip
    workload = build_workload(
        model, balance=balance, batch_size=request.batch_size, chunks=request.chunks, sample=request.sample,
        loss=request.loss, target=request.target, optimizer=request.optimizer, masters=request.masters,
        precision=request.precision, profile=hardware, cache=Path(request.cache) if request.cache else None,
        scheduled=schedule is not None, split=split, published=request.flavour == "published",
        shared=request.components.shared,
    )  # fmt: skip
    steps = request.steps or enough_steps(settings, workload.m * workload.n)
    facts = _model_facts(model) | pipeline_facts(
        settings.components,
        balance,
        hardware,
        transfer=request.transfer,
        flavour=request.flavour,
        checkpoint=request.checkpoint,
        backward="autograd" if schedule is None else "scheduled",
        chunks=request.chunks,
        batch_size=request.batch_size,
        device_count=len(set(settings.devices)) or len(balance),
        optimizer=request.optimizer or "none",
    )
    facts["hosts"] = request.hosts
    facts |= {"steps_overlap": request.steps_overlap and steps > 1, "precision": request.precision}
    if schedule is not None:
        facts["schedule"] = schedule if isinstance(schedule, str) else "own"
    runs = Steps(workload, machine, replace(settings, steps=steps))
    found = _simulated(runs, workload, machine, facts)
    later = None
    if request.steps is None and settings.memory and found.status == "ok" and not settings.races:
        later = _later_gib(runs, 2 * steps, found.peak_reserved_gib or 0)
    assumed = assumptions(layers, split=split, several=len(balance) > 1)
    kept = found.replay if request.keep_trace else None
    return replace(
        found, guessed_launch_us=request.guessed_launch_us, later_reserved_gib=later, assumptions=assumed, replay=kept
    )


@no_collection()
def _later_gib(runs: Steps, steps: int, before: float) -> float | None:
    """The peak of reserved memory after more steps, if it is larger than ``before``."""
    try:
        after = sum(device.peak_reserved for device in runs.memory(steps)) / GIB
    except OutOfMemory as error:
        after = max(before, (error.reserved + error.needed) / GIB)
    return after if after > before else None


def _scheduled(settings: Settings, given: str | Schedule, m: int, n: int) -> tuple[Settings, bool]:
    """``settings`` with a schedule that was checked, on its devices; and whether it splits backward passes."""
    if isinstance(given, Schedule):
        check(given)
    try:
        # From two micro-batches on, devices and parts of a named schedule are those of any m, whose actions come later.
        few = min(m, 2) if isinstance(given, str) and not is_schedule_file(given) else m
        chosen = chosen_schedule(given, few, n, settings.devices)
        check_devices(chosen.placement, settings.devices or chosen.placement)
        if chosen.messages:
            _check_messages(chosen, settings)
    except ScheduleError:
        raise
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    return replace(settings, schedule=given, devices=settings.devices or chosen.placement), chosen.splits


def _check_messages(schedule: Schedule, settings: Settings) -> None:
    """Refuse a list whose own messages wait for each other for ever, as they share a stream, or cannot be simulated."""
    if lines := stuck(derived(schedule), "pair"):
        rule = "messages of two ranks must be sent in the order in which they are received"
        raise ScheduleError([f"{rule}, got a list that is stuck, {'; '.join(lines)}; move SEND or RECV"])
    if settings.transfer != "direct":
        got = f"{settings.transfer!r} with SEND and RECV in the schedule"
        raise ConfigError([f"transfer must be 'direct', got {got}; leave them out of the list"])


def _check_module(model: AnyModel) -> None:
    """Refuse a module that the engine refuses."""
    if isinstance(model, Model | Sequence):
        return
    from gpipe_bench.autograd.sequential import check_outermost, check_sharing

    try:
        check_outermost(model)
        check_sharing(model)
    except (TypeError, ValueError) as error:
        raise ConfigError([str(error)]) from error


def _model_facts(model: AnyModel) -> dict[str, str]:
    if not isinstance(model, Model):
        return {"model": "layers" if isinstance(model, Sequence) else type(model).__name__}
    from gpipe_bench.models.table import check_arguments, format_arguments

    return {"model": model.name, "model_args": format_arguments(check_arguments(model.name, model.arguments))}


# What a simulation makes lives until its end, and the collector would go through it again and again.
@no_collection()
def _simulated(runs: Steps, workload: Workload, machine: HardwareMachine, facts: dict[str, Any]) -> Step:
    settings = runs.settings
    try:
        done = runs.run()
    except OutOfMemory as error:
        return _out_of_memory(runs, workload, machine, facts, error)
    if not facts["steps_overlap"]:
        # Between steps all devices are idle, so that a single step takes what each one does; memory is that of all.
        memory, settings = done.memory, replace(settings, steps=1, memory=False)
        done = replace(runs.run(1, memory=False), memory=memory)
    if not done.step_ns:
        raise ConfigError(["model must have something to compute, got a step without kernels; simulate more layers"])
    trace = done.replay.trace
    launching_ns, kernels_ns = busy_ns(trace, machine, last=len(trace.rows) // len(done.step_ends_ns))
    return Step(
        evidence="simulated",
        status="ok",
        throughput_samples_per_s=facts["batch_size"] / done.step_ns * 1e9,
        step_time_ms=done.step_ns / 1e6,
        microbatches=workload.m,
        devices=step_uses(done, done.devices, max(1, settings.steps - 1)),
        memory=done.memory,
        events=step_events(done)[0],
        peak_allocated_gib=summed_gib(done.peak_allocated_bytes),
        peak_reserved_gib=summed_gib(done.peak_reserved_bytes),
        settings=facts,
        host_fraction=launching_ns / done.step_ns,
        kernel_fraction=kernels_ns / done.step_ns,
        replay=done.replay,
    )


def step_launches(module: nn.Sequential, sample: Tensor, loss: Callable[..., Tensor]) -> int:
    """Operations of a training step on one device that take the host a launch, with an optimizer without state."""
    work: dict[str, Any] = {"balance": [len(module)], "batch_size": len(sample), "sample": sample, "loss": loss}
    workload = build_workload(module, profile=load_profile("h100"), **work)
    task = workload.task(0, 0)
    return sum(one.launches for one in (task.forward, task.backward, workload.loss, *workload.optimizer))


def _out_of_memory(
    runs: Steps, workload: Workload, machine: HardwareMachine, facts: dict[str, Any], error: OutOfMemory
) -> Step:
    """A simulation that says what the full device would have needed."""
    shortage = _shortage(runs, workload, machine, error)
    return Step(
        evidence="simulated",
        status="oom",
        reason=f"{shortage.text}; use smaller micro-batches, more partitions or more checkpoints",
        shortage=shortage,
        microbatches=workload.m,
        events=[],
        settings=facts,
    )


def _shortage(runs: Steps, workload: Workload, machine: HardwareMachine, error: OutOfMemory) -> Shortage:
    """What the full device would have needed, found by runs without limit, in the step that failed."""
    boundless = copy(machine)
    boundless.capacity_bytes = 0
    needed = runs.memory(1, boundless)[error.device]
    first = needed.peak_live > error.capacity or _is_full(runs)
    state = 0
    if not first:
        needed = runs.memory(runs.settings.steps, boundless)[error.device]
        places = runs.settings.devices or range(workload.n)
        statics = (one for place, one in zip(places, workload.static, strict=False) if place == error.device)
        state = sum(sum(static.state) for static in statics)
    total = needed.peak_live
    if total <= error.capacity:
        total = max(needed.peak_reserved, error.reserved + error.needed)
    return Shortage(
        device=error.device,
        needed_gib=total / GIB,
        capacity_gib=error.capacity / GIB,
        tensors_gib=needed.peak_live / GIB,
        state_gib=state / GIB,
        first_step=first,
    )


def _is_full(runs: Steps) -> bool:
    """Whether the first step ends because a device is full."""
    try:
        runs.memory(1)
    except OutOfMemory:
        return True
    return False
