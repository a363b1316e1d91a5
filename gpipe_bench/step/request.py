"""What a simulation or an emulation is asked for: every argument is checked before anything runs, all at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Union

from gpipe_bench.components import Components
from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.networks import NETWORK
from gpipe_bench.machine.profile import MOST_LAUNCH_US, Link, Profile, load_profile
from gpipe_bench.models.measured import MeasuredLayer, is_layers
from gpipe_bench.schedules import SCHEDULES, Schedule
from gpipe_bench.schedules.table import is_schedule_file, placement
from gpipe_bench.util.choices import CHECKPOINT_MODES, FLAVOURS, OPTIMIZERS, PRECISIONS, TRANSFERS

if TYPE_CHECKING:
    from torch import Tensor, nn

MOST_EMULATED_DEVICES: Final = 16
"""Virtual devices of a process: ``kMaxDevices`` of the emulator's ``runtime.h``."""


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

_CHOICES: Final[Mapping[str, tuple[Any, ...]]] = {
    "checkpoint": CHECKPOINT_MODES,
    "transfer": TRANSFERS,
    "flavour": FLAVOURS,
    "optimizer": (*OPTIMIZERS, None),
    "precision": PRECISIONS,
}
_TYPES: Final[Mapping[str, tuple[Any, str]]] = {
    "model": (Model, "an nn.Sequential, a Model or MeasuredLayers of gpipe_bench.simulator; list its layers in one"),
    "components": (Components, "a gpipe_bench.Components; write Components(portals=False)"),
    "profile": (str | Path | Profile, "a name, a path or a Profile; use 'p40'"),
    "network": (str | Link, "a name or a Link; use 'ndr400'"),
    "memory": (bool, "True or False; pass a bool"),
    "steps_overlap": (bool, "True or False; pass a bool"),
    "keep_trace": (bool, "True or False; pass a bool"),
    "host_time": (bool, "True or False; pass a bool"),
    "masters": (bool, "True or False; pass a bool"),
    "tf32": (bool | None, "True, False or None; pass a bool"),
    "loss": (Callable | None, "a function of output and target, or None; pass a function"),
    "cache": (str | Path | None, "a folder or None; pass a path"),
}


def microbatch_sizes(batch_size: int, chunks: int) -> tuple[int, ...]:
    """Sizes of the micro-batches, as ``Tensor.chunk`` makes them: equal but the last, and maybe fewer than asked.

    Raises:
        ValueError: either is not positive.
    """
    for name, value in (("batch_size", batch_size), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}; use 1 or more")
    size = -(-batch_size // chunks)
    full, rest = divmod(batch_size, size)
    return (size,) * full + ((rest,) if rest else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of :func:`gpipe_bench.simulator.simulate` and of :func:`gpipe_bench.emulator.emulate`.

    What only one of them takes has its default for the other.
    """

    model: AnyModel
    balance: Sequence[int]
    batch_size: int
    chunks: int
    checkpoint: str
    components: Components
    schedule: ScheduleLike | None
    transfer: str
    optimizer: str | None
    profile: str | Path | Profile
    tf32: bool | None
    launch_us: float | None
    devices: Sequence[int]
    sample: Tensor | tuple[Tensor, ...] | None
    loss: Callable[..., Tensor] | None
    target: Tensor | None
    steps: int | None
    steps_overlap: bool
    keep_trace: bool
    # Of simulations alone.
    masters: bool = True
    hosts: int = 1
    network: str | Link = NETWORK
    precision: str = "float32"
    flavour: str = "current"
    memory: bool = True
    cache: str | Path | None = None
    # Of emulations alone.
    host_time: bool = True

    @property
    def order(self) -> str | Schedule | None:
        """The schedule or its name."""
        given = self.schedule
        return given if given is None or isinstance(given, str | Schedule) else Schedule.of(given)

    @property
    def homes(self) -> tuple[int, ...]:
        """For each partition its device of the schedule."""
        return placement(self.order, len(self.balance))

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

    def check(self) -> None:
        """Check all but whether a balance fits the model, and names of models and profiles, which show later.

        Raises:
            ConfigError: all problems at once.
        """
        _raise(self._problems(most_devices=2**16, per_partition=True))

    def check_emulated(self) -> None:
        """The same for an emulation: some pipelines can be simulated and not emulated.

        Raises:
            ConfigError: all problems at once.
        """
        found = [*self._problems(most_devices=MOST_EMULATED_DEVICES, per_partition=False)]
        if self.steps in (None, 1):
            found.append(f"steps must be a whole number of at least 2, got {self.steps}; the first is a warm-up")
        if is_layers(self.model):
            found.append("model must have layers that run, got measured times of layers; use simulate")
        if isinstance(self.sample, tuple):
            got = f"a tuple of {len(self.sample)}"
            found.append(f"sample must be a tensor, got {got}; let the first layer cut it up")
        _raise(found)

    def _problems(self, *, most_devices: int, per_partition: bool) -> Iterator[str]:
        """``most_devices``: they are numbered below this; ``per_partition``: ``devices`` has one for each partition."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        yield from _types(given)
        yield from _choices(given)
        yield from _numbers(given)
        yield from _devices(self.devices, most_devices, self.balance if per_partition else None)
        yield from _batch(self)
        yield from _schedule(self.schedule)


def _raise(problems: Iterable[str]) -> None:
    if found := [*problems]:
        raise ConfigError(found)


def _types(given: Mapping[str, Any]) -> Iterator[str]:
    for name, (kind, rule) in _TYPES.items():
        value = given[name]
        if not isinstance(value, kind) and not (name == "model" and _is_model(value)):
            wanted, _, advice = rule.partition("; ")
            yield f"{name} must be {wanted}, got {_shown(value)}; {advice}"


def _choices(given: Mapping[str, Any]) -> Iterator[str]:
    for name, allowed in _CHOICES.items():
        if given[name] not in allowed:
            yield f"{name} must be one of {', '.join(map(str, allowed))}, got {_shown(given[name])}; use one of them"


def _numbers(given: Mapping[str, Any]) -> Iterator[str]:
    for name in ("batch_size", "chunks", "hosts", "steps"):
        if not _is_count(given[name]) and not (name == "steps" and given[name] is None):
            yield f"{name} must be a whole number of at least 1, got {_shown(given[name])}; use 1 or more"
    launch_us = given["launch_us"]
    if launch_us is not None and not (_is_number(launch_us) and 0 < launch_us <= MOST_LAUNCH_US):
        yield f"launch_us must be more than 0 and at most {MOST_LAUNCH_US}, got {_shown(launch_us)}; use microseconds"
    balance = given["balance"]
    if not _is_list(balance) or not balance or not all(map(_is_count, balance)):
        yield f"balance must be a list of whole numbers of at least 1, got {_shown(given['balance'])}; use e.g. [2, 2]"


def _devices(devices: Any, most: int, partitions: Any) -> Iterator[str]:
    if not _is_list(devices) or not all(_is_count(device, least=0) for device in devices):
        yield f"devices must be a list of numbers from 0 on, got {_shown(devices)}; use e.g. [0, 0, 1, 1]"
    elif max(devices, default=0) >= most:
        yield f"devices must be numbers below {most}, got {max(devices)}; number them from 0 on"
    elif devices and _is_list(partitions) and len(devices) != len(partitions):
        yield f"devices must be one per partition, got {len(devices)} for {len(partitions)}; name each, or none"


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
            yield f"{rule}, got {_shown(schedule)}; use one of them"


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
            yield f"target must be a tensor with a batch dimension, got {_shown(target)}; pass one per sample"
        elif len(target) != training.batch_size:
            yield f"target must hold batch_size = {training.batch_size} samples, got {len(target)}; make them agree"


def _sample(sample: object) -> Iterator[str]:
    values: tuple[Any, ...] = sample if isinstance(sample, tuple) else (sample,)
    if not values or not all(map(_is_tensor, values)):
        yield f"sample must be a tensor or a tuple of tensors, got {_shown(sample)}; pass a batch as the model takes it"
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


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _shown(value: object) -> str:
    """A value in few words; of one with a long text its type."""
    plain = isinstance(value, str | int | float | list | tuple | None) and not _is_tensor(value)
    text = repr(value)
    return text if plain and len(text) <= 60 else f"a value of type {type(value).__name__}"
