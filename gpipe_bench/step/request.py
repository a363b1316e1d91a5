"""What a simulation or an emulation is asked for: every argument is checked before anything runs, all at once."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, Union

from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.networks import NETWORK
from gpipe_bench.machine.profile import Link, Profile, load_profile
from gpipe_bench.models.measured import MeasuredLayer, is_layers
from gpipe_bench.schedules import SCHEDULES, Schedule, table
from gpipe_bench.schedules.table import is_schedule_file
from gpipe_bench.settings import (
    FLAVOURS,
    OPTIMIZERS,
    PRECISIONS,
    BatchSize,
    Checkpoint,
    Chunks,
    DeviceNumbers,
    Hosts,
    LayerCounts,
    Steps,
    Switches,
    Transfer,
    checked,
    choice,
    instance,
    number,
    shown,
    switch,
    whole,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

MOST_EMULATED_DEVICES: Final = 16
"""Virtual devices of a process: ``kMaxDevices`` of the emulator's ``runtime.h``."""


Optimizer = Annotated[str, choice("what updates the parameters after each step", OPTIMIZERS)]
Precision = Annotated[str, choice("type of weights, activations and gradients", PRECISIONS)]
Masters = Annotated[bool, switch("whether the optimizer keeps a copy in float32 of each weight that is in a half")]
Tf32 = Annotated[bool | None, switch("round float32 to TF32; null: in convolutions alone, as PyTorch does it")]
LaunchUs = Annotated[
    float | None,
    number("host time of an operation, microseconds; null: that of the profile", 10**6, "microseconds"),
]
StepsOverlap = Annotated[
    bool, switch("whether a step starts while other devices run the one before; false: it ends on all devices")
]
Flavour = Annotated[str, choice("autograd engine: current, or published for PyTorch 1.3", FLAVOURS)]
HostTime = Annotated[bool, switch("let launches cost host time, and launch queues be full, as on the profile")]
EmulatedSteps = Annotated[int, whole("steps of a cell; the first is a warm-up", 2, 1000)]


@dataclass(frozen=True, slots=True)
class Model:
    """A model by name, which is traced once and kept on disk.

    Attributes:
        name: in the table of models, ``file.py:function``, or a file of measured layers, ``times.csv``.
        arguments: missing ones take their defaults.
    """

    name: str
    arguments: Mapping[str, Any]


AnyModel = Union["nn.Sequential", Model, Sequence[MeasuredLayer]]
"""What can be simulated."""


ScheduleLike = str | Schedule | Sequence[Sequence[tuple[str, int, int]]]
"""A name, a schedule, or a list of ``(kind, i, j)`` for each device."""


def microbatch_sizes(batch_size: int, chunks: int) -> tuple[int, ...]:
    """Sizes of the micro-batches, as ``Tensor.chunk`` makes them: equal but the last, and maybe fewer than asked.

    Raises:
        ValueError: either is not positive.
    """
    batch_size, chunks = checked("batch_size", BatchSize, batch_size), checked("chunks", Chunks, chunks)
    size = -(-batch_size // chunks)
    full, rest = divmod(batch_size, size)
    return (size,) * full + ((rest,) if rest else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of :func:`gpipe_bench.simulator.simulate` and of :func:`gpipe_bench.emulator.emulate`.

    What only one of them takes has its default for the other.
    """

    model: AnyModel
    balance: LayerCounts
    batch_size: BatchSize
    chunks: Chunks
    checkpoint: Checkpoint
    components: Switches
    schedule: ScheduleLike | None
    transfer: Transfer
    optimizer: Optimizer | None
    profile: Annotated[
        str | Path | Profile, instance("hardware", str | Path | Profile, "a name, a path or a Profile", "use 'p40'")
    ]
    tf32: Tf32
    launch_us: LaunchUs
    devices: DeviceNumbers
    sample: "Tensor | tuple[Tensor, ...] | None"
    loss: Annotated[
        Callable[..., "Tensor"] | None,
        instance("loss", Callable, "a function of output and target, or None", "pass a function"),
    ]
    target: "Tensor | None"
    steps: Steps | None
    steps_overlap: StepsOverlap
    keep_trace: Annotated[bool, switch("whether the result has the trace of its step")]
    # Of simulations alone.
    masters: Masters = True
    hosts: Hosts = 1
    network: Annotated[str | Link, instance("between hosts", str | Link, "a name or a Link", "use 'ndr400'")] = NETWORK
    precision: Precision = "float32"
    flavour: Flavour = "current"
    memory: Annotated[bool, switch("whether memory is simulated, too")] = True
    cache: Annotated[str | Path | None, instance("traces", str | Path, "a folder or None", "pass a path")] = None
    # Of emulations alone.
    host_time: HostTime = True

    @property
    def order(self) -> str | Schedule | None:
        """The schedule or its name."""
        given = self.schedule
        return given if given is None or isinstance(given, str | Schedule) else Schedule.of(given)

    @property
    def placement(self) -> tuple[int, ...]:
        """For each partition its rank: its device of the schedule."""
        return table.placement(self.order, len(self.balance))

    @property
    def hardware(self) -> Profile:
        """The profile itself."""
        known = self.profile if isinstance(self.profile, Profile) else load_profile(self.profile)
        return known.adapted(self.tf32, self.launch_us)

    @property
    def guessed_launch_us(self) -> float | None:
        """Host time of a launch in microseconds where nobody measured that of this host; else None."""
        known = self.hardware
        return None if self.launch_us is not None or known.has_own_host else known.host_us

    def checked(self) -> Self:
        """The same in Python's own numbers; whether a balance fits the model, and a profile is there, shows later.

        Raises:
            ConfigError: all problems at once.
        """
        return self._read(most_devices=2**16, per_partition=True)

    def checked_emulation(self) -> Self:
        """The same for an emulation: some pipelines can be simulated and not emulated.

        Raises:
            ConfigError: all problems at once.
        """
        return self._read(most_devices=MOST_EMULATED_DEVICES, per_partition=False, emulated=True)

    def _read(self, *, most_devices: int, per_partition: bool, emulated: bool = False) -> Self:
        """``most_devices``: they are numbered below this; ``per_partition``: ``devices`` has one for each partition."""
        values: dict[str, Any] = {}
        problems: list[str] = []
        for one in fields(self):
            kind = EmulatedSteps if emulated and one.name == "steps" else one.type
            try:
                values[one.name] = checked(one.name, kind, getattr(self, one.name))
            except (TypeError, ValueError) as error:
                problems.append(str(error))
        if not isinstance(self.model, Model) and not _is_model(self.model):
            rule = "model must be an nn.Sequential, a Model or MeasuredLayers of gpipe_bench.simulator"
            problems.append(f"{rule}, got {shown(self.model)}; list its layers in one")
        if "devices" in values:
            partitions = len(values["balance"]) if per_partition and "balance" in values else 0
            problems += _devices(values["devices"], most_devices, partitions)
        problems += [*_batch(self), *_schedule(self.schedule)]
        if emulated and is_layers(self.model):
            problems.append("model must have layers that run, got measured times of layers; use simulate")
        if emulated and isinstance(self.sample, tuple):
            got = f"a tuple of {len(self.sample)}"
            problems.append(f"sample must be a tensor, got {got}; let the first layer cut it up")
        if problems:
            raise ConfigError(problems)
        return replace(self, **values)


def _devices(devices: Sequence[int], most: int, partitions: int) -> Iterator[str]:
    if max(devices, default=0) >= most:
        yield f"devices must be numbers below {most}, got {max(devices)}; number them from 0 on"
    elif devices and partitions and len(devices) != partitions:
        yield f"devices must be one per partition, got {len(devices)} for {partitions}; name each, or none"


def _schedule(schedule: object) -> Iterator[str]:
    """Why something is no schedule; whether it can run shows later."""
    rule = (
        f"schedule must be one of {', '.join(SCHEDULES)}, a CSV file, a Schedule, or a list of (kind, i, j) per device"
    )
    if isinstance(schedule, str):
        if schedule not in SCHEDULES and not is_schedule_file(schedule):
            yield f"{rule}, got {schedule!r}; use one of them"
    elif schedule is not None and not isinstance(schedule, Schedule):
        try:
            Schedule.of(schedule)  # type: ignore[arg-type]  # that is the question
        except (TypeError, ValueError):
            yield f"{rule}, got {shown(schedule)}; use one of them"


def _batch(training: Request) -> Iterator[str]:
    target: Any = training.target
    sample, loss = training.sample, training.loss
    if isinstance(training.model, Model) or is_layers(training.model):
        why = "a model of the suite, which brings its own" if isinstance(training.model, Model) else "measured layers"
        for name in ("sample", "loss", "target"):
            if getattr(training, name) is not None:
                yield f"{name} must be None with {why}; leave it out"
        return
    yield from _sample(sample)
    if (loss is None) != (target is None):
        got = "a loss alone" if target is None else "a target alone"
        yield f"loss and target must be given together, got {got}; add the other, or leave both out"
    elif loss is not None:
        if not _is_tensor(target) or not target.dim():
            yield f"target must be a tensor with a batch dimension, got {shown(target)}; pass one per sample"
        elif len(target) != training.batch_size:
            yield f"target must hold batch_size = {training.batch_size} samples, got {len(target)}; make them agree"


def _sample(sample: object) -> Iterator[str]:
    values: tuple[Any, ...] = sample if isinstance(sample, tuple) else (sample,)
    if not values or not all(map(_is_tensor, values)):
        yield f"sample must be a tensor or a tuple of tensors, got {shown(sample)}; pass a batch as the model takes it"
    elif not all(value.dim() and len(value) for value in values):
        yield "sample must hold one sample or more along dimension 0, got none; unsqueeze it, or pass a batch"
    elif len({len(value) for value in values}) > 1:
        sizes = [len(value) for value in values]
        yield f"sample must be tensors of one batch size, got {sizes}; make their first dimensions equal"


def _is_model(value: object) -> bool:
    return _is_of_torch(value, "nn.Sequential") or is_layers(value)


def _is_tensor(value: object) -> bool:
    return _is_of_torch(value, "Tensor")


def _is_of_torch(value: object, name: str) -> bool:
    """Whether a value is of a type of PyTorch, which takes a second to load: what it made is there only if it is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, attrgetter(name)(torch))
